"""Find LoRA's A and B among tensors, and read, cut and stack the factors of several silos."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silotune.aggregation.mean import by_samples
from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors

A, B, DELTA = ".lora_A.weight", ".lora_B.weight", ".delta.weight"


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
        for ending, by_module in ((A, downs), (B, ups)):
            if name.endswith(ending):
                by_module[name.split("/", 1)[1].removesuffix(ending)].append(name)
    pairs = []
    for module, of_a in downs.items():
        of_b = ups[module]
        same_part = [Pair(name, name.removesuffix(A) + B) for name in of_a if name.removesuffix(A) + B in of_b]
        pairs += same_part or ([Pair(of_a[0], of_b[0])] if len(of_a) == len(of_b) == 1 else [])
    return pairs


def factors_of(pair: Pair, tensors: Tensors, before: Tensors) -> tuple[Tensor, Tensor]:
    """Return B and A in float64, of a silo or of a mean; a factor that was not sent is the received one."""
    return tensors.get(pair.b, before[pair.b]).double(), tensors.get(pair.a, before[pair.a]).double()


def weighted_factors(
    pair: Pair, updates: Sequence[Update], shared: Tensors
) -> list[tuple[float, tuple[Tensor, Tensor]]]:
    """Return each silo's share of all rows, and its B and A as of `factors_of`; `stacked` takes them."""
    rows = sum(update.rows for update in updates)
    return [(update.rows / rows, factors_of(pair, update.tensors, update.before(shared))) for update in updates]


def without_factors(updates: Iterable[Update], pairs: Iterable[Pair]) -> Iterator[Update]:
    """Yield the updates without the A's and B's of pairs."""
    factors = {name for pair in pairs for name in (pair.a, pair.b)}
    for update in updates:
        yield replace(update, tensors={name: tensor for name, tensor in update.tensors.items() if name not in factors})


def with_new_factors(
    updates: Iterable[Update],
    before: Tensors,
    new: Callable[[list[tuple[float, tuple[Tensor, Tensor]]], int], tuple[Tensor, Tensor]],
) -> Tensors:
    """Return the means by rows of all other tensors, and A and B as a function makes them; all updates are kept.

    Args:
        updates: in silo-name order, at least one.
        before: all shared tensors in the round's broadcast.
        new: `weighted_factors` of a target module and LoRA's rank → its B and A.
    """
    all_updates, pairs = list(updates), factor_pairs(before)
    tensors = by_samples(without_factors(all_updates, pairs))
    for pair in pairs:
        b, a = new(weighted_factors(pair, all_updates, before), len(before[pair.a]))
        tensors |= {pair.a: a.to(before[pair.a].dtype), pair.b: b.to(before[pair.b].dtype)}
    return tensors


def cut_to_rank(pair: Pair, a: Tensor, b: Tensor, rank: int) -> Tensors:
    """Return the first rows of A and columns of B."""
    return {pair.a: a[:rank].clone(), pair.b: b[:, :rank].clone()}


def stacked(factors: list[tuple[float, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Return weighted B's side by side and A's below one another: their product is the weighted mean of products."""
    return torch.cat([weight * b for weight, (b, _) in factors], 1), torch.cat([a for _, (_, a) in factors])


def is_thin(left: Tensor, right: Tensor) -> bool:
    """Return whether two factors are much smaller than their product."""
    return 4 * left.shape[1] < min(left.shape[0], right.shape[1])


def product_norm(left: Tensor, right: Tensor) -> float:
    """Return `‖left·right‖`, by triangular factors where these are thin, and so faster."""
    if is_thin(left, right):
        left, right = torch.linalg.qr(left, mode="r")[1], torch.linalg.qr(right.T, mode="r")[1].T
    return float(torch.linalg.matrix_norm(left @ right))
