"""Generates answers token by token under a mix: in batches, with cached keys and values, greedy or by beams."""

from __future__ import annotations

from collections.abc import Sequence
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
        ids = tokens.tolist()  # the one transfer from the device per token
        unfinished = [position for position, token in enumerate(ids) if token != end]
        for position in unfinished:
            answers[open_rows[position]].append(ids[position])
        if not unfinished or length == options.max_new_tokens:
            break
        if len(unfinished) < len(open_rows):
            decoding.select(unfinished)
            open_rows = [open_rows[position] for position in unfinished]
            tokens = torch.tensor([ids[position] for position in unfinished], device=tokens.device)
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
    for length in range(1, options.max_new_tokens + 1):
        parents: list[int] = []
        tokens: list[int] = []
        still_open: list[int] = []
        first = 0  # position of the row's first beam in the batch
        best_of_rows = _best([rows[row] for row in open_rows], log_probabilities, 2 * beams)
        for row, candidates in zip(open_rows, best_of_rows, strict=True):
            hypotheses = rows[row]
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
                parents += [first + beam for _, beam, _ in continued[:beams]]
                tokens += [token for _, _, token in continued[:beams]]
            first += len(before)
        if not still_open:
            break
        decoding.select(parents)
        log_probabilities = torch.log_softmax(decoding.next(torch.tensor(tokens, device=device)).float(), -1)
        open_rows = still_open
    best = [row.finished[0][1] for row in rows]
    return [ids[:-1] if ids[-1] == end else ids for ids in best]


def _best(rows: Sequence[_Hypotheses], log_probabilities: Tensor, number: int) -> list[list[tuple[float, int, int]]]:
    """Choose the best continuations of each row's beams, with one transfer from the device.

    Args:
        rows: the open rows.
        log_probabilities: log-probabilities of the next token, shape (beams of all rows, words), row by row.
        number: how many to choose per row.

    Returns:
        Per row (sum of log-probabilities, beam, token), best first.
    """
    lengths = [len(row.beams) for row in rows]
    if len({*lengths}) > 1:  # only where the vocabulary has fewer words than a row has candidates
        pieces = torch.split(log_probabilities, lengths)
        return [_best([row], piece, number)[0] for row, piece in zip(rows, pieces, strict=True)]
    words = log_probabilities.shape[1]
    before = torch.tensor([[score for score, _ in row.beams] for row in rows], device=log_probabilities.device)
    total = (log_probabilities + before.reshape(-1, 1)).reshape(len(rows), -1)
    values, indices = total.topk(min(number, total.shape[1]))
    numbers = torch.stack([values.double(), indices.double()], 2).tolist()  # both exact
    return [[(value, int(index) // words, int(index) % words) for value, index in row] for row in numbers]
