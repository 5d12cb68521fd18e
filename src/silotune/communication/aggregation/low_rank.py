"""Aggregations that know LoRA's pairs A and B: `FlexLoRA`, `HetLoRA`, `FedSVD`; `ProductError` of means of A, B."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from silotune.communication.aggregation.mean import by_samples
from silotune.communication.aggregation.server_optimizer import ServerOptimizer
from silotune.communication.aggregation.update import Update
from silotune.core.tensors import Tensors
from silotune.errors import InputError

A, B, DELTA = ".lora_A.weight", ".lora_B.weight", ".delta.weight"

MOST_UPDATES = 64
"""Updates of a round beyond which the error of the mean of products is not computed."""

MOST_BYTES = 256 * 2**20
"""Bytes of A's and B's beyond which it is not computed."""


@dataclass(frozen=True)
class Pair:
    """The "part/tensor" names of one target module's A, shape (r, in), and B, shape (out, r)."""

    a: str
    b: str

    @property
    def module(self) -> str:
        """The target module."""
        return self.a.split("/", 1)[1].removesuffix(A)


def deltas(names: Iterable[str]) -> dict[str, str]:
    """Return target module → "part/tensor" name of its delta, shape (out, in)."""
    return {name.split("/", 1)[1].removesuffix(DELTA): name for name in names if name.endswith(DELTA)}


def factor_pairs(names: Iterable[str]) -> list[Pair]:
    """Return the pairs among tensor names, within a part, or over two parts if a module has one A and one B."""
    ups: dict[str, list[str]] = defaultdict(list)
    downs: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for ending, found in ((A, downs), (B, ups)):
            if name.endswith(ending):
                found[name.split("/", 1)[1].removesuffix(ending)].append(name)
    pairs = []
    for module, of_a in downs.items():
        of_b = ups[module]
        same_part = [Pair(name, name.removesuffix(A) + B) for name in of_a if name.removesuffix(A) + B in of_b]
        pairs += same_part or ([Pair(of_a[0], of_b[0])] if len(of_a) == len(of_b) == 1 else [])
    return pairs


