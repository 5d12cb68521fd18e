"""`compare`, `sweep`, `transfer`, `report` and `partition` from Python: what they return is what the command leaves."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import silotune
from silotune import Config, InputError, read_config
from silotune.config import SiloConfig, TrainConfig
from silotune.config.schema import CompareConfig
from silotune.lab.comparison import read_comparison
from silotune.lab.report.frame import Results
from silotune.lab.report.significance import beaten_by_words
from silotune.lab.runner import Listener
from silotune.lab.search_space import read_sweep


@pytest.mark.usefixtures("no_figures")
def test_a_comparison_is_a_mapping_a_table_and_files(place: Path) -> None:
    done: list[str] = []
    compared = silotune.compare(
        "federation.yaml",
        methods=["local", "fedavg"],
        seeds=[2],
        out="out",
        train={"steps": 1},
        progress=Listener(done=lambda cell, _: done.append(cell.folder)),
    )
    assert done == list(compared) == ["local-2", "fedavg-2"]
    assert compared["local-2"] == json.loads((place / "out/local-2/summary.json").read_text())
    with (place / "out" / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    frame = compared.to_pandas()
    assert frame["mean"].tolist() == pytest.approx([float(row["mean"]) for row in rows])
    assert len(repr(compared).splitlines()) < 10
    for text in (repr(compared), compared._repr_html_()):
        for word in ("local", "fedavg", "north", "south", "bag of words"):
            assert word in text
        assert text.count("A bag of words is better than all methods") == len(
            beaten_by_words(Results(compared.entries))
        )
    assert beaten_by_words(compared.results)
    assert compared.run("fedavg-2").summary == compared["fedavg-2"]
    assert compared.report.is_file()
    validation = {
        name.removesuffix("-2"): sum(silo["validation"] for silo in summary["silos"].values())
        for name, summary in compared.items()
    }
    assert compared.best() == max(validation, key=validation.__getitem__)
    assert len(repr(compared.entries)) < 200
    figure = compared.plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["north", "south", "mean over silos"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["local", "fedavg"]
    assert [(each.reference, each.seeds) for each in compared.verdicts] == [("local", 1)]
    page = silotune.report(compared, "page.html", title="Both")
    assert page.path.read_text(encoding="utf-8").count("Both") > 0
    assert repr(page).splitlines()[1:] == repr(compared).splitlines()[1:]
    with pytest.raises(InputError, match="already there"):
        silotune.compare("federation.yaml", out="out")
    for keys in ({"method": "local"}, {"seed": 1}):
        with pytest.raises(InputError, match="may have several"):
            silotune.compare("federation.yaml", out="new", **keys)  # type: ignore[arg-type]


def test_a_sweep_gives_its_best_values(place: Path) -> None:
    swept = silotune.sweep(
        "federation.yaml", search={"train.lr": [1e-3, 1e-2]}, methods=["local"], out="sweep", train={"steps": 1}
    )
    assert [trial.chosen["train.lr"] for trial in swept.trials] == [1e-3, 1e-2]
    assert swept.to_pandas()["train.lr"].tolist() == [1e-3, 1e-2]
    assert f"train.lr={swept.best['local'].chosen['train.lr']}" in repr(swept)
    assert swept._repr_html_().count("<td>yes</td>") == 1
    assert all(path.is_file() for path in swept.files)
    for search, message in (({"train.lr": [1e-3]}, "needs several values"), ({}, "nothing to search")):
        with pytest.raises(InputError, match=message):
            silotune.sweep("federation.yaml", search=search, out="other")


def test_a_partition_is_counted_and_drawn(tmp_path: Path) -> None:
    rows: Any = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(40)]
    divided = silotune.partition("", silos={"all": rows}, partition={"name": "dirichlet", "silos": 3, "alpha": 1.0})
    frame = divided.to_pandas()
    assert frame.to_numpy().sum() == divided.rows == sum(map(sum, divided.counts.values()))
    assert list(frame.columns) == ["a", "b"]
    assert len(repr(divided).splitlines()) == 2
    assert divided._repr_html_().count("<tr>") == 4
    assert divided.plot(tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"\.png file"):
        divided.plot(tmp_path / "rows.jpg")
    with pytest.raises(InputError, match="nothing is divided"):
        silotune.partition("demo")


def test_many_runs_begin_with_a_config() -> None:
    silos = [SiloConfig(name="a", path="a.csv")]
    config = Config(rounds=3, train=TrainConfig(lr=0.002), silos=silos, compare=CompareConfig(seeds=[4, 5]))
    planned = read_comparison(config, ["methods=fedmcp,moon,flexlora", "train.epochs=2"], ["steep: train.lr=0.1"])
    assert [cell.folder for cell in planned.cells[::4]] == ["fedmcp-4", "moon-4", "flexlora-4"]
    for cell in planned.cells:
        found = cell.config
        assert (found.rounds, found.train.epochs, found.silos[0].path) == (3, 2, str(Path("a.csv").resolve()))
        assert found.train.lr == (0.1 if cell.entry.endswith("steep") else 0.002)
    # a method's own tuner and aggregation come before those of a configuration of another method
    resolved = read_config(config, ["tuner.r=4", "aggregation=median", "method.mu=2"])
    same, other = (read_comparison(resolved, [f"methods={name}"]).cells[0].config for name in ("fedmcp", "flexlora"))
    assert (same.method, same.tuner, same.aggregation) == (resolved.method, resolved.tuner, resolved.aggregation)
    assert (other.tuner.name, other.aggregation.name, other.train) == ("lora", "flexlora", resolved.train)
    swept = read_sweep(config, ["methods=local", "train.lr=0.1,0.2"])
    assert [cell.config.train.lr for rate in (0.1, 0.2) for cell in swept.cells("local", {"train.lr": rate})] == [
        0.1,
        0.1,
        0.2,
        0.2,
    ]
