"""A small LLaMA-shaped model over made text: its rows as tokens, tokenizer, shape, loss and probes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.made_text import Row, made
from silotune.core.randomness import derive, sampler
from silotune.data.batching import pad_lists
from silotune.data.scores import exact_match, rouge1
from silotune.data.templates import InstructionTemplate

PROMPT_WEIGHT, PASSAGE_WEIGHT = 0.1, 0.3
"""What a token counts in the loss; an answer's counts 1."""
PROBES = 100
PROBED = ("copy", "option", "letter", "yes-no", "short")
ANSWER = 80
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True)
class Shape:
    """Of the model, and of its training.

    `tokens` are those of a step's batch, `at_once` those of one forward; `tokenizer_rows`: what words are learned from.
    """

    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    intermediate: int = 512
    positions: int = 1024
    tokens: int = 3072
    at_once: int = 2048
    tokenizer_rows: int = 20_000


# -- rows --------------------------------------------------------------------------------------------------------------


def held_out(row: Row) -> bool:
    """Whether a row is kept out of training."""
    return hashlib.sha256(f"{row.instruction}\n{row.answer}".encode()).digest()[0] < 4


def rows_of(seed: int, *purpose: str | int, unseen: bool = False) -> Iterator[Row]:
    """Rows without end, of training or (`unseen`) held out."""
    draws = sampler(seed, "pretraining", *purpose)
    while True:
        row = made(draws)
        if held_out(row) is unseen:
            yield row


@dataclass(frozen=True)
class Encoded:
    """A row as token ids, and what each token counts in the loss (the first is never predicted)."""

    ids: list[int]
    weights: list[float]


def encode(tokenizer: Any, rows: Sequence[Row]) -> list[Encoded]:
    """Prompt, answer and end token, as silotune's language-model head puts them together."""
    fill, end = InstructionTemplate(), int(tokenizer.eos_token_id)
    prompts = tokenizer([fill((row.instruction, "")) if row.instruction else "" for row in rows])["input_ids"]
    answers = tokenizer([row.answer for row in rows], add_special_tokens=False)["input_ids"]
    encoded = []
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        before = prompt if row.instruction else prompt[:1]  # the start token
        weight = 1.0 if row.instruction else PASSAGE_WEIGHT
        response = [*answer, end]
        encoded.append(Encoded([*before, *response], [PROMPT_WEIGHT] * len(before) + [weight] * len(response)))
    return encoded


def pieces(rows: Sequence[Encoded], at_once: int) -> Iterator[list[Encoded]]:
    """Rows of like length together, so many that their rectangle holds about `at_once` tokens."""
    group: list[Encoded] = []
    for row in sorted(rows, key=lambda one: len(one.ids)):
        if group and (len(group) + 1) * len(row.ids) > at_once:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


# -- the model ---------------------------------------------------------------------------------------------------------


def make_tokenizer(seed: int, shape: Shape) -> Any:
    """Byte-level BPE. A blank is put before every text, so that an answer's first word is the token it is in a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    stream = rows_of(seed, "tokenizer")
    fill = InstructionTemplate()
    texts = (row for _, row in zip(range(shape.tokenizer_rows), stream, strict=False))
    tokenizer.train_from_iterator((fill((row.instruction, "")) + row.answer for row in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=shape.positions,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **names,
    )


def make_model(seed: int, shape: Shape, tokenizer: Any) -> Any:
    """The model before training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        initializer_range=0.03,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "pretraining", "init"))
        return LlamaForCausalLM._from_config(
            config, attn_implementation="sdpa" if torch.cuda.is_available() else "eager"
        )


def weighted_loss(model: nn.Module, rows: Sequence[Encoded], precision: str) -> tuple[Tensor, float]:
    """Sum of weight times cross-entropy over the rows' tokens, and the sum of the weights."""
    device = next(model.parameters()).device
    width = -(-max(len(row.ids) for row in rows) // 16) * 16  # kernels are kept per shape: few shapes
    ids, mask = (tensor.to(device) for tensor in pad_lists([row.ids for row in rows], 0, width=width))
    weights = torch.zeros(ids.shape, device=device)
    for index, row in enumerate(rows):
        weights[index, : len(row.ids)] = torch.tensor(row.weights, device=device)
    weights = weights[:, 1:]
    with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum(), float(weights.sum())


# -- probes ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: nn.Module, tokenizer: Any, seed: int, number: int = 2 * PROBES) -> float:
    """Mean cross-entropy of the answers' tokens, over held-out instructions."""
    stream = rows_of(seed, "held out", unseen=True)
    rows = [row for _, row in zip(range(number), stream, strict=False) if row.instruction]
    sums = weights = 0.0
    for group in pieces([_answers(one) for one in encode(tokenizer, rows)], 8192):
        loss, weight = weighted_loss(model, group, "fp32")
        sums, weights = sums + float(loss), weights + weight
    return sums / weights


def _answers(row: Encoded) -> Encoded:
    return Encoded(row.ids, [float(weight == 1.0) for weight in row.weights])


def probes(folder: Path, seed: int, number: int = PROBES) -> dict[str, Any]:
    """How often held-out instructions are answered exactly, by kind, in percent; `chance`: of guessing an option.

    Read from the folder as silotune reads it, answered by its own greedy generation.
    """
    from silotune.data.rows import Row as Instruction
    from silotune.data.tasks import make_task
    from silotune.models.backbone.loading import load_backbone
    from silotune.models.forward.generation import GenerationOptions, generate
    from silotune.models.heads.lm import LanguageModelHead, prompt_rows

    head = LanguageModelHead(generation=GenerationOptions(max_new_tokens=ANSWER))
    backbone = load_backbone(str(folder), precision="fp32", model_class="AutoModelForCausalLM")
    tokenize = head.row_tokenizer(backbone, 1024)
    report: dict[str, Any] = {"loss": held_out_loss(backbone.model, backbone.tokenizer, seed)}
    for kind in PROBED:
        stream = rows_of(seed, "probes", kind, unseen=True)
        rows: list[Row] = []
        while len(rows) < number:
            row = next(stream)
            if row.kind == kind:
                rows.append(row)
        instructions = [Instruction((row.instruction, ""), 0, row.answer) for row in rows]
        prompts = prompt_rows(tokenize(make_task(kind, kind, "generation"), instructions))
        written, answers = generate(backbone, prompts, [], head.generation), [row.answer for row in rows]
        report[kind] = {"exact": exact_match(written, answers), "rouge1": rouge1(written, answers)}
        options = [row.instruction.count("\n- ") + row.instruction.count("\n(") for row in rows]
        if all(options):
            report[kind]["chance"] = 100 * sum(1 / count for count in options) / number
    return report
