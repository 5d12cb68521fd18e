"""Answers written token by token under a mix of parts: batched, with a cache of keys and values, greedy or by beams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from silotune.data.tokenized import TokenizedRows
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.decoding import Decoding, start
from silotune.models.forward.mixing import MixEntry, fold_entries, group_by_weight, select_rows

if TYPE_CHECKING:
    pass


ROWS_AT_ONCE = 32


def generate(
    backbone: Backbone,
    prompts: TokenizedRows,
    mix: Sequence[MixEntry],
    options: GenerationOptions,
    rows_at_once: int = ROWS_AT_ONCE,
) -> list[str]:
    """The texts written behind prompts, in the rows' order; see `generate_ids`."""
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
    """The tokens written behind prompts, without the end token, in the rows' order.

    Args:
        backbone: loaded with its language-model head.
        prompts: token ids per row (an encoder–decoder's are its encoder's).
        mix: a weight may be one per row.
        options: beams and length.
        rows_at_once: rows in one batch; prompts of like length go together. It does not change what is written.
    """
    mix = fold_entries(mix)
    end = int(cast(int, backbone.tokenizer.eos_token_id))
    search = greedy if options.beams == 1 else beam_search
    written: list[list[int]] = [[] for _ in prompts]
    for group, own in group_by_weight(backbone, mix, len(prompts)):
        rows = group.tolist()
        order = sorted(range(len(rows)), key=lambda place: len(prompts[rows[place]]))
        for begin in range(0, len(order), rows_at_once):
            places = order[begin : begin + rows_at_once]
            decoding = start(backbone, [prompts[rows[place]] for place in places], select_rows(own, places))
            for place, ids in zip(places, search(decoding, end, options), strict=True):
                written[rows[place]] = ids
    return written


def greedy(decoding: Decoding, end: int, options: GenerationOptions) -> list[list[int]]:
    """The likeliest token, time after time, until the end token."""
    written: list[list[int]] = [[] for _ in range(decoding.rows)]
    open_rows = list(range(decoding.rows))
    tokens = decoding.first().argmax(-1)
    for length in range(1, options.max_new_tokens + 1):
        going = [place for place, token in enumerate(tokens.tolist()) if token != end]
        for place in going:
            written[open_rows[place]].append(int(tokens[place]))
        if not going or length == options.max_new_tokens:
            break
        if len(going) < len(open_rows):
            index = torch.tensor(going, device=tokens.device)
            decoding.select(index)
            open_rows, tokens = [open_rows[place] for place in going], tokens[index]
        tokens = decoding.next(tokens).argmax(-1)
    return written


@dataclass
class _Hypotheses:
    """One row's beam search: the open beams (best first) and the finished answers with their scores."""

    beams: list[tuple[float, list[int]]]
    finished: list[tuple[float, list[int]]] = field(default_factory=list)

    def finish(self, score: float, ids: list[int], keep: int) -> None:
        """Take an answer among the `keep` best."""
        self.finished = sorted([*self.finished, (score, ids)], key=lambda one: -one[0])[:keep]

    def can_improve(self, length: int, keep: int) -> bool:
        """Whether the best open beam, as if it ended now, would still be among the finished."""
        return len(self.finished) < keep or self.beams[0][0] / length > self.finished[-1][0]


def beam_search(decoding: Decoding, end: int, options: GenerationOptions) -> list[list[int]]:
    """Of `beams` answers kept at a time, the one of the highest mean log-probability a token, end token included.

    A row is done when no open beam can enter its finished answers any more, judged at the present length (the usual
    heuristic, transformers' default: an answer that would only win by growing longer is given up).
    """
    beams, device = options.beams, decoding.device
    scores = torch.log_softmax(decoding.first().float(), -1)
    rows = [_Hypotheses([(0.0, [])]) for _ in range(decoding.rows)]
    going = list(range(decoding.rows))
    places = [[place] for place in range(decoding.rows)]  # of each going row: where its beams are in the batch
    for length in range(1, options.max_new_tokens + 1):
        parents: list[int] = []
        tokens: list[int] = []
        still: list[int] = []
        for row, own in zip(going, places, strict=True):
            hypotheses = rows[row]
            candidates = _best(hypotheses, scores[own], 2 * beams)
            opened: list[tuple[float, int, int]] = []
            for rank, (score, beam, token) in enumerate(candidates):
                ids = hypotheses.beams[beam][1]
                if token != end and length < options.max_new_tokens:
                    opened.append((score, beam, token))
                elif rank < beams:
                    hypotheses.finish(score / length, [*ids, token], beams)
            before = hypotheses.beams
            hypotheses.beams = [(score, [*before[beam][1], token]) for score, beam, token in opened[:beams]]
            if hypotheses.beams and hypotheses.can_improve(length, beams):
                still.append(row)
                parents += [own[beam] for _, beam, _ in opened[:beams]]
                tokens += [token for _, _, token in opened[:beams]]
        if not still:
            break
        decoding.select(torch.tensor(parents, device=device))
        scores = torch.log_softmax(decoding.next(torch.tensor(tokens, device=device)).float(), -1)
        going, places = still, list(_spans([len(rows[row].beams) for row in still]))
    best = [row.finished[0][1] for row in rows]
    return [ids[:-1] if ids[-1] == end else ids for ids in best]


def _best(hypotheses: _Hypotheses, scores: Tensor, number: int) -> list[tuple[float, int, int]]:
    """The best continuations of a row's beams: (sum of log-probabilities, beam, token), best first."""
    before = torch.tensor([score for score, _ in hypotheses.beams], device=scores.device)
    total = (scores + before.unsqueeze(1)).reshape(-1)
    values, places = total.topk(min(number, len(total)))
    words = scores.shape[1]
    return [
        (value, place // words, place % words) for value, place in zip(values.tolist(), places.tolist(), strict=True)
    ]


def _spans(lengths: Sequence[int]) -> Iterator[list[int]]:
    begin = 0
    for length in lengths:
        yield list(range(begin, begin + length))
        begin += length


@dataclass(frozen=True)
class GenerationOptions:
    """`beams`: 1 is greedy. `max_new_tokens`: the longest answer, with its end token."""

    beams: int = 1
    max_new_tokens: int = 80
