"""Runs things in turn and keeps the times: what is compared has met the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    work: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each by a clock, `repeats` times in turn after `warm_up` turns that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(warm_up + repeats):
        for name, run in work.items():
            started = clock()
            run()
            if number >= warm_up:
                seconds[name].append(clock() - started)
    return seconds


def ratio(one: list[float], other: list[float]) -> dict[str, float]:
    """Of times taken in the same turns: the smallest, the largest and the median of one / other."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return {
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "ratio": round(statistics.median(ratios), 3),
    }
