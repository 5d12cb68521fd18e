"""Personalised prediction and generation: batched against row by row, and dynamic weighting against none.

Classification: FedDPA-F with LoRA (r = 8) on MiniLM over the demo's test rows; every text has a mix of its own, and
goes through in batches of 64 (`batched`) or alone (`single`). `fixed` is the same model with one mix for all texts.
Parts are untrained but moved from their start: it is time that is measured. Generation: a Llama of random weights
(width 256, 4 blocks, vocabulary 2,000), 32 prompts of 8 to 64 tokens, 32 new tokens each, greedy; mixes by row in one
batch or row by row. `dynamic_over_fixed`: a text costs two forwards instead of one. The last key is rows per second,
batched over row by row, of classification under dynamic weighting.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternating import alternate, ratio
from silotune.assembly.building import build
from silotune.assembly.configuration import read_config
from silotune.backbone import Backbone
from silotune.data.batching import TokenisedRows
from silotune.evaluation import predict
from silotune.evaluation.scores import state_of
from silotune.generation import generate_ids
from silotune.heads.lm import GenerationOptions
from silotune.mixing import Ingredient, of_rows
from silotune.randomness import generator
from silotune.silo import SiloState
from silotune.training import LocalTraining
from silotune.tuners.lora import LoRA, LoRAOptions

PROMPTS, NEW_TOKENS, WIDTH, VOCABULARY = 32, 32, 256, 2000


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto")


def measure(repeats: int, rows: int, threads: int, precision: str) -> dict[str, Any]:
    """Rows per second of each way, and the ratios."""
    found: dict[str, Any] = {"repeats": repeats, "rows": rows}
    classify, number = _classification(rows, threads, precision, found)
    times = alternate(classify, repeats)
    generation = alternate(_generation(precision), repeats)
    for name, seconds in times.items():
        found[f"classify_{name}_rows_per_second"] = round(number / statistics.median(seconds), 1)
    for name, seconds in generation.items():
        found[f"generate_{name}_tokens_per_second"] = round(PROMPTS * NEW_TOKENS / statistics.median(seconds), 1)
    found["generate_batched_over_single"] = ratio(generation["single"], generation["batched"])["ratio"]
    found["dynamic_over_fixed"] = ratio(times["batched"], times["fixed"])["ratio"]
    return found | ratio(times["single"], times["batched"])


def _classification(
    rows: int, threads: int, precision: str, found: dict[str, Any]
) -> tuple[dict[str, Callable[[], object]], int]:
    """The three ways over some of every silo's test rows."""
    words = ["method=feddpa-f", "tuner=lora", "head=mlp", f"threads={threads}", f"precision={precision}"]
    dynamic = build(read_config("demo", words))
    fixed = build(read_config("demo", [*words, "method.weighting=fixed"]), dynamic.backbone)
    found |= {"precision": dynamic.backbone.precision, "threads": torch.get_num_threads()}
    judged: list[tuple[LocalTraining, LocalTraining, Any, TokenisedRows]] = []
    for silo in dynamic.silos.values():
        silo.state = SiloState(_moved(dynamic.training.state_of(silo).private))
        test = next(iter(silo.evaluations.values())).test
        judged.append((dynamic.training, fixed.training, state_of(dynamic, silo), _first(test, range(rows))))

    def batched() -> None:
        for training, _, state, texts in judged:
            predict.logits(training, state, texts)

    def single() -> None:
        for training, _, state, texts in judged:
            for row in range(len(texts)):
                predict.logits(training, state, _first(texts, [row]))

    def without() -> None:
        for _, training, state, texts in judged:
            predict.logits(training, state, texts)

    return {"batched": batched, "single": single, "fixed": without}, sum(len(texts) for *_, texts in judged)


def _first(rows: TokenisedRows, chosen: Sequence[int]) -> TokenisedRows:
    """Some of the rows."""
    places = [row for row in chosen if row < len(rows)]
    types = None if rows.types is None else [rows.types[row] for row in places]
    return TokenisedRows(rows.task, [rows.ids[row] for row in places], types, rows.labels[places])


def _moved(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    draws = generator(1, "moved")
    return {
        part: {name: tensor + 0.02 * torch.randn(tensor.shape, generator=draws) for name, tensor in tensors.items()}
        for part, tensors in state.items()
    }


def _generation(precision: str) -> dict[str, Callable[[], object]]:
    backbone = _llama(precision)
    draws = generator(1, "prompts")
    lengths = torch.randint(8, 65, (PROMPTS,), generator=draws).tolist()
    prompts = [torch.randint(5, VOCABULARY, (length,), generator=draws).tolist() for length in lengths]
    tuner = LoRA(LoRAOptions())
    parts = [tuner.init(backbone, [], generator(1, "part", number)) for number in range(2)]
    alpha = torch.rand(PROMPTS, generator=draws)
    mix = [Ingredient(tuner, part, weight) for part, weight in zip(parts, (1 - alpha, alpha), strict=True)]
    how = GenerationOptions(beams=1, max_new_tokens=NEW_TOKENS)

    def batched() -> None:
        generate_ids(backbone, prompts, mix, how)

    def single() -> None:
        for row, prompt in enumerate(prompts):
            generate_ids(backbone, [prompt], of_rows(mix, [row]), how)

    return {"batched": batched, "single": single}


def _llama(precision: str) -> Backbone:
    """A causal model of random weights that never ends a text by itself (its end token is out of reach)."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from silotune.pretrained import resolve_precision

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[2].zero_()
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w2"
    )
    return Backbone(model, tokenizer, precision=resolve_precision(precision))
