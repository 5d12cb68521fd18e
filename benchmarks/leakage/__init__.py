"""What an attacker learns about a silo's rows from its updates: one module per attack.

`python -m benchmarks leakage` runs all attacks, `--attacks last-batch two-runs` some of them, `--list` names them. The
attacker is the coordinator: it chooses configuration and broadcasts, knows the run's seed, and reads what a silo sends.
Every figure is a lower bound of what an update tells, since better attacks exist.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from typing import Any

ATTACKS = {
    "single-updates": "words and membership from one update, with and without noise",
    "least-squares": "single rows' gradients from many rounds of one broadcast, whose orders of rows are known",
    "last-batch": "one row's gradient from a pass whose last batch holds that row alone",
    "rare-row": "one row's gradient from a broadcast that is sure of the label of all others",
    "membership-game": "whether one row is there, from updates of a silo with it and without it",
    "low-bits": "whether one row is there, from the low bits of one answer at ε = 1",
    "equal-messages": "that no row has a label, from two messages with noise on the silo that are equal",
    "two-runs": "one batch's gradient as the difference of two runs that differ by a step",
}
"""Attack → what it tries to learn; its module has the same name with underscores."""


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--list", action="store_true", help="name the attacks and run none")
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=None, metavar="CASE", help="of single-updates")


def measure(
    attacks: list[str] | None = None, seeds: int = 3, cases: list[str] | None = None, list: bool = False
) -> dict[str, Any]:
    """Run attacks; returns what each finds, averaged over seeds."""
    if list:
        return dict(ATTACKS)
    report: dict[str, Any] = {}
    for name in attacks or ATTACKS:
        module = importlib.import_module(f"benchmarks.leakage.{name.replace('-', '_')}")
        if name == "single-updates":
            report |= module.measure(seeds, cases)
            continue
        measures = [module.measure(seed) for seed in range(1, seeds + 1)]
        report[name] = {key: round(statistics.mean(each[key] for each in measures), 3) for key in measures[0]}
        print(f"{name}: {report[name]}", file=sys.stderr, flush=True)
    return report
