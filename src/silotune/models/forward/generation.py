"""Generates answers token by token under a mix: in batches, with cached keys and values, greedy or by beams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from silotune.data.tokenized import TokenizedRows
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.decoding import Decoding, start_decoding
from silotune.models.forward.mixing import MixEntry, fold_entries, group_by_weight, select_rows

ROWS_AT_ONCE = 32
"""Rows of one batch."""


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
    rows_at_once: int = ROWS_AT_ONCE,
) -> list[str]:
    """Generate texts after prompts, in the rows' order; see `generate_ids`."""
    tokenizer: Any = backbone.tokenizer
    ids = generate_ids(backbone, prompts.ids, mix, options, rows_at_once)
    return [str(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@torch.no_grad()
def generate_ids(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    mix: Sequence[MixEntry],
    options: GenerationOptions,
    rows_at_once: int = ROWS_AT_ONCE,
) -> list[list[int]]:
    """Generate tokens after prompts.

    Args:
        backbone: loaded with its language-model head.
        prompts: token ids per row; in an encoder–decoder those of its encoder.
        mix: a weight may have shape (rows,).
        options: beams and length.
        rows_at_once: rows in one batch; prompts of similar length go together. It does not change the answers.

    Returns:
        Token ids per row without the end token, in the rows' order.
    """
    mix = fold_entries(mix)
    end = int(cast(int, backbone.tokenizer.eos_token_id))
    search = greedy if options.beams == 1 else beam_search
    answers: list[list[int]] = [[] for _ in prompts]
    for group, group_mix in group_by_weight(backbone, mix, len(prompts)):
        rows = group.tolist()
        order = sorted(range(len(rows)), key=lambda index: len(prompts[rows[index]]))
        for begin in range(0, len(order), rows_at_once):
            indices = order[begin : begin + rows_at_once]
            batch_prompts = [prompts[rows[index]] for index in indices]
            decoding = start_decoding(backbone, batch_prompts, select_rows(group_mix, indices))
            for index, ids in zip(indices, search(decoding, end, options), strict=True):
                answers[rows[index]] = ids
    return answers


def greedy(decoding: Decoding, end: int, options: GenerationOptions) -> list[list[int]]:
    """Append the likeliest token until it is the end token.

    Args:
        decoding: rows that have not begun.
        end: id of the end token.
        options: `max_new_tokens` is read.

    Returns:
        Token ids per row without the end token.
    """
    answers: list[list[int]] = [[] for _ in range(decoding.rows)]
    open_rows = list(range(decoding.rows))
    tokens = decoding.first().argmax(-1)
    for length in range(1, options.max_new_tokens + 1):
        unfinished = [position for position, token in enumerate(tokens.tolist()) if token != end]
        for position in unfinished:
            answers[open_rows[position]].append(int(tokens[position]))
        if not unfinished or length == options.max_new_tokens:
            break
        if len(unfinished) < len(open_rows):
            index = torch.tensor(unfinished, device=tokens.device)
            decoding.select(index)
            open_rows, tokens = [open_rows[position] for position in unfinished], tokens[index]
        tokens = decoding.next(tokens).argmax(-1)
    return answers


@dataclass
class _Hypotheses:
    """One row's beam search.

    Args:
        beams: open answers, best first, as (sum of log-probabilities, token ids).
        finished: ended answers, best first, as (mean log-probability, token ids).
    """

    beams: list[tuple[float, list[int]]]
    finished: list[tuple[float, list[int]]] = field(default_factory=list)

    def finish(self, score: float, ids: list[int], keep: int) -> None:
        """Add an ended answer and keep the `keep` best."""
        self.finished = sorted([*self.finished, (score, ids)], key=lambda answer: -answer[0])[:keep]

    def can_improve(self, length: int, keep: int) -> bool:
        """Whether the best open answer would be among the finished ones if it ended at its present length."""
        return len(self.finished) < keep or self.beams[0][0] / length > self.finished[-1][0]


def beam_search(decoding: Decoding, end: int, options: GenerationOptions) -> list[list[int]]:
    """Search the answer with the highest mean log-probability per token (the end token included) among `beams`.

    A row is done when no open answer can enter its finished ones any more, judged at the present length (the usual
    heuristic and transformers' default: it gives up an answer that would only win by growing longer).

    Args:
        decoding: rows that have not begun.
        end: id of the end token.
        options: beams and length.

    Returns:
        Token ids per row without the end token.
    """
    beams, device = options.beams, decoding.device
    log_probabilities = torch.log_softmax(decoding.first().float(), -1)  # (open beams of all rows, words)
    rows = [_Hypotheses([(0.0, [])]) for _ in range(decoding.rows)]
    open_rows = list(range(decoding.rows))
    beams_of = [[position] for position in range(decoding.rows)]  # of each open row: its beams' positions in the batch
    for length in range(1, options.max_new_tokens + 1):
        parents: list[int] = []
        tokens: list[int] = []
        still_open: list[int] = []
        for row, positions in zip(open_rows, beams_of, strict=True):
            hypotheses = rows[row]
            candidates = _best(hypotheses, log_probabilities[positions], 2 * beams)
            continued: list[tuple[float, int, int]] = []
            for rank, (score, beam, token) in enumerate(candidates):
                ids = hypotheses.beams[beam][1]
                if token != end and length < options.max_new_tokens:
                    continued.append((score, beam, token))
                elif rank < beams:
                    hypotheses.finish(score / length, [*ids, token], beams)
            before = hypotheses.beams
            hypotheses.beams = [(score, [*before[beam][1], token]) for score, beam, token in continued[:beams]]
            if hypotheses.beams and hypotheses.can_improve(length, beams):
                still_open.append(row)
                parents += [positions[beam] for _, beam, _ in continued[:beams]]
                tokens += [token for _, _, token in continued[:beams]]
        if not still_open:
            break
        decoding.select(torch.tensor(parents, device=device))
        log_probabilities = torch.log_softmax(decoding.next(torch.tensor(tokens, device=device)).float(), -1)
        open_rows, beams_of = still_open, list(_spans([len(rows[row].beams) for row in still_open]))
    best = [row.finished[0][1] for row in rows]
    return [ids[:-1] if ids[-1] == end else ids for ids in best]


def _best(hypotheses: _Hypotheses, log_probabilities: Tensor, number: int) -> list[tuple[float, int, int]]:
    """Choose the best continuations of a row's beams.

    Args:
        hypotheses: the row's beams.
        log_probabilities: log-probabilities of the next token, shape (beams, words).
        number: how many to choose.

    Returns:
        (sum of log-probabilities, beam, token), best first.
    """
    before = torch.tensor([score for score, _ in hypotheses.beams], device=log_probabilities.device)
    total = (log_probabilities + before.unsqueeze(1)).reshape(-1)
    values, indices = total.topk(min(number, len(total)))
    words = log_probabilities.shape[1]
    return [
        (value, index // words, index % words) for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def _spans(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive positions, so many at a time."""
    begin = 0
    for length in lengths:
        yield list(range(begin, begin + length))
        begin += length
