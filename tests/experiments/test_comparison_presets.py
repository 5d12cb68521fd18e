"""The comparisons that the paper's tables and figures ask for: their cells, without running any."""

from __future__ import annotations

import pytest

from silotune.config import preset_names
from silotune.data.loading import load_silos
from silotune.experiments import read_comparison
from silotune.runs.build.resolve import read_config
from silotune.training.coordinator import Coordinator
from tests.support.tiny import write_data

METHODS = ("fedavg", "fedfame")


def cells_of(preset: str, *words: str):
    comparison = read_comparison(preset, ["data.path=nowhere", *words])
    assert len(comparison.cells) == len(comparison.rows) * len(comparison.seeds)
    return comparison, {(cell.row, cell.seed): cell.config for cell in comparison.cells}


@pytest.mark.parametrize(
    ("preset", "base", "further"),
    [
        ("fractions-sst2", (100, (5, 10, 15)), (10, (3, 4, 5))),  # section 5.4.1
        ("fractions-mrpc", (10, (3, 4, 5)), (100, (5, 10, 15))),
    ],
)
def test_client_fractions(preset, base, further):
    found, cells = cells_of(preset)
    assert found.seeds == (42,)
    silos = {}
    for (row, _), config in cells.items():
        number = config.partition.silos
        coordinator = Coordinator({}, lambda updates: {}, config.seed, fraction=config.sampling.fraction)
        sampled = len(coordinator.choose(1, [str(silo) for silo in range(number)]))
        silos.setdefault(row.partition("-")[0], []).append((number, sampled))
        assert (config.partition.alpha, config.partition.seed, config.rounds) == (1.0, 10, 100)
    assert silos == {m: [(number, count) for number, counts in (base, further) for count in counts] for m in METHODS}


@pytest.mark.parametrize("preset", ["table45-sst2", "table45-mrpc"])
def test_small_tables_4_and_5(preset):
    found, cells = cells_of(preset)
    assert (found.seeds, found.ddof, len(cells)) == ((17, 25, 42), 0, 36)
    settings = {
        (config.method.name, config.tuner.name, config.train.lr, config.partition.alpha, seed)
        for (_, seed), config in cells.items()
    }
    trained = [("bottleneck", 1e-3), ("bottleneck", 5e-5), ("lora", 1e-3)]
    assert settings == {
        (method, tuner, lr, alpha, seed)
        for method in METHODS
        for tuner, lr in trained
        for alpha in (1.0, 0.1)
        for seed in (17, 25, 42)
    }
    for config in cells.values():
        assert (config.rounds, config.partition.silos, config.sampling.fraction) == (20, 10, 0.3)
        assert config.tuner.options["r"] == {"bottleneck": 24, "lora": 1}[config.tuner.name]
        rows, labelled = (6000, 300) if preset.endswith("sst2") else (None, 175)
        assert (config.data.rows, config.server.labels_per_class) == (rows, labelled)


def test_whatever_is_over_mrpc_reports_f1(tmp_path):
    presets = [name for name in preset_names() if name.endswith("-mrpc")]
    assert len(presets) >= 4
    write_data(tmp_path, ["beta"])
    (tmp_path / "beta").rename(tmp_path / "MRPC")
    for preset in presets:
        words = [f"data.path={tmp_path}", "partition.silos=3", "partition.balanced=false"]
        assert {silo.task.metric for silo in load_silos(read_config(preset, words))} == {"f1"}
