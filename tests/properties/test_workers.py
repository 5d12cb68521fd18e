"""Silos that are spread over processes end in the bits of one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch

from silotune.core import workers as core_workers
from silotune.core.workers import Workers, worker_pool
from silotune.errors import Diverged, InputError, SilotuneError
from silotune.lab.comparison import Cell
from silotune.lab.runner import CellKind, Listener, run_cells
from silotune.lab.sweep import sweep
from silotune.runs.engines import multi_process as workers
from silotune.runs.run import run
from tests.support.method_cases import CASES, logged, of_kinds, same, snapshot, timeless
from tests.support.tiny import TASKS, write_data

ACROSS = ("fedmcp", "scaffold", "flora, ranks", "feddpa-t, dropout", "fedfame")
"""Cases of `make test`: private parts, memory, ranks and redrawn parts, draws and a final phase, rows of one party and
a phase of the server."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[], ProcessPoolExecutor]]:
    """`pools()` → a pool of two processes, started anew where a test has ended the one before."""
    with ExitStack() as stack:
        started: list[ProcessPoolExecutor] = []

        def working() -> ProcessPoolExecutor:
            if not started or started[-1]._broken or started[-1]._shutdown_thread:
                started.append(stack.enter_context(worker_pool(2, workers.IMPORTS)))
            return started[-1]

        yield working


@pytest.fixture
def pool(pools) -> ProcessPoolExecutor:
    """Two processes for all runs: starting them takes seconds."""
    return pools()


@pytest.fixture
def one_pool(pool, monkeypatch):
    """All runs share the pool."""
    monkeypatch.setattr("silotune.core.workers.worker_pool", lambda *_: nullcontext(pool))


def assert_the_same(run, whole) -> None:
    assert same(run.summary) == same(whole.summary)
    tensors = [
        {name: value[1] for name, value in snapshot(one.folder / "checkpoints").items() if "safetensors" in name}
        for one in (run, whole)
    ]
    assert tensors[0] == tensors[1]
    for kind in ("round", "silo", "final"):  # in any order within a round
        found = [sorted(json.dumps(timeless(event)) for event in logged(one.folder, kind)) for one in (run, whole)]
        assert found[0] == found[1]


@pytest.mark.parametrize("case", of_kinds(CASES, ACROSS))
@pytest.mark.usefixtures("one_pool")
def test_two_processes_give_the_bits_of_one(federate, reference, case, tmp_path):
    run = federate.run(case, tmp_path / "run", workers=2)
    assert run.summary["workers"] == 2
    assert_the_same(run, reference(case)[0])


@pytest.mark.usefixtures("one_pool")
def test_cohorts_are_those_of_one_process(federate, tmp_path):
    spread = federate.run("fedmcp", tmp_path / "spread", "cohort=2", workers=2)
    assert_the_same(spread, federate.run("fedmcp", tmp_path / "whole", "cohort=2"))


