"""Generate the answers to prompts under a mix, in batches of prompts of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from silotune.data.chat_template import turn_end_ids
from silotune.data.tokenized import TokenizedRows
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import MixEntry, fold_entries, group_by_weight, make_plan, select_rows

if TYPE_CHECKING:
    from silotune.models.forward.decoding import Decoding


@dataclass(frozen=True)
class GenerationOptions:
    """Options of the search for answers.

    Args:
        beams: answers kept at a time; 1 is greedy search.
        max_new_tokens: the longest answer, with its end token.
    """

    beams: int = 1
    max_new_tokens: int = 80


def generate(
    backbone: Backbone,
    prompts: TokenizedRows,
    mix: Sequence[MixEntry],
    options: GenerationOptions,
    rows_at_once: int = 32,
    follow: Callable[[str], None] | None = None,
) -> list[str]:
    """Generate texts after prompts, in the rows' order; see `generate_ids`.

    `follow` is called after each token with the first answer so far, where the search is greedy.
    """
    tokenizer: Any = backbone.tokenizer

    def decoded(ids: list[int]) -> None:
        if follow is not None:
            follow(str(tokenizer.decode(ids, skip_special_tokens=True)))

    ids = generate_ids(backbone, prompts.ids, mix, options, rows_at_once, None if follow is None else decoded)
    return [str(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@torch.no_grad()
def generate_ids(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    mix: Sequence[MixEntry],
    options: GenerationOptions,
    rows_at_once: int = 32,
    follow: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """Generate an answer's tokens after each prompt, greedily or with beams.

    Args:
        backbone: loaded with its language-model head.
        prompts: token ids per row; in an encoder–decoder those of its encoder.
        mix: a weight may have shape (rows,).
        options: beams and length.
        rows_at_once: rows that grow at a time; prompts of similar length go together. In float32 it does not change the
            answers; in bf16 and fp16 products of other shapes round differently, and near ties go to another token.
        follow: called after each token with the answer so far, if there is one row and the search is greedy.

    Returns:
        Token ids per row without the end token, in the rows' order.
    """
    # importing transformers' search takes seconds, which commands without answers need not wait for
    from silotune.models.forward.decoding import start_decoding
    from silotune.models.forward.search import beam_search, greedy

    mix = fold_entries(backbone, mix)
    ends = end_tokens(backbone)
    answers: list[list[int]] = [[] for _ in prompts]
    for group, group_mix in group_by_weight(backbone, mix, len(prompts)):
        rows = group.tolist()
        order = sorted(range(len(rows)), key=lambda index: len(prompts[rows[index]]))
        longest = max(len(prompts[row]) for row in rows) + options.max_new_tokens
        # it is not known how an unlisted family counts the positions of padded rows
        unpadded = backbone.known_architecture is None or needs_no_padding(backbone, group_mix, longest)

        def begin(indices: Sequence[int], rows: Sequence[int] = rows, mix: Sequence[MixEntry] = group_mix) -> Decoding:
            return start_decoding(backbone, [prompts[rows[index]] for index in indices], select_rows(mix, indices))

        lengths = [len(prompts[row]) if unpadded else 0 for row in rows]
        together = len(rows) if options.beams == 1 and not unpadded else rows_at_once
        for indices in _batches(order, lengths, together):
            if options.beams == 1:
                one = follow if len(prompts) == 1 else None
                results = greedy(begin, indices, rows_at_once, ends, options.max_new_tokens, one)
            else:
                results = beam_search(begin(indices), ends, options.beams, options.max_new_tokens)
            for index, ids in zip(indices, results, strict=True):
                answers[rows[index]] = ids
    return answers


def end_tokens(backbone: Backbone) -> frozenset[int]:
    """Return the tokens after which an answer is complete.

    They are the tokenizer's end token, those of the model's `generation_config` (one or a list), and those by which the
    tokenizer's chat templates end the assistant's turn, such as `<|im_end|>`.
    """
    own: Any = backbone.tokenizer.eos_token_id
    listed: Any = getattr(getattr(backbone.model, "generation_config", None), "eos_token_id", None)
    ends = [*(listed if isinstance(listed, list) else [listed]), own, *turn_end_ids(backbone.tokenizer)]
    return frozenset(int(token) for token in ends if token is not None)


def needs_no_padding(backbone: Backbone, mix: Sequence[MixEntry], longest: int) -> bool:
    """Return whether a mix's virtual tokens must stand right before a text of `longest` tokens.

    In a padded batch padding lies between them. A window of sliding attention counts it, and so do recurrent layers.
    """
    plan, config = make_plan(backbone, mix), backbone.base.config
    virtual = sum(prompt.tokens for prompt in plan.prompts) + sum(prefix.tokens for prefix in plan.prefixes)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if "sliding_attention" in layers else None
    if "linear_attention" in layers:
        return virtual > 0
    return virtual > 0 and window is not None and virtual + longest > window


def _batches(order: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cut rows in an order into batches of equal lengths, with `most` rows at most."""
    for _, group in groupby(order, lambda index: lengths[index]):
        rows = list(group)
        for begin in range(0, len(rows), most):
            yield rows[begin : begin + most]
