"""What trackers wrote, read back with the libraries' own readers: CSV, Weights & Biases offline, MLflow on disk."""

from __future__ import annotations

import csv
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from silotune import Callback, CsvLog, RoundEnd, run
from silotune.errors import InputError
from silotune.runs.callbacks.base import read_rounds
from silotune.runs.callbacks.trackers import MLflow, Tracker, WandB, make_tracker


class Interrupted(BaseException):
    pass


class Stop(Callback):
    """Interrupts a run in its third round."""

    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        if round == 3:
            raise Interrupted


def interrupted_and_resumed(config, out: Path, tracker: type[Tracker], **arguments: str) -> dict[int, dict[str, float]]:
    """Run with a tracker, interrupted once; return round → scalars as the log says."""
    with pytest.raises(Interrupted):
        run(config, out=out, callbacks=[tracker(**arguments), Stop()])
    if tracker is WandB:
        time.sleep(1.1)  # its folders are named after the second in which they begin
    run(config, out=out, resume=True, callbacks=[tracker(**arguments)])
    return {ended.round: ended.scalars() for ended in read_rounds(out, 3)}


@pytest.fixture
def config(tiny_config):
    return tiny_config("fedmcp", "rounds=3", "train.steps=1")


@pytest.mark.filterwarnings("ignore")
def test_mlflow(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # where MLflow wants a database by default
    from mlflow.tracking import MlflowClient

    store = (tmp_path / "store").as_uri()
    logged = interrupted_and_resumed(config, tmp_path / "out", MLflow, tracking_uri=store)
    client = MlflowClient(store)
    (kept,) = client.search_runs([client.get_experiment_by_name("silotune").experiment_id])
    assert kept.info.status == "FINISHED"
    assert kept.data.params["method.name"] == "fedmcp"
    name = next(name for name in logged[1] if name.startswith("loss/"))
    history = sorted(client.get_metric_history(kept.info.run_id, name), key=lambda metric: metric.step)
    assert [(metric.step, metric.value) for metric in history] == [(n, of[name]) for n, of in logged.items()]


def log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:  # the rest of a block is empty
            position += 2**15 - position % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last piece
            yield record
            record = b""


def whole_file(path: Path, kind: Any) -> list[Any]:
    """The records of a W&B file, once its last one is there: W&B's own process may write it after the run's end."""
    for _ in range(100):
        records = [kind.FromString(data) for data in log_records(path.read_bytes())]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path}: no last record within 10 s")


@pytest.mark.long
def test_wandb_offline(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    from wandb.proto import wandb_internal_pb2

    logged = interrupted_and_resumed(config, tmp_path / "out", WandB, mode="offline")
    ids, history = set(), {}
    for path in sorted((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")):
        for record in whole_file(path, wandb_internal_pb2.Record):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                history[int(items["_step"])] = {k: float(v) for k, v in items.items() if not k.startswith("_")}
    assert len(ids) == 1
    assert history == logged


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'silotune\[wandb\]'"):
        make_tracker("wandb")


def test_callbacks_are_told_silos_rounds_and_the_end_in_order_and_csv_has_the_logs_numbers(
    config, tmp_path: Path
) -> None:
    told: list[tuple[str, object]] = []

    class Told(Callback):
        def on_start(self, folder: Path, config) -> None:
            told.append(("start", config["method"]["name"]))

        def on_silo(self, round: int, silo: str, values) -> None:
            assert values["loss"] > 0
            told.append(("silo", (round, silo)))

        def on_round(self, ended: RoundEnd) -> None:
            told.append(("round", (ended.round, ended.replayed)))

        def on_end(self, summary) -> None:
            told.append(("end", summary["method"]))

        def close(self) -> None:
            told.append(("close", None))

    with pytest.raises(Interrupted):
        run(config, out=tmp_path / "out", callbacks=[CsvLog(), Told(), Stop()])
    assert told[0] == ("start", "fedmcp")
    assert told[-1] == ("close", None)
    assert [what for kind, what in told if kind == "round"] == [(1, False), (2, False)]
    told.clear()
    finished = run(config, out=tmp_path / "out", resume=True, callbacks=[CsvLog(), Told()])
    assert [what for kind, what in told if kind == "round"] == [(1, True), (2, True), (3, False)]
    silos = sorted(finished.silos)
    for number in (1, 2, 3):
        assert sorted(silo for kind, what in told if kind == "silo" for n, silo in [what] if n == number) == silos
    assert told[-2:] == [("end", "fedmcp"), ("close", None)]
    with (tmp_path / "out" / "rounds.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    logged = {ended.round: ended.scalars() for ended in read_rounds(tmp_path / "out", 3)}
    written = [(int(line["round"]), line["name"], float(line["value"])) for line in lines]
    assert written == [(number, name, value) for number, of in logged.items() for name, value in of.items()]
    assert len({number for number, _, _ in written}) == 3