class BroadcastAggregation(ABC):
    """An aggregation that also reads the round's broadcast, and may change shared tensors that silos did not send.

    `name` is the word of `aggregation=`; `needs_pairs` says that it is defined for shared parts with LoRA's A and B,
    `needs_delta` that it also needs a delta of their target modules (`models/tuners/delta.py`); `adopted_whole` that
    its result holds together only as it is, so that no server optimizer may go a part of the way to it.
    """

    name: ClassVar[str]
    needs_pairs: ClassVar[bool] = False
    needs_delta: ClassVar[bool] = False
    adopted_whole: ClassVar[bool] = False

    @abstractmethod
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Return the new tensors by "part/tensor" name; those that are not named stay.

        Args:
            updates: in silo-name order, at least one; each holds the parts that its round trained.
            before: all shared tensors in the round's broadcast.
        """

    def check(self, shared: Tensors, optimizer: ServerOptimizer) -> None:
        """Refuse shared parts that the aggregation is not defined for, before training.

        Args:
            shared: all shared tensors.
            optimizer: the step that the coordinator takes with the result.

        Raises:
            InputError: there are no pairs, or no delta, although it needs them; or a server optimizer would take a
                step of its own, although the result holds together.
        """
        if self.needs_pairs and not factor_pairs(shared):
            raise InputError(
                f"aggregation={self.name}: the shared parts hold no pairs of LoRA's A and B; "
                "allowed: a method that shares both, with tuner=lora"
            )
        missing = [pair for pair in factor_pairs(shared) if pair.module not in deltas(shared)]
        if self.needs_delta and missing:
            raise InputError(
                f"aggregation={self.name}: the shared parts hold no delta of {missing[0].module}; "
                "allowed: method=fedex-lora or flora, or another one with a Delta"
            )
        if self.adopted_whole and not optimizer.adopts:
            raise InputError(
                f"server.optimizer={optimizer.name}, server.lr={optimizer.lr:g}: aggregation={self.name} makes tensors "
                "that hold together as they are; allowed: none, 1"
            )


class RankAggregation(BroadcastAggregation):
    """An aggregation of updates of several LoRA ranks; the shared parts have the largest one, `tuner.r`."""

    needs_pairs = True

    def to_rank(self, shared: Tensors, rank: int) -> Tensors:
        """Return the shared tensors as silos of a smaller rank receive them: the first rows of A and columns of B.

        Args:
            shared: all shared tensors, by "part/tensor" name.
            rank: the silos' rank, below that of the tensors.
        """
        tensors = dict(shared)
        for pair in factor_pairs(shared):
            tensors |= _cut(pair, shared[pair.a], shared[pair.b], rank)
        return tensors


class FlexLoRA(RankAggregation):
    """The best approximation of `Σ n_k·B_k·A_k / Σ n_k` of LoRA's rank (Bai et al. 2024).

    By a singular value decomposition `U·Σ·Vᵀ`, cut after r values: B becomes `U·Σ` and A `Vᵀ`. All other tensors are
    averaged by the silos' rows. The mean product itself is never in memory. A silo of a smaller rank gets the best
    approximation of that rank.
    """

    name = "flexlora"
    adopted_whole = True  # between the old and the new factors lies no mean of their products

    def to_rank(self, shared: Tensors, rank: int) -> Tensors:
        """See `RankAggregation.to_rank`: by an SVD of B·A; where B is zero, the first rows of A as they were drawn."""
        tensors = dict(shared)
        for pair in factor_pairs(shared):
            a, b = shared[pair.a], shared[pair.b]
            if b.any():
                new_b, new_a = truncated(b.double(), a.double(), rank)
                tensors[pair.a], tensors[pair.b] = new_a.to(a.dtype), new_b.to(b.dtype)
            else:
                tensors |= _cut(pair, a, b, rank)
        return tensors

    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """See `BroadcastAggregation.aggregate`; all updates are kept until the last one is there."""
        all_updates, pairs = list(updates), factor_pairs(before)
        tensors = mean_of_others(all_updates, pairs)
        rows = sum(update.rows for update in all_updates)
        for pair in pairs:
            weighted = [(update.rows / rows, factors_of(pair, update, before)) for update in all_updates]
            b, a = truncated(*stacked(weighted), rank=len(before[pair.a]))
            tensors[pair.a], tensors[pair.b] = a.to(before[pair.a].dtype), b.to(before[pair.b].dtype)
        return tensors


class HetLoRA(RankAggregation):
    """Means of A and of B padded with zeros to rank r, weighted by `‖B_k·A_k‖` per target module (Cho et al. 2024).

    All other tensors are averaged by the silos' rows; so are A and B where all products are zero.
    """

    name = "hetlora"

    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """See `BroadcastAggregation.aggregate`; all updates are kept until the last one is there."""
        all_updates, pairs = list(updates), factor_pairs(before)
        tensors = mean_of_others(all_updates, pairs)
        for pair in pairs:
            factors = [factors_of(pair, update, before) for update in all_updates]
            norms = [_product_norm(b, a) for b, a in factors]
            if not any(norms):
                norms = [float(update.rows) for update in all_updates]
            mean_a, mean_b = (torch.zeros_like(before[name], dtype=torch.float64) for name in (pair.a, pair.b))
            for norm, (b, a) in zip(norms, factors, strict=True):
                mean_a[: len(a)] += norm / sum(norms) * a
                mean_b[:, : b.shape[1]] += norm / sum(norms) * b
            tensors[pair.a], tensors[pair.b] = mean_a.to(before[pair.a].dtype), mean_b.to(before[pair.b].dtype)
        return tensors


class FedSVD(BroadcastAggregation):
    """The mean of B, then both factors anew from `mean(B)·A = U·Σ·Vᵀ`: B becomes `U·Σ`, A the orthonormal `Vᵀ`.

    Lee et al. 2025. Silos train B alone; the product stays the same, up to rounding.
    """

    name = "fedsvd"
    needs_pairs = adopted_whole = True

    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """See `BroadcastAggregation.aggregate`."""
        tensors = by_samples(updates)
        for pair in factor_pairs(before):
            a, b = (tensors.get(name, before[name]) for name in (pair.a, pair.b))
            new_b, new_a = truncated(b.double(), a.double(), rank=len(a))
            tensors[pair.a], tensors[pair.b] = new_a.to(a.dtype), new_b.to(b.dtype)
        return tensors


def truncated(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return `(U·Σ, Vᵀ)` of the `rank` largest singular values of `left·right`; a row of Vᵀ has its largest entry > 0.

    Args:
        left: shape (out, k), float64.
        right: shape (k, in), float64; the product is not computed.
        rank: what is above k is filled with zeros.

    Returns:
        Shapes (out, rank) and (rank, in).
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, values, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    b, a = (q_left @ u * values)[:, :rank], (vh @ q_right.T)[:rank]
    if (missing := rank - len(a)) > 0:  # a rank above the module's widths
        b, a = torch.nn.functional.pad(b, (0, missing)), torch.nn.functional.pad(a, (0, 0, 0, missing))
    largest = a.gather(1, a.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(a)
    return b * signs.T, a * signs


class ProductError:
    """`‖mean(B_k·A_k) − B̄·Ā‖ / ‖mean(B_k·A_k)‖` of a round, over all target modules (Frobenius norm).

    B̄·Ā is the product that the aggregate has, with what it adds to a delta. Averaging A and B apart makes the error;
    where all silos have the same A, or the same B, it is 0 up to rounding.

    Args:
        before: all shared tensors in the round's broadcast.
        by_rows: whether the mean weighs silos by their rows; else all alike.
        chosen: how many silos may send an update; above `MOST_UPDATES` nothing is kept.
    """

    def __init__(self, before: Tensors, by_rows: bool, chosen: int = 0) -> None:
        self._before = before
        self._by_rows = by_rows
        self._pairs = factor_pairs(before) if chosen <= MOST_UPDATES else []
        self._kept: list[tuple[float, Update]] = []
        self._bytes = 0

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates, and keep their A's and B's, up to `MOST_UPDATES` and `MOST_BYTES`."""
        names = {name for pair in self._pairs for name in (pair.a, pair.b)}
        for update in updates:
            if self._pairs:
                factors = {name: tensor for name, tensor in update.tensors.items() if name in names}
                weight = float(update.rows) if self._by_rows else 1.0
                self._kept.append((weight, replace(update, tensors=factors)))
                self._bytes += sum(tensor.nbytes for tensor in factors.values())
                if len(self._kept) > MOST_UPDATES or self._bytes > MOST_BYTES:
                    self._pairs, self._kept = [], []
            yield update

    def of(self, aggregate: Tensors) -> float | None:
        """Return the error; None without pairs, if no factor was sent, with too many updates, or of a product of 0."""
        if not any(update.tensors for _, update in self._kept):
            return None
        total = sum(weight for weight, _ in self._kept)
        difference = size = 0.0
        by_module = deltas(aggregate)
        for pair in self._pairs:
            factors = [(weight / total, factors_of(pair, update, self._before)) for weight, update in self._kept]
            left, right = stacked(factors)
            b, a = (aggregate.get(name, self._before[name]).double() for name in (pair.b, pair.a))
            size += _product_norm(left, right) ** 2
            left, right = torch.cat([left, -b], 1), torch.cat([right, a])
            if (delta := by_module.get(pair.module)) is not None:
                moved = aggregate[delta].double() - self._before[delta].double()
                difference += float(torch.linalg.matrix_norm(left @ right - moved)) ** 2
            else:
                difference += _product_norm(left, right) ** 2
        return (difference / size) ** 0.5 if size else None


