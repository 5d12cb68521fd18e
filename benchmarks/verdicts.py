"""Coverage of the intervals of differences, false verdicts and power, over simulated federations.

A difference varies by seed (`seed`), by test row (`row`) and by row and seed together (`both`), as a share of the
variance of the mean over rows. `own rows` draws rows anew for every seed; `collapsed` lets a
seed in ten lose 20 points.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silotune.lab.report.verdicts import Differences, word_of

_ROWS = 200
_PIECE = 500

CELLS = {
    "seed": (1.0, 0.02, 0.02),
    "row": (0.02, 1.0, 0.02),
    "both": (0.0, 0.0, 1.0),
    "all": (1.0, 1.0, 1.0),
    "row and both": (0.0, 1.0, 1.0),
    "seed and both": (1.0, 0.0, 1.0),
}
"""Name → variances by seed, row, and row and seed, in points², of a mean over all rows."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--federations", type=int, default=20_000)
    parser.add_argument("--margin", type=float, default=1.0)


def measure(federations: int, margin: float) -> dict[str, Any]:
    """Return, per kind of variance and number of seeds, the shares of intervals that cover, and of verdicts."""
    cells = []
    for name, variances in CELLS.items():
        for kind in ("shared rows", "own rows", *(["collapsed"] if name == "seed" else [])):
            for seeds in (3, 5, 10):
                generator = np.random.default_rng([seeds, *name.encode(), *kind.encode()])
                none = list(_federations(generator, federations, seeds, variances, kind, 0.0))
                apart = list(_federations(generator, federations // 10, seeds, variances, kind, 2 * margin))
                words = [word_of(each, margin, 1, seeds) for each in none[: federations // 10]]
                cells.append(
                    {
                        "varies by": name,
                        "test rows": kind,
                        "seeds": seeds,
                        "covers_percent": _share(abs(_off(each, kind)) <= each.half_width(0.95) for each in none),
                        "false_better_percent": _share(word == "better" for word in words),
                        "equal_percent": _share(word == "equal" for word in words),
                        "power_percent": _share(word_of(each, margin, 1, seeds) == "better" for each in apart),
                    }
                )
    worst = min(cell["covers_percent"] for cell in cells if cell["test rows"] != "collapsed")
    return {"federations": federations, "margin": margin, "cells": cells, "ratio": worst}


def _share(values: Any) -> float:
    cases = list(values)
    return round(100 * sum(cases) / len(cases), 1)


def _off(differences: Differences, kind: str) -> float:
    return differences.mean + (2.0 if kind == "collapsed" else 0.0)  # a tenth of the seeds loses 20 points


def _federations(
    generator: np.random.Generator,
    number: int,
    seeds: int,
    variances: tuple[float, float, float],
    kind: str,
    mean: float,
) -> Iterator[Differences]:
    by_seed, by_row, by_both = np.sqrt(variances) * (1.0, np.sqrt(_ROWS), np.sqrt(_ROWS))
    for start in range(0, number, _PIECE):
        count = min(_PIECE, number - start)
        own = kind == "own rows"
        values = mean + by_seed * generator.standard_normal((count, seeds, 1))
        values = values + by_row * generator.standard_normal((count, seeds if own else 1, _ROWS))
        values = values + by_both * generator.standard_normal((count, seeds, _ROWS))
        if kind == "collapsed":
            values = values - 20.0 * (generator.random((count, seeds, 1)) < 0.1)
        yield from (_paired(each, own) for each in values)


def _paired(values: NDArray[Any], own: bool) -> Differences:
    """Return what `paired_differences` does of a mean over rows, whose resamples have this variance exactly."""
    seeds, means = len(values), tuple(values.mean(1).tolist())
    if own:
        return Differences(means)
    mixed = ((values - values.mean(0)).var(1) / _ROWS).sum() / (seeds * (seeds - 1))
    return Differences(means, max(float(values.mean(0).var() / _ROWS - mixed), 0.0), _ROWS)
