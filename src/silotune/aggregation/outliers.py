"""Hold back updates whose norms are far above the others', and refuse infinite results.

Updates wait to be judged, as the median of a round's norms is known when all have come. At most `MOST_WAITING` wait,
and at most `WINDOW` bytes: in a larger round the first are judged by the median of the updates so far, which
attackers can move only if they are half of them. So the memory of a round does not grow with the number of silos.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from silotune.aggregation.update import Update
from silotune.core.tensors import JoinedLayout, Tensors, total_norm
from silotune.errors import SilotuneError

WINDOW = 256 * 2**20
"""Bytes of updates that wait to be judged."""

MOST_WAITING = 32
"""Updates that wait to be judged."""

LARGEST_NORM = 1e18
"""A larger norm, squared, is above the largest float32 (3.4e38): every silo would diverge in its next forward."""

FAR = 100.0
"""How many times the others' norms a change is that is to blame for an aggregate that cannot be used."""

FEWEST = 3
"""Updates from which on one can be far from the others."""

Refuse = Callable[[str, str], None]
"""Called with the silo whose update is held back, and the reason."""


class OutlierFilter:
    """Yields a round's updates without those far outside the others' norms; remembers all norms.

    Args:
        before: the shared parts in the round's broadcast.
        factor: how many times the median of the round's norms a norm may be; None: any finite one. Where the median
            is 0, nothing is far from it.
        refuse: called for every update that is held back.
        window: bytes of updates that wait.
        most: updates that wait.
    """

    def __init__(
        self,
        before: Tensors,
        factor: float | None,
        refuse: Refuse,
        window: int = WINDOW,
        most: int = MOST_WAITING,
    ) -> None:
        self._before = before
        self._layouts: dict[frozenset[str], tuple[JoinedLayout, list[Tensor]]] = {}
        """Names of an update's tensors → how they are joined, and the broadcast's so."""
        self._factor = factor
        self._refuse = refuse
        self._window, self._most = (window, most) if factor is not None else (0, 0)
        self._sorted: list[float] = []
        self.norms: dict[str, float] = {}
        """Silo → norm of its change, of the updates that were not held back."""

    def __call__(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield updates in their order.

        They come in silo-name order; an iterator is consumed one by one.
        """
        waiting: deque[_Waiting] = deque()
        size = 0
        for update in updates:
            layout, before = self._joined(update)
            blocks = layout.join(update.tensors)
            norm = self._norm(blocks, before)
            if not math.isfinite(norm):
                self._refuse(update.silo, f"norm of the update is {norm:.3g}")
                continue
            insort(self._sorted, norm)
            waiting.append(_Waiting(replace(update, tensors={}), list(update.tensors), layout, blocks, norm))
            size += waiting[-1].bytes
            del update, blocks
            while len(waiting) > self._most or size > self._window:
                if self._factor is not None and len(self._sorted) < FEWEST:
                    break
                size -= waiting[0].bytes
                yield from self._judged(waiting.popleft())
        while waiting:
            yield from self._judged(waiting.popleft())

    def _joined(self, update: Update) -> tuple[JoinedLayout, list[Tensor]]:
        """Return how an update's tensors are joined, and those of its broadcast; a round may send some alone."""
        names = frozenset(update.tensors)
        if update.received is not None:
            return _join(update.received, names)
        if names not in self._layouts:
            self._layouts[names] = _join(self._before, names)
        return self._layouts[names]

    def _norm(self, blocks: list[Tensor], before: list[Tensor]) -> float:
        """Return the L2 norm of an update's change; it sums in another order than `change_norm`, and faster."""
        changes = (new.double() - old for new, old in zip(blocks, before, strict=True))
        return math.sqrt(math.fsum(float(torch.dot(change, change)) for change in changes))

    def _judged(self, update: _Waiting) -> Iterator[Update]:
        middle = median(self._sorted)
        if self._factor is not None and len(self._sorted) >= FEWEST and update.norm > self._factor * middle > 0:
            self._refuse(
                update.silo,
                f"norm of the update {update.norm:.3g} is {update.norm / middle:.3g} times the median {middle:.3g} of "
                f"{len(self._sorted)} updates (aggregation.outlier={self._factor:g})",
            )
            return
        self.norms[update.silo] = update.norm
        tensors = update.layout.split(update.blocks)
        yield replace(update.rest, tensors={name: tensors[name] for name in update.names})


def _join(before: Tensors, names: frozenset[str]) -> tuple[JoinedLayout, list[Tensor]]:
    tensors = {name: tensor for name, tensor in before.items() if name in names}
    layout = JoinedLayout(tensors)
    return layout, layout.join(tensors)


@dataclass(frozen=True)
class _Waiting:
    """An update that waits, its tensors in few blocks of memory, and the norm of its change."""

    rest: Update
    names: list[str]
    layout: JoinedLayout
    blocks: list[Tensor]
    norm: float

    @property
    def silo(self) -> str:
        return self.rest.silo

    @property
    def bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


def check_aggregate(aggregate: Tensors, norms: dict[str, float], number: int | None) -> None:
    """Refuse an aggregate with NaN or infinity, or with numbers that only one silo's change makes so large.

    Raises:
        SilotuneError: naming the silo whose update is the largest.
    """
    norm = total_norm(aggregate.values(), "l2")
    if norm <= LARGEST_NORM:
        return
    largest = max(norms, key=lambda name: norms[name], default="")
    others = max((norms[name] for name in norms if name != largest), default=0.0)
    if math.isfinite(norm) and others > LARGEST_NORM and norms[largest] <= FAR * others:
        return  # no silo stands out: all of them diverge, and the next round names a silo and the learning rate
    who = f"; silo {largest!r} sent the largest change (norm {norms[largest]:.3g}, others up to {others:.3g})"
    raise SilotuneError(
        f"round {number}: the aggregate cannot be used (norm {norm:.3g}), and is not adopted{who if largest else ''}; "
        "what is finished is kept"
    )