DIVIDED = ("data.tasks=[alpha]", "partition=dirichlet", "partition.silos=3", "head.scope=private")
SCORED = {
    "own rows": ("fedavg", *DIVIDED, "partition.evaluation=own"),
    "one model of own rows": ("fedavg", *DIVIDED, "head.scope=shared", "partition.evaluation=own"),
    "in cohorts": ("local", "cohort=3", "evaluation.rows_at_once=240"),
    "alike in cohorts": ("local", *DIVIDED, "cohort=2"),
    "numbers in cohorts": ("local", "cohort=2", "data.tasks=[cold,warm]", "train.lr=0.1"),
    "by loss in cohorts": ("fedmcp", "cohort=2", "evaluation.validation=loss"),
    "groups in cohorts": ("ifca", "cohort=3"),
    "on every task": ("feddpa-t", *DIVIDED, "evaluation.test_time=true", "evaluation.per_round=true"),
    "one model on every task": ("fedavg", *DIVIDED, "head.scope=shared", "evaluation.test_time=true"),
}
"""Runs whose models are scored alone, together, once for all silos, and on the rows of other silos."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of three tasks, enough of which are of each silo's own kind, and of two silos with numbers."""
    path = write_data(tmp_path_factory.mktemp("data"), TASKS, {"train": 60, "validation": 120, "test": 120})
    for name in ("cold", "warm"):
        (path / name).mkdir()
        (path / name / "meta.json").write_text('{"kind": "regression"}', encoding="utf-8")
        rows = [{"sentence1": f"the garden was {name} {'very ' * n}", "label": n / 9 + n % 2} for n in range(30)]
        for split in ("train", "validation", "test"):
            (path / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("words", SCORED.values(), ids=SCORED)
@pytest.mark.usefixtures("one_pool")
def test_models_are_scored_in_the_processes_to_the_same_bits(words, tiny_config, folder, tmp_path, monkeypatch):
    config = tiny_config(*words, f"data.path={folder}", "rounds=1", "train.steps=2", "evaluation.predictions=true")
    whole = run(config, out=tmp_path / "whole")
    if words[0] != "ifca":  # whose groups, in cohorts, are scored here: a job has one broadcast
        monkeypatch.setattr("silotune.evaluation.predict.Predictor.logits", None)  # here, not there
        monkeypatch.setattr("silotune.evaluation.predict.Predictor.logits_of", None)
    spread = run(config, out=tmp_path / "spread", workers=2)
    assert_the_same(spread, whole)
    for kind in ("round", "evaluation"):
        assert [*map(timeless, logged(spread.folder, kind))] == [*map(timeless, logged(whole.folder, kind))]
    files = [(one.folder / "predictions.parquet").read_bytes() for one in (spread, whole)]
    assert files[0] == files[1]


@pytest.mark.usefixtures("one_pool")
def test_silos_train_in_the_processes_the_longest_first(federate, pool, tmp_path, monkeypatch):
    monkeypatch.setattr("silotune.training.local_trainer.LocalTrainer.rounds", None)  # here, not there
    reported: list[str] = []
    asked: list[str] = []
    submit = pool.submit

    def noted(do, work):
        asked.extend(name for name, _ in work.silos if work.kind == "round")
        return submit(do, work)

    monkeypatch.setattr(pool, "submit", noted)
    run = federate.run(
        "fedavg", tmp_path / "run", "rounds=1", workers=2, progress=lambda number, what, *_: reported.append(what)
    )
    size = {name: workers.tokens(silo) for name, silo in run.federation.silos.items()}
    assert asked == sorted(size, key=lambda name: -size[name])
    assert sorted(reported[:-1]) == sorted(size)
    assert reported[-1] == "validation"


@pytest.mark.parametrize("at", [1, pytest.param(3, marks=pytest.mark.long)])
def test_an_interruption_ends_the_processes_and_the_run_goes_on(federate, reference, at, tmp_path):
    before = set(multiprocessing.active_children())
    calls = 0

    def interrupt(*_) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate.run("ditto", tmp_path / "run", workers=2, progress=interrupt)
    for child in set(multiprocessing.active_children()) - before:
        assert wait([child.sentinel], timeout=10)  # is_alive is wrong while the pool's own thread takes the exit status
    whole = reference("ditto")[0]
    resumed = federate.run("ditto", tmp_path / "run", resume=True)
    assert same(resumed.summary) == same(whole.summary)


@pytest.mark.usefixtures("one_pool")
def test_divergence_and_another_backbone_are_named(federate, monkeypatch, tmp_path):
    with pytest.raises(Diverged, match=r"silo '\w+', round \d"):
        federate.run("fedavg", tmp_path / "diverged", "train.lr=1e30", workers=2)
    monkeypatch.setattr("silotune.models.backbone.backbone.Backbone.fingerprint", property(lambda _: "another"))
    with pytest.raises(InputError, match=r"--workers: .* is not the backbone that the run has"):
        federate.run("fedavg", tmp_path / "other", workers=2)


@pytest.mark.long
def test_a_script_without_guard_ends_with_one_line(tmp_path):
    """Workers import the script; what starts processes in it would start them again, in every worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "from silotune.core.workers import worker_pool\n"
        "with worker_pool(2) as pool:\n    print(pool.submit(max, 1, 2).result())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert 'start it under `if __name__ == "__main__":`, or with workers=1' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("start", [partial(sweep, "demo"), partial(run_cells, ())], ids=["sweep", "cells"])
def test_what_starts_runs_ends_a_worker_that_imports_the_script(start, tmp_path, monkeypatch):
    """A worker would otherwise run what is left in itself, before the pool is asked for."""

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit) as ended:
        start(out=tmp_path / "out", workers=2)
    assert ended.value.code == core_workers._UNGUARDED
    assert not (tmp_path / "out").exists()


def announcing(config, folder, callbacks, backbone, announce):
    """The work of a cell that has nothing but a guarantee to tell."""
    announce(f"{folder.name}: at most 1")
    return {}, backbone


def test_guarantees_of_cells_on_a_cluster_are_told_by_the_parent(tiny_config, tmp_path, monkeypatch):
    """What a process of another machine writes is read by nobody."""
    one_thread = ThreadPoolExecutor(1)
    one_thread.workers = 1
    engine = SimpleNamespace(pool=lambda *_: nullcontext(one_thread))
    monkeypatch.setattr("silotune.core.workers.registered_engine", lambda _: engine)
    monkeypatch.setattr(CellKind, "read", lambda kind, folder: {})
    cells = [Cell("local", seed, tiny_config("local")) for seed in (1, 2)]
    told: list[str] = []
    kind = CellKind(announcing, "summary.json")
    run_cells(cells, tmp_path, kind=kind, workers=Workers(1, "local"), listener=Listener(announce=told.append))
    assert sorted(told) == ["local-1: at most 1", "local-2: at most 1"]


def numerics_here(_: int) -> tuple[bool, int, str | None]:
    """In a worker: whether it has done jobs, and settings for equal bits."""
    return bool(workers._federations), torch.get_deterministic_debug_mode(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.usefixtures("one_pool")
def test_deterministic_settings_reach_the_processes_and_leave_the_caller(tiny_config, pool, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run(tiny_config("local", "rounds=1", "train.steps=1", "seed=77"), out=tmp_path / "run", workers=2)
    found = [*pool.map(numerics_here, range(8))]
    assert {(mode, variable) for worked, mode, variable in found if worked} == {(2, ":4096:8")}
    assert numerics_here(0)[1:] == (0, None)


@pytest.mark.usefixtures("one_pool")
def test_two_processes_add_the_same_noise_to_rows(tiny_config, tmp_path):
    config = tiny_config("fedavg", "privacy.unit=row", "privacy.epsilon=4", "train.steps=2", "train.batch_size=10")
    runs = [run(config, out=tmp_path / str(number), workers=number) for number in (1, 2)]
    assert runs[0].summary["state_sha256"] == runs[1].summary["state_sha256"]


def dies(work: workers.SiloJob) -> None:
    os._exit(1)


def test_a_process_that_dies_is_reported_in_one_line(federate, pool, monkeypatch, tmp_path):
    """The last one: the pool is of no use afterwards."""
    monkeypatch.setattr(core_workers, "ProcessPoolExecutor", lambda *_: pool)  # one that has started
    monkeypatch.setattr(workers, "run_job", dies)
    with pytest.raises(SilotuneError, match="a worker process ended abruptly"):
        federate.run("fedavg", tmp_path / "run", workers=2)
