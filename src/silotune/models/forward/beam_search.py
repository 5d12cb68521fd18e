"""`beam_search` for all rows of a batch at once, on the device; best answer by mean log-probability."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.models.forward.decoding import Decoding


def beam_search(decoding: Decoding, ends: Set[int], beams: int, max_new_tokens: int) -> list[list[int]]:
    """Search the answer with the highest mean log-probability per token (the end token included) among `beams`.

    A row is done when no open answer can enter its finished ones any more, judged at the present length (the usual
    heuristic and transformers' default: it gives up an answer that would only win by growing longer).

    Args:
        decoding: rows that have not begun.
        ends: ids of the tokens that end an answer.
        beams: open answers per row, and finished ones that are kept.
        max_new_tokens: the longest answer, with its end token.

    Returns:
        Token ids per row without the end token.
    """
    device, rows = decoding.device, decoding.rows
    end_ids = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
    number = max(2, 1 + len(ends)) * beams  # so that enough of them go on, whatever ends
    best = torch.zeros(rows, max_new_tokens + 1, dtype=torch.int64, device=device)  # each row's answer, then its length
    search = _Search.begin(rows, beams, max_new_tokens, device)
    open_rows = torch.arange(rows, device=device)
    log_probabilities = torch.log_softmax(decoding.first().float(), -1)
    for length in range(1, max_new_tokens + 1):
        candidates = _Candidates.best(search, log_probabilities, number, end_ids)
        search.finish(candidates, length, everything=length == max_new_tokens)
        best[open_rows] = search.answers()
        if length == max_new_tokens:
            break
        parents = search.go_on(candidates)
        still_open = search.can_improve(length).tolist()  # the one transfer from the device per token
        kept = [place for place, is_open in enumerate(still_open) if is_open]
        if not kept:
            break
        if len(kept) < len(still_open):
            index = torch.tensor(kept, device=device)
            search, parents, open_rows = search.of_rows(index), parents[index], open_rows[index]
        decoding.select(parents.flatten())
        log_probabilities = torch.log_softmax(decoding.next(search.ids[:, :, length - 1].flatten()).float(), -1)
    return [_without_end(ids[: ids[-1]], ends) for ids in best.tolist()]


def _without_end(ids: list[int], ends: Set[int]) -> list[int]:
    return ids[:-1] if ids[-1] in ends else ids


@dataclass
class _Candidates:
    """Continuations of each row's beams by one token, best first.

    Args:
        scores: sums of log-probabilities, shape (rows, candidates); minus infinity where there is none.
        beams: which beam each continues, same shape.
        ids: each with its token, shape (rows, candidates, longest answer).
        ended: whether the token ends the answer, shape (rows, candidates).
    """

    scores: Tensor
    beams: Tensor
    ids: Tensor
    ended: Tensor

    @classmethod
    def best(cls, search: _Search, log_probabilities: Tensor, number: int, ends: Tensor) -> _Candidates:
        """Choose the best continuations.

        Args:
            search: the open answers.
            log_probabilities: of the next token, shape (rows · beams, words), row by row.
            number: how many to choose per row.
            ends: ids of tokens that end an answer.
        """
        rows = len(search.scores)
        words = log_probabilities.shape[1]
        total = (log_probabilities + search.scores.reshape(-1, 1)).reshape(rows, -1)
        scores, places = total.topk(min(number, total.shape[1]))
        parents, tokens = places // words, places % words
        ids = _taken(search.ids, parents)
        ids[:, :, search.length] = tokens
        return cls(scores, parents, ids, (tokens.unsqueeze(-1) == ends).any(-1))


@dataclass
class _Search:
    """The search over some rows.

    Args:
        keep: finished answers that are kept, and open ones after the first token.
        length: tokens of the open answers.
        scores: the open answers' sums of log-probabilities, best first, shape (rows, beams).
        ids: the open answers, shape (rows, beams, longest answer).
        finished: the finished answers' mean log-probabilities, best first, shape (rows, keep); minus infinity where
            there are fewer.
        finished_ids: the finished answers, shape (rows, keep, longest answer + 1); their lengths come last.
    """

    keep: int
    length: int
    scores: Tensor
    ids: Tensor
    finished: Tensor
    finished_ids: Tensor

    @classmethod
    def begin(cls, rows: int, keep: int, longest: int, device: torch.device) -> _Search:
        """One empty answer per row."""
        return cls(
            keep,
            0,
            torch.zeros(rows, 1, device=device),
            torch.zeros(rows, 1, longest, dtype=torch.int64, device=device),
            torch.full((rows, keep), -torch.inf, dtype=_score_type(device), device=device),
            torch.zeros(rows, keep, longest + 1, dtype=torch.int64, device=device),
        )

    def finish(self, candidates: _Candidates, length: int, everything: bool) -> None:
        """Keep the best of the finished answers and those that end among the first `keep` candidates."""
        scores = candidates.scores[:, : self.keep]
        ended = torch.ones_like(scores, dtype=torch.bool) if everything else candidates.ended[:, : self.keep]
        means = scores.to(self.finished.dtype) / length
        means = means.masked_fill(~ended, -torch.inf)
        ids = candidates.ids[:, : self.keep]
        ids = torch.cat([ids, ids.new_full((*ids.shape[:2], 1), length)], 2)
        finished, order = torch.cat([self.finished, means], 1).sort(dim=1, descending=True, stable=True)
        self.finished = finished[:, : self.keep]
        self.finished_ids = _taken(torch.cat([self.finished_ids, ids], 1), order[:, : self.keep])

    def go_on(self, candidates: _Candidates) -> Tensor:
        """Continue with the best candidates that do not end.

        Returns:
            The position of each new beam's parent among all open answers before, shape (rows, keep).
        """
        rows, beams = self.scores.shape
        order = candidates.ended.to(torch.int8).sort(dim=1, stable=True).indices
        if order.shape[1] < self.keep:  # a vocabulary with fewer words than that
            order = torch.cat([order, order[:, :1].expand(-1, self.keep - order.shape[1])], 1)
            missing = torch.arange(self.keep, device=order.device) >= candidates.scores.shape[1]
        else:
            order, missing = order[:, : self.keep], torch.zeros(self.keep, dtype=torch.bool, device=order.device)
        ended = candidates.ended.gather(1, order) | missing
        self.scores = candidates.scores.gather(1, order).masked_fill(ended, -torch.inf)
        self.ids = _taken(candidates.ids, order)
        self.length += 1
        parents = candidates.beams.gather(1, order)
        return parents + beams * torch.arange(rows, device=parents.device).unsqueeze(1)

    def can_improve(self, length: int) -> Tensor:
        """Whether the best open answer would be among the finished ones if it ended now, shape (rows,)."""
        return self.scores[:, 0].to(self.finished.dtype) / length > self.finished[:, -1]

    def answers(self) -> Tensor:
        """The best finished answer of each row with its length, shape (rows, longest answer + 1)."""
        return self.finished_ids[:, 0]

    def of_rows(self, rows: Tensor) -> _Search:
        """The search over some of the rows alone."""
        tensors = (self.scores, self.ids, self.finished, self.finished_ids)
        return _Search(self.keep, self.length, *(tensor[rows] for tensor in tensors))


def _taken(ids: Tensor, places: Tensor) -> Tensor:
    """Select answers, (rows, answers, tokens), by places of shape (rows, chosen): result (rows, chosen, tokens)."""
    return ids.gather(1, places.unsqueeze(-1).expand(-1, -1, ids.shape[2]))


def _score_type(device: torch.device) -> torch.dtype:
    """Of mean log-probabilities; `mps` has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
