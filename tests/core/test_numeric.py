"""The mean of scores of which some may be missing, against exact fractions."""

from fractions import Fraction

from silotune.core.numeric import mean_of_known


def test_missing_scores_are_left_out():
    assert mean_of_known([None, 1.0, None, 4.0]) == 2.5
    assert mean_of_known(value for value in (0.0, None)) == 0.0  # a score of 0 is there


def test_without_scores_there_is_no_mean():
    assert mean_of_known([]) is None
    assert mean_of_known([None, None]) is None


def test_the_order_does_not_matter():
    scores = [1e16, 1.0, -1e16, 0.1, 33.3]
    exact = float(sum(map(Fraction, scores)))  # rounded once
    assert mean_of_known(scores) == mean_of_known(sorted(scores)) == exact / len(scores)
    assert sum(scores) != exact
