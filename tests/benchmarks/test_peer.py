"""Peers and silotune are given the same training rows, at any number of silos."""

from __future__ import annotations

import json

import pytest

from benchmarks.peer import same_rows
from silotune.data.loading import load_silos
from silotune.runs.build.resolve import read_config


@pytest.mark.parametrize("number", [6, 20])
def test_same_rows(number):
    with same_rows(None, number, 4, 2) as folder:
        known = json.loads((folder / "rows.json").read_text())
        config = read_config(str(folder / "ours.yaml"))
        silos = load_silos(config)
    assert (len(known["silos"]), len(silos), known["rounds"], config.rounds) == (number, number, 2, 2)
    for peer, silo in zip(known["silos"], silos, strict=True):
        rows = sorted((list(row.texts), row.label) for row in silo.splits.train)
        assert rows == sorted((texts, label) for texts, label in peer["rows"])
        assert len(rows) == 4
        assert len({label for _, label in rows}) > 1
        assert not silo.splits.validation
