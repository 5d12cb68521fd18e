"""A comparison or sweep of which a later cell cannot run is refused before the first cell trains."""

from __future__ import annotations

import pytest

from silotune.core.workers import Workers
from silotune.lab import runner
from silotune.lab.comparison import read_comparison
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["methods=local,fedper", "head.scope=shared"], ["fedper-", "head.scope=shared"]),
        (["methods=local,fedavg", "aggregation=krum"], ["fedavg-", "krum"]),
        (["--variant", "long: train.max_length=8000"], ["fedmcp-long-", "train.max_length"]),
        (["--variant", "few: sampling.count=9", "--workers", "2"], ["fedmcp-few-", "sampling.count"]),
    ],
)
def test_a_comparison_is_checked_whole_before_its_first_run(refused, words, names):
    refused("compare", "federation.yaml", *words, "--out", "out", names=names)


@pytest.mark.parametrize(
    "words",
    [
        ["train.max_length=16,8000"],
        ["sampling.count=1,9"],
        ["train.max_length=16..8000:int", "--trials", "2"],
        ["methods=local,fedper", "train.lr=1e-3,1e-4", "head.scope=shared"],
    ],
)
def test_a_sweep_is_checked_whole_before_its_first_trial(refused, words):
    refused("sweep", "federation.yaml", *words, "--out", "out", names=[words[0].partition("=")[0].removesuffix("s")])


def test_what_has_begun_is_not_built_twice(place, monkeypatch):
    cells = read_comparison("federation.yaml", ["methods=local,fedavg,ditto"]).cells
    built = []
    monkeypatch.setattr(runner, "built_entries", lambda cells, on_use: iter([built.extend(cells)]))
    (place / cells[0].folder).mkdir()
    (place / cells[0].folder / "config.yaml").write_text("")
    runner.check_cells(cells, place, Workers(1))
    assert built == [*cells[1:]]


def test_a_run_under_noise_on_rows_and_one_without_share_no_backbone_in_bf16(tiny_config, monkeypatch) -> None:
    """`precision=auto` is fp32 under noise on rows; a plan with both was refused."""
    monkeypatch.setattr("silotune.runs.build.resolve.resolve_precision", lambda name, device: "bf16")
    noise = ("privacy.unit=row", "privacy.epsilon=8", "privacy.delta=1e-5", "train.steps=1")
    found = []
    for words in ((), noise):
        config = tiny_config("fedavg", "precision=auto", *words)
        found.append(BackboneRequirements.of(config, make_method(config)).precision)
    assert found == ["bf16", "fp32"]
