"""A finished run as text, table, data frame and picture; `run` with keys of Python, and its progress."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from silotune import InputError, read_config, run
from silotune.runs.callbacks.display import TimeLeft
from silotune.runs.run_result import Run
from tests.support.federate import Reference


@pytest.fixture
def finished(reference: Reference) -> Run:
    return reference("fedmcp")[0]


def test_text_and_table_are_short_and_name_every_silo(finished: Run) -> None:
    assert len(repr(finished).splitlines()) == 2
    assert len(repr(finished)) < 600
    assert len(finished._repr_html_()) < 3000
    for name, entry in finished.silos.items():
        assert f"{name} {entry['test']:.2f}" in repr(finished)
        assert f"<td>{name}</td><td>{entry['metric']}</td>" in finished._repr_html_()


def test_history_data_frame_and_picture(finished: Run) -> None:
    assert [ended.round for ended in finished.history] == [1, 2]
    frame = finished.to_pandas()
    assert len(frame) == 2 * len(finished.silos)
    assert {"round", "silo", "validation", "loss", "bytes_up"} <= set(frame.columns)
    last = finished.history[-1]
    for name, score in last.validation.items():
        assert frame[(frame["round"] == 2) & (frame["silo"] == name)]["validation"].item() == score
    axes = finished.plot().axes[0]
    assert sorted(line.get_label() for line in axes.lines) == sorted(finished.silos)


def test_keys_of_python_equal_words() -> None:
    words = read_config("demo", ["method=fedmcp", "rounds=2", "train.lr=1e-3", "silos=[{name: a, path: x}]"])
    keys = read_config("demo", method="fedmcp", rounds=2, train={"lr": 1e-3}, silos=[{"name": "a", "path": Path("x")}])
    assert keys == words


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": {"lr": {1, 2}}}, "train.lr: must be text, a number"),
        ({"rounds": -1}, "rounds: must be"),
        ({"trian": {"lr": 1e-3}}, "unknown key 'trian'"),
    ],
)
def test_bad_keys_are_named(keys: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        run("demo", out=tmp_path / "out", **keys)


def test_keys_beside_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rounds: goes with a preset or a file"):
        run(read_config("demo"), out=tmp_path / "out", rounds=2)


def test_lines_of_progress_on_stderr(tiny_config, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny_config("fedavg", "rounds=2", "train.steps=1")
    capfd.readouterr()  # the backbone may have been written just now
    run(config, out=tmp_path / "silent")
    assert capfd.readouterr().err == ""
    run(config, out=tmp_path / "out", progress=True)
    said = capfd.readouterr().err.splitlines()
    lines = [line for line in said if not line.startswith("warning: ")]
    assert said[0].startswith("warning: silo 'alpha': ")
    assert [line for line in lines if re.match(r"fedavg: round \d/2: validation \d+\.\d\d \(.*\), \d+ s", line)]
    assert "about" in lines[1]
    assert "left" not in lines[-1]


def test_a_round_that_ended_before_the_first_one_seen_tells_no_time_left() -> None:
    """A federation's event of a round comes after the next round has begun."""
    left = TimeLeft(3)
    left.start(2)
    assert left.after(1) == ""
    assert left.after(2).startswith("about ")


def test_a_bar_in_a_notebook(tiny_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    pages: list[str] = []
    shown = SimpleNamespace(update=lambda bars: pages.append(bars._repr_mimebundle_([], [])["text/plain"]))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=lambda bars, display_id: shown))
    monkeypatch.setenv("COLUMNS", "150")
    run(tiny_config("fedavg", "rounds=2", "train.steps=1"), out=tmp_path / "out")
    assert re.search(r"fedavg .* 2/2 .* done; validation \d+", pages[-1])
    assert all(len(page.splitlines()) == 1 for page in pages)
