"""The mean of scores of which some may be missing, against exact fractions."""

from fractions import Fraction

from silotune.core.numeric import mean_ignoring_none


def test_missing_scores_are_left_out():
    assert mean_ignoring_none([None, 1.0, None, 4.0]) == 2.5
    assert mean_ignoring_none(value for value in (0.0, None)) == 0.0  # a score of 0 is there


def test_without_scores_there_is_no_mean():
    assert mean_ignoring_none([]) is None
    assert mean_ignoring_none([None, None]) is None


def test_the_order_does_not_matter():
    scores = [1e16, 1.0, -1e16, 0.1, 33.3]
    exact = float(sum(map(Fraction, scores)))  # rounded once
    assert mean_ignoring_none(scores) == mean_ignoring_none(sorted(scores)) == exact / len(scores)
    assert sum(scores) != exact
