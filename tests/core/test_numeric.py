"""The mean of scores of which some may be missing, against exact fractions."""

from fractions import Fraction

from silotune.core.numeric import mean_ignoring_none


def test_without_scores_there_is_no_mean():
    assert mean_ignoring_none([]) is None
    assert mean_ignoring_none([None, None]) is None


def test_the_order_does_not_matter():
    scores = [1e16, 1.0, -1e16, 0.1, 33.3]
    exact = float(sum(map(Fraction, scores)))  # rounded once
    assert mean_ignoring_none(scores) == mean_ignoring_none(sorted(scores)) == exact / len(scores)
    assert sum(scores) != exact
