"""The best and the second of scores that may be set against one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def ranks(scores: Sequence[float | None], groups: Sequence[Hashable] | None = None) -> list[int]:
    """1 for the best of a group, 2 for its second, 0 for all others; scores equal up to 6 decimals share a rank.

    Args:
        scores: None where there is none.
        groups: the group of each; without it all are one. Nothing is the best where it is alone.
    """
    of = [None] * len(scores) if groups is None else list(groups)
    sizes = Counter(of)
    rounded = [None if score is None else round(score, 6) for score in scores]
    found = []
    for score, group in zip(rounded, of, strict=True):
        higher = {other for other, its in zip(rounded, of, strict=True) if its == group and other is not None}
        rank = 1 + sum(other > score for other in higher) if score is not None and sizes[group] > 1 else 0
        found.append(rank if rank <= 2 else 0)
    return found
