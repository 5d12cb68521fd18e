"""The numbers of docs/privacy.md are the formula's."""

import math
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_how_sure_an_epsilon_lets_somebody_be():
    """From even odds, the posterior e^ε / (1 + e^ε) is the most that a ratio of probabilities up to e^ε allows."""
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [epsilon for epsilon, _ in rows] == ["8", "1", "0.1"]
    for epsilon, percent in rows:
        sure = 100 / (1 + math.exp(-float(epsilon)))
        digits = len(percent.partition(".")[2])
        assert f"{sure:.{digits}f}" == percent
