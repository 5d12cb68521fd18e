"""`ranks` of a column of scores: 1 for best, 2 for second, among entries on the same data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def ranks(scores: Sequence[float | None], groups: Sequence[Hashable] | None = None, lower: bool = False) -> list[int]:
    """Rank scores: 1 for the best of a group, 2 for the second, 0 for all others; ties up to 6 decimals share a rank.

    Args:
        scores: None where a score is missing.
        groups: group of each score; by default all form one group. A score alone in its group has rank 0.
        lower: whether lower scores are better (losses).

    Returns:
        Rank of each score.
    """
    group_of = [None] * len(scores) if groups is None else list(groups)
    sizes = Counter(group_of)
    sign = -1 if lower else 1
    rounded = [None if score is None else sign * round(score, 6) for score in scores]
    result = []
    for score, group in zip(rounded, group_of, strict=True):
        higher = {
            other_score
            for other_score, other_group in zip(rounded, group_of, strict=True)
            if other_group == group and other_score is not None
        }
        rank = 1 + sum(other_score > score for other_score in higher) if score is not None and sizes[group] > 1 else 0
        result.append(rank if rank <= 2 else 0)
    return result
