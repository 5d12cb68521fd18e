"""`OutlierFilter` holds back updates far above others' norms; `check_aggregate` refuses infinite results.

Updates wait until all of a round are there, as the median of their norms is known only then. Of rounds larger than
`WINDOW` the first are judged by the median so far, so that memory stays bounded.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median

from silotune.communication.aggregation.update import Update, change_norm
from silotune.core.norms import total_norm
from silotune.core.tensors import Tensors
from silotune.errors import SilotuneError

WINDOW = 256 * 2**20
"""Bytes of updates that wait to be judged."""

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
    """

    def __init__(self, before: Tensors, factor: float | None, refuse: Refuse, window: int = WINDOW) -> None:
        self._before = before
        self._factor = factor
        self._refuse = refuse
        self._window = window if factor is not None else 0
        self._sorted: list[float] = []
        self.norms: dict[str, float] = {}
        """Silo → norm of its change, of the updates that were not held back."""

    def __call__(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield updates in their order.

        Args:
            updates: in silo-name order; an iterator is consumed one by one.
        """
        waiting: deque[tuple[Update, float]] = deque()
        size = 0
        for update in updates:
            norm = change_norm(update.tensors, self._before)
            if not math.isfinite(norm):
                self._refuse(update.silo, f"norm of the update is {norm:.3g}")
                continue
            insort(self._sorted, norm)
            waiting.append((update, norm))
            size += _bytes(update)
            del update
            while size > self._window and (self._factor is None or len(self._sorted) >= FEWEST):
                size -= _bytes(waiting[0][0])
                yield from self._judged(*waiting.popleft())
        while waiting:
            yield from self._judged(*waiting.popleft())

    def _judged(self, update: Update, norm: float) -> Iterator[Update]:
        middle = median(self._sorted)
        if self._factor is not None and len(self._sorted) >= FEWEST and norm > self._factor * middle > 0:
            self._refuse(
                update.silo,
                f"norm of the update {norm:.3g} is {norm / middle:.3g} times the median {middle:.3g} of "
                f"{len(self._sorted)} updates (aggregation.outlier={self._factor:g})",
            )
            return
        self.norms[update.silo] = norm
        yield update


def check_aggregate(aggregate: Tensors, norms: dict[str, float], number: int | None) -> None:
    """Refuse an aggregate with NaN or infinity, or with numbers that only one silo's change makes so large.

    Args:
        aggregate: the new shared parts.
        norms: silo → norm of its change.
        number: the round, for the message.

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


def _bytes(update: Update) -> int:
    return sum(tensor.nbytes for tensor in update.tensors.values())
