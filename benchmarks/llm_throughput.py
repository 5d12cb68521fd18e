"""Tokens per second of LoRA training against transformers' Trainer with peft, and of writing against `generate`.

Without `--model`, a Llama of random weights over words without meaning; with it, any causal model's folder. Both sides
have the same token ids, LoRA (r = 8 on query and value), batch size, Adam, learning rate and precision, and pad a batch
to its longest row at most. The peer runs with each attention that transformers has for it (`eager`, `sdpa`), and the
faster one is compared.

* Training: one pass over all rows. Ours is a silo's turn in a federation: the broadcast's bytes in, its round, its
  update's bytes out. A token is one that the rows have; padding does not count.
* Generation: greedy, both with the same adapter (exported to peft's format), prompts sorted by length, equally many at
  a time. A token is one that is written. `same_answers` says how many answers are equal, token by token.

Sides alternate within one run; ratios are medians over the turns. The last key `ratio` is the smaller of the two: ours
over the peer's, in tokens per second.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternating import alternate, ratio
from benchmarks.random_llama import save_random_llama
from silotune.core.randomness import generator
from silotune.core.tensors import State, Tensors
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.federation_scores import current_model_state
from silotune.interop.adapters import peft_layout
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.forward.mixing import MixEntry
from silotune.models.heads.lm import prompt_rows
from silotune.models.tuners.base import MergedAdapter
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation

ATTENTIONS = ("eager", "sdpa")
TARGETS = ("q_proj", "v_proj")
RATE = 1e-3


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Args:
        rows: training rows.
        batch: rows of an optimizer step.
        instruction: words of an instruction, at least and at most.
        answer: words of an answer, likewise.
        prompts: prompts that are answered, as many at a time as `at_once`.
        new_tokens: tokens of an answer at most.
        at_once: prompts of one batch.
        width, blocks: of the random model.
        max_length: tokens of a row at most.
    """

    rows: int = 64
    batch: int = 16
    instruction: tuple[int, int] = (16, 96)
    answer: tuple[int, int] = (8, 48)
    prompts: int = 32
    new_tokens: int = 32
    at_once: int = 32
    width: int = 256
    blocks: int = 4
    max_length: int = 512


TINY = Sizes(8, 4, (4, 8), (2, 4), 4, 3, 4, 32, 2, 64)


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32,bf16", help="one or several of fp32, bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="a causal model's folder; else a small Llama of random weights")


def measure(
    repeats: int = 5,
    threads: int = 2,
    precision: str = "fp32,bf16",
    device: str = "cpu",
    model: str | None = None,
    sizes: Sizes = Sizes(),
    words: bool | None = None,
) -> dict[str, Any]:
    """Tokens per second of each side at each precision, and the ratios.

    `words`: whether texts are of the random model's words; None: they are where that model is made here.
    """
    torch.set_num_threads(threads)
    report: dict[str, Any] = {"repeats": repeats, "threads": threads, "device": device}
    with tempfile.TemporaryDirectory() as directory:
        folder = model or save_random_llama(Path(directory) / "llama", sizes.width, sizes.blocks)
        for name in precision.split(","):
            ours = _federation(folder, name, device, threads, sizes, model is None if words is None else words)
            for part in (training, writing):
                report |= {f"{name}_{key}": value for key, value in part(ours, folder, name, sizes, repeats).items()}
                gc.collect()
    return report | {"ratio": min(value for key, value in report.items() if key.endswith("_ratio"))}