def factors_of(pair: Pair, update: Update, shared: Tensors) -> tuple[Tensor, Tensor]:
    """Return a silo's B and A in float64; one that it did not send is as it received it."""
    sent, before = update.tensors, update.before(shared)
    return sent.get(pair.b, before[pair.b]).double(), sent.get(pair.a, before[pair.a]).double()


def _cut(pair: Pair, a: Tensor, b: Tensor, rank: int) -> Tensors:
    """Return the first rows of A and columns of B."""
    return {pair.a: a[:rank].clone(), pair.b: b[:, :rank].clone()}


def mean_of_others(updates: Iterable[Update], pairs: Iterable[Pair]) -> Tensors:
    """Return the mean by rows of all tensors that are in no pair."""
    factors = {name for pair in pairs for name in (pair.a, pair.b)}
    others = [
        replace(update, tensors={name: tensor for name, tensor in update.tensors.items() if name not in factors})
        for update in updates
    ]
    return by_samples(others) if others[0].tensors else {}


def stacked(factors: list[tuple[float, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Return weighted B's side by side and A's below one another: their product is the weighted mean of products."""
    return torch.cat([weight * b for weight, (b, _) in factors], 1), torch.cat([a for _, (_, a) in factors])


def _product_norm(left: Tensor, right: Tensor) -> float:
    """Return `‖left·right‖`, by triangular factors where these are smaller than the product."""
    if left.shape[1] < min(left.shape[0], right.shape[1]):
        left, right = torch.linalg.qr(left, mode="r")[1], torch.linalg.qr(right.T, mode="r")[1].T
    return float(torch.linalg.matrix_norm(left @ right))
