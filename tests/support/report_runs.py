"""Finished run folders with known numbers, written without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from silotune.lab.report import html_page
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.frame import Results


def write_run(
    folder: Path,
    method: str,
    seed: int,
    tests: Mapping[str, float],
    *,
    rounds: int = 3,
    message: int = 2**20,
    backbone: str = "nowhere/at-all",
    terms: Sequence[str] = (),
    more: Mapping[str, object] = {},
    extra: Sequence[Mapping[str, object]] = (),
    central: bool = False,
    test_rows: int | None = 20,
    metric: str = "accuracy",
) -> Path:
    """Write a run whose silos test at `tests`, validate at `tests − 10/round` and send `message` bytes a round each.

    With `central` one data set is partitioned, and the log has one score for all silos: their mean. `test_rows` is
    None if silos do not disclose their number of rows.
    """
    folder.mkdir(parents=True)
    config = {"description": "by hand", "backbone": backbone, "method": {"name": method}, "seed": seed} | dict(more)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps({"torch": "2.0", "backbone": "b" * 64}), encoding="utf-8")
    events: list[Mapping[str, object]] = []
    for number in range(1, rounds + 1):
        for silo in tests:
            event = {"event": "silo", "round": number, "silo": silo, "bytes_down": message, "bytes_up": message}
            loss = math.exp(-number / 5) + seed / 50
            logged = {"loss": loss, **{term: loss * (n + 2) / 3 for n, term in enumerate(terms)}}
            events.append(event | logged | {"steps": 5, "rows": 80, "real_tokens": 9, "padded_tokens": 9, "seconds": 2})
        scores = {silo: value - 10 / number for silo, value in tests.items()}
        if central:
            scores = {"global": math.fsum(scores.values()) / len(scores)}
        events.append(
            {"event": "round", "round": number, "silos": sorted(tests), "validation": scores, "seconds": 7.0 * number}
        )
    lines = "".join(json.dumps(event) + "\n" for event in [*events, *extra])
    (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    rows = None if test_rows is None else {"train": 80, "validation": 20, "test": test_rows}
    average = math.fsum(tests.values()) / len(tests)
    summary = {
        "method": method,
        "backbone": backbone,
        "seed": seed,
        "rounds": rounds,
        "precision": "fp32",
        "threads": 1,
        "seconds": 7.0 * rounds,
        "samples_per_second": 40.0,
        "trainable_parameters": 3000,
        "sent_parameters": 2000,
        "adapter_parameters": 2500,
        "head_parameters": 500,
        "bytes_up": message * rounds * len(tests),
        "bytes_down": message * rounds * len(tests),
        "silos": {
            silo: {"metric": metric, "validation": value - 10 / rounds, "test": value, "rows": rows}
            for silo, value in tests.items()
        },
        "tasks": {silo: {"name": "whole" if central else silo, "labels": ["no", "yes"]} for silo in tests},
        "global": {"metric": metric, "validation": 50.0, "test": average, "majority": 50.0} if central else None,
        "average": average,
        "best_round": rounds,
        "state_sha256": f"{seed:064x}",
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_comparison(folder: Path, scores: Mapping[str, Mapping[int, float]], **more: object) -> Path:
    """Write a comparison's folder from row → seed → test score of its silos `a` and `b`; `more` goes to `write_run`."""
    seeds = list(dict.fromkeys(seed for of in scores.values() for seed in of))
    for row, of in scores.items():
        for seed, score in of.items():
            write_run(folder / f"{row}-{seed}", row, seed, {"a": score, "b": score}, **more)  # type: ignore[arg-type]
    plan = {"source": "a-preset", "rows": list(scores), "seeds": seeds, "ddof": 1}
    (folder / "comparison.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder


def curve(entry: ReportEntry, *what: str) -> dict[str, list[float]]:
    """Return a curve of an entry: `x`, `mean` and `std`."""
    found = Results([entry]).curve(entry.label, *what)
    return {"x": [*found.index], **found.to_dict("list")}


@pytest.fixture
def no_figure_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports draw figures for the page only, not a second time for the files beside it, which takes seconds."""
    monkeypatch.setattr(html_page, "save_figure", lambda spec, folder: [])


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports have no figures, for tests of their text."""
    monkeypatch.setattr(html_page, "report_figures", lambda results: [])