def training(ours: Federation, folder: str, precision: str, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """One pass over the rows by each side."""
    silo = next(iter(ours.silos.values()))
    rows = next(iter(silo.train.values()))
    client, broadcast = ours.client(), ours.coordinator.broadcast(1)

    def our_round() -> None:
        (reply,) = client.rounds([silo], broadcast)
        assert reply.message, "the silo refused to train"

    device = ours.backbone.device
    work: dict[str, Callable[[], object]] = {"ours": our_round}
    for attention in ATTENTIONS:
        work[attention] = _trainer(folder, attention, precision, device, rows, sizes)
    return _compared("train", alternate(work, repeats), sum(map(len, rows.ids)))


def writing(ours: Federation, folder: str, precision: str, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """The same prompts answered by each side under the same adapter."""
    backbone, tuner = ours.backbone, ours.method.setting.tuner
    silo = next(iter(ours.silos.values()))
    tensors = _moved(current_model_state(ours, silo))
    prompts = prompt_rows(next(iter(silo.evaluations.values())).test).ids
    mix = [MixEntry(tuner, backbone.place(tensors), 1.0)]
    generation = GenerationOptions(1, sizes.new_tokens)
    written: dict[str, list[list[int]]] = {}

    def our_answers() -> None:
        written["ours"] = generate_ids(backbone, prompts, mix, generation, sizes.at_once)

    work: dict[str, Callable[[], object]] = {"ours": our_answers}
    for attention in ATTENTIONS:
        peer = _peft(folder, attention, precision, backbone.device)
        _load_adapter(peer, ours, tensors)

        def answers(attention: str = attention, peer: Any = peer) -> None:
            written[attention] = _generate(peer, prompts, backbone.pad_id, sizes, precision)

        work[attention] = answers
    times = alternate(work, repeats)
    count = sum(map(len, written["ours"]))
    equal = {name: sum(a == b for a, b in zip(written["ours"], written[name], strict=True)) for name in ATTENTIONS}
    result = _compared("generate", times, count)
    return {"generate_same_answers": f"{max(equal.values())} of {len(prompts)}"} | result


def _compared(name: str, times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Tokens per second of each side, and the ratio to the faster peer."""
    medians = {side: statistics.median(seconds) for side, seconds in times.items()}
    best = min(ATTENTIONS, key=medians.__getitem__)
    report: dict[str, Any] = {
        f"{name}_{side}_tokens_per_second": round(tokens / seconds, 1) for side, seconds in medians.items()
    }
    return report | {f"{name}_{key}": value for key, value in ratio(times[best], times["ours"]).items()}


# -- ours --------------------------------------------------------------------------------------------------------------


def _federation(folder: str, precision: str, device: str, threads: int, sizes: Sizes, words: bool) -> Federation:
    """One silo that trains on all rows."""
    task = Task("writing", (), "rouge1", "generation")
    train, test = _rows(sizes.rows, sizes, words), _rows(sizes.prompts, sizes, words, "prompts")
    config = read_config(
        "demo",
        [
            *("method=fedavg", "method.adapters=1", "tuner=lora", "tuner.r=8", "tuner.alpha=16", "head=lm"),
            *("aggregation=samples", "rounds=1", "train.epochs=1", "train.optimizer=adam", "data.merge=false"),
            *(f"backbone={folder}", f"precision={precision}", f"device={device}", f"threads={threads}"),
            *(f"train.batch_size={sizes.batch}", f"train.max_length={sizes.max_length}", f"train.lr={RATE}"),
            f"head.max_new_tokens={sizes.new_tokens}",
        ],
    )
    return build(config, data=[SiloData("writer", task, Splits(train, [], test))])


def _rows(count: int, sizes: Sizes, words: bool, purpose: str = "rows") -> list[Row]:
    """Rows of random words: those of the random model, or a few of English."""
    draws = generator(1, "llm-throughput", purpose)
    vocabulary = [f"w{number}" for number in range(5, 2000)] if words else ENGLISH

    def text(low: int, high: int) -> str:
        length = int(torch.randint(low, high + 1, (), generator=draws))
        return " ".join(vocabulary[index] for index in torch.randint(len(vocabulary), (length,), generator=draws))

    return [Row((text(*sizes.instruction), ""), 0, text(*sizes.answer)) for _ in range(count)]


ENGLISH = ["the", "river", "was", "cold", "and", "every", "letter", "about", "its", "old", "bridge", "came", "back"]


def _moved(state: State) -> Tensors:
    """The adapter, moved away from its start, where it changes nothing."""
    draws = generator(1, "llm-throughput", "adapter")
    (tensors,) = (part for part in state.values() if part)
    return {name: tensor + 0.02 * torch.randn(tensor.shape, generator=draws) for name, tensor in tensors.items()}


# -- the peer ----------------------------------------------------------------------------------------------------------


def _peft(folder: str, attention: str, precision: str, device: torch.device) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    return get_peft_model(model.to(device), config)


def _load_adapter(peer: Any, ours: Federation, tensors: Tensors) -> None:
    """Give the peer's adapter our tensors, by the names of our export."""
    from peft import set_peft_model_state_dict

    tuner = ours.method.setting.tuner
    adapter = MergedAdapter(tensors, tuner.options.model_dump(mode="json"))
    layout = peft_layout(ours.backbone, tuner, adapter, "", "AutoModelForCausalLM")
    assert layout is not None, "peft has LoRA"
    outcome: Any = set_peft_model_state_dict(peer, layout.tensors)
    assert not outcome.unexpected_keys, outcome.unexpected_keys
    peer.eval()


def _trainer(
    folder: str, attention: str, precision: str, device: torch.device, rows: TokenizedRows, sizes: Sizes
) -> Callable[[], None]:
    """A function that trains one pass; every call goes on from the last one's weights, which costs the same."""
    from transformers import Trainer, TrainingArguments

    assert rows.reads is not None, "rows of a language-model head"
    examples = []
    for ids, reads in zip(rows.ids, rows.reads, strict=True):
        prompt = reads[0] + 1
        examples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})

    def collate(samples: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in samples)

        def padded(key: str, filler: int) -> torch.Tensor:
            return torch.tensor([row[key] + [filler] * (width - len(row[key])) for row in samples])

        mask = torch.tensor([[int(at < len(row["input_ids"])) for at in range(width)] for row in samples])
        return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": padded("labels", -100)}

    model = _peft(folder, attention, precision, device)
    directory = tempfile.mkdtemp()

    def run() -> None:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=1,
            per_device_train_batch_size=sizes.batch,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            bf16=precision == "bf16",
            use_cpu=device.type == "cpu",
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collate).train()

    return run


@torch.no_grad()
def _generate(peer: Any, prompts: Sequence[Sequence[int]], pad: int, sizes: Sizes, precision: str) -> list[list[int]]:
    """Greedy answers without the end token, in the prompts' order."""
    device = next(peer.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    ends = peer.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    for begin in range(0, len(order), sizes.at_once):
        rows = order[begin : begin + sizes.at_once]
        width = max(len(prompts[row]) for row in rows)
        ids = torch.tensor([[pad] * (width - len(prompts[row])) + list(prompts[row]) for row in rows], device=device)
        lengths = torch.tensor([len(prompts[row]) for row in rows], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
        written = peer.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=sizes.new_tokens, pad_token_id=pad
        )
        for row, tokens in zip(rows, written[:, width:].tolist(), strict=True):
            stop = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
            answers[row] = tokens[:stop]
    return answers
