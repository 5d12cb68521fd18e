"""Several runs over a federation as one plan: checked before the first trains, approved once, bounded in all."""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from silotune.config import Config, dump
from silotune.core.files import folder_lock
from silotune.deploy import queue
from silotune.deploy.queue import RunQueue
from silotune.deploy.scheduler import Scheduler
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.coordinator import dispatcher
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import CoordinatorJob
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.approvals import Approvals
from silotune.errors import SilotuneError
from silotune.lab import compare
from silotune.lab.report.entries import read_entries
from tests.support.malicious import ALLOWED
from tests.support.session_rig import DirectLink, answering, local_configs

PLAN = "f" * 16


class Federation:
    """A coordinator that is up, over silos whose operators are asked; threads play the SuperLink."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder, self.file, self.run = folder / "coordinator", folder / "coordinator.yaml", folder / "run.yaml"
        self.file.write_text(yaml.safe_dump({"folder": str(self.folder), "insecure": True}))
        policy = {"preset": "trusting", "row_order": "seed"}
        self.locals = local_configs(config, folder / "silos", policy=policy, approval="ask")
        self.run.write_text(dump(config))
        self.answers, self.queue, self.threads = answering(self.locals), RunQueue(self.folder), []
        self.scheduler = Scheduler(CoordinatorSettings(folder=str(self.folder), insecure=True), print, self._submit)

    def _submit(self, path: Path) -> str:
        def work() -> None:
            with suppress(SilotuneError):  # the job's status says it
                coordinate(CoordinatorJob.read(path), DirectLink(self.answers))

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        return "1"

    def work(self, done: threading.Event) -> None:
        """Let `up` work, and operators approve whatever waits."""
        while not done.wait(0.05):
            self.scheduler.tick()
            for local in self.locals.values():
                decisions = Approvals(Path(local.folder))
                for waiting in decisions.all():
                    if waiting.state == "pending":
                        decisions.decide(waiting.name, "approved")


@pytest.fixture
def federation(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(dispatcher, "APPROVAL_INTERVAL", 0.1)
    monkeypatch.setattr(dispatcher, "POLL_INTERVAL", 0.02)
    words = ("rounds=1", "train.steps=6", "tuner.r=1", "data.seed=1", "federation.silos=[alpha,beta,gamma]")
    made, done = Federation(tiny_config("fedmcp", *words), tmp_path), threading.Event()
    thread = threading.Thread(target=made.work, args=(done,))
    with folder_lock(made.folder):  # as `up` holds it
        thread.start()
        yield made
        done.set()
        for begun in (thread, *made.threads):
            begun.join()


def test_a_comparison_and_a_grid_have_the_tables_of_one_process(federation, tmp_path, silotune, monkeypatch):
    monkeypatch.setattr(compare, "write_report", lambda results, path: path)  # its figures take seconds
    file, settings = federation.file, federation.run
    words = ("compare", settings, "methods=fedmcp,fedavg", "threads=1")
    over = silotune(*words, "--out", tmp_path / "over", "--federation", file)
    assert over.code == 0, over.err
    here = silotune(*words, "--out", tmp_path / "here")
    assert here.code == 0, here.err
    tables = [(tmp_path / out / "table.csv").read_text() for out in ("over", "here")]
    assert tables[0] == tables[1]
    assert [entry.label for entry in read_entries([tmp_path / "over"])] == ["fedmcp", "fedavg"]
    alpha = Approvals(Path(federation.locals["alpha"].folder)).all()
    assert [run.state for run in alpha] == ["approved"] * 3
    assert len({run.decided for run in alpha}) == 1  # one decision
    (plan,) = (run for run in alpha if "plan of 2 runs" in run.description[0])
    said = "\n".join(plan.description)
    sent = sum(
        json.loads((run / "summary.json").read_text())["sent_parameters"] for run in (tmp_path / "over").glob("fed*-1")
    )
    assert f"leaves in all: {sent:,} numbers in 2 rounds" in said
    assert "run fedavg-1: method.name = 'fedavg'" in said
    (tmp_path / "about.yaml").write_text("purpose: to try\nparties: us\n")
    about = ("--about", tmp_path / "about.yaml", "--out", tmp_path / "d.md")
    told = silotune("federation", "dossier", tmp_path / "over" / "fedavg-1", *about)
    assert (told.code, told.err) == (0, "")
    assert "| round 1, scores of round 1 | alpha, beta, gamma | alpha, beta, gamma |" in (tmp_path / "d.md").read_text()
    again = silotune(*words, "--out", tmp_path / "over", "--federation", file, "--resume")
    assert (again.code, federation.queue.run(1).submissions) == (0, 1), again.err  # nothing is run twice

    words = ("sweep", settings, "train.lr=1e-3,1e-2", "threads=1")
    for out, more in (("swept", ("--federation", file)), ("swept-here", ())):
        swept = silotune(*words, "--out", tmp_path / out, *more)
        assert swept.code == 0, swept.err
    tables = [(tmp_path / out / "sweep.csv").read_text().splitlines() for out in ("swept", "swept-here")]
    assert [line.rpartition(",")[0] for line in tables[0]] == [line.rpartition(",")[0] for line in tables[1]]
    failed = silotune(
        "transfer", *(tmp_path / "over" / f"{name}-1" for name in ("fedmcp", "fedavg")), "--out", tmp_path / "t"
    )
    assert (failed.code, "its test rows are on other machines" in failed.err) == (2, True)


def test_a_run_that_fails_is_named_beside_the_table_of_the_others(federation, tmp_path, silotune, monkeypatch):
    monkeypatch.setattr(compare, "write_report", lambda results, path: path)
    more = (federation.run, "train.optimizer=sgd", "threads=1", "--federation", federation.file)
    swept = silotune("sweep", *more, "train.lr=1e-3,1e38", "--out", tmp_path / "swept")
    assert swept.code == 1
    line = swept.err.splitlines()[-1]
    assert re.search(
        rf"1 of 2 runs failed, the others are finished: fedmcp-.*; {tmp_path}/swept/sweep.csv has the", line
    )
    _, finished, failed = (tmp_path / "swept" / "sweep.csv").read_text().splitlines()
    assert re.match(r"fedmcp,1,0.001,\d+\.\d+,,1,yes,fedmcp-", finished)
    assert re.match(r"fedmcp,2,1e\+38,,,1,,fedmcp-", failed)
    assert not (tmp_path / "swept" / "best.yaml").exists()
    variant = ("--variant", "wild: train.lr=1e38")
    compared = silotune("compare", *more, "methods=fedmcp", *variant, "--out", tmp_path / "compared")
    assert (compared.code, "fedmcp-wild-1: " in compared.err) == (1, True), compared.err
    table = (tmp_path / "compared" / "table.csv").read_text()
    assert "fedmcp" in table
    assert "wild" not in table


def test_what_nobody_knows_beforehand_or_cannot_run_is_refused_before_anything_is_asked(federation, tmp_path, silotune):
    file, settings = federation.file, federation.run
    for words, said in (
        (("sweep", settings, "train.lr=1e-4..1e-2:log", "--trials", 3), "nobody knows a sampler's trials beforehand"),
        (("compare", settings, "methods=fedavg,centralised"), "method=centralised: trains in one place"),
        (("compare", settings, "methods=fedavg", "--workers", 2), "excludes --engine, --workers and --address"),
    ):
        refused = silotune(*words, "--out", tmp_path / "out", "--federation", file)
        assert (refused.code, len(refused.err.splitlines()), said in refused.err) == (2, 1, True), refused.err
        assert not (tmp_path / "out").exists()
    assert federation.queue.runs() == []


def planned(coordinator, *changes, plan=PLAN):
    """Ask the silo for a plan of runs, whose configurations have these changes, and return its reply."""
    cells = []
    for number, change in enumerate(changes):
        coordinator.configure(**change)
        identity = coordinator.identity.fields()
        cells.append({"name": f"n{number}", "run": f"{number:016x}", "config": coordinator.text, "identity": identity})
    return decode(coordinator.session.answer(Frame("plan", {"run": plan, "cells": cells}).encode()))


SEEDS = ({"seed": 1}, {"seed": 2})


def test_one_approval_holds_for_the_runs_of_the_plan_and_for_nothing_else(attack):
    coordinator = attack(ALLOWED, approval="ask")
    reply = planned(coordinator, *SEEDS)
    assert (reply.kind, reply.fields.keys()) == ("waiting", {"silo", "reason"})
    decisions = Approvals(coordinator.session.store.folder)
    (waiting,) = decisions.all()
    assert waiting.description[0] == "plan of 2 runs, one approval for all: n0, n1"
    assert "run n1: seed = 2" in waiting.description
    decisions.decide(waiting.name, "approved")
    assert len(planned(coordinator, *SEEDS).fields["hellos"]) == 2

    def kind(run, **changes):
        coordinator.run = run
        coordinator.configure(**changes)
        return coordinator.ask("round").kind

    own = [f"{number:016x}" for number in range(3)]
    assert [kind(own[0], seed=1), kind(own[1], seed=2)] == ["answer", "answer"]
    assert [kind(own[0], seed=2), kind(own[2], seed=1), kind(own[0], seed=1, rounds=4)] == ["waiting"] * 3
    for plan in (SEEDS[::-1], (*SEEDS, {"seed": 3})):
        assert planned(coordinator, *plan).kind == "waiting"
    decisions.decide(waiting.name, "rejected")
    assert kind(own[1], seed=2) == "refused"


@pytest.mark.parametrize(
    ("limits", "changes", "said"),
    [
        ({"numbers_in_all": 1000}, SEEDS, "1,164 numbers in all updates; at most 1,000"),
        ({"requests_in_all": 7}, SEEDS, "8 requests in all; at most 7"),
        ({"rounds": 3}, ({}, {"rounds": 4}), "n1: silo 'alpha': its policy refuses 4 rounds"),
        ({}, ({}, {"train__steps": 1}), "n1: silo 'alpha': its policy refuses an update of so few steps"),
    ],
)
def test_caps_hold_for_the_total_and_every_run_is_checked_before_the_first(attack, limits, changes, said):
    coordinator = attack(ALLOWED, policy=limits)
    reply = planned(coordinator, *changes)
    assert said in reply.fields["reason"]
    assert coordinator.session.store.last_run() == ("", 0)


NOISE_ON_ROWS = ("privacy.unit=row", "privacy.epsilon=4", "rounds=2", "train.steps=2", "train.batch_size=8")


def test_noise_is_shown_as_the_ledger_sets_it_aside(attack):
    policy = {"preset": "private", "train_rows": 0, "train_steps": 0}
    words = ("fedavg", "tuner.r=1", *NOISE_ON_ROWS, "privacy.more_noise=true")
    coordinator = attack(words, caps=False, approval="ask", policy=policy, privacy={"epsilon": 5.0}, seeded_noise=False)
    assert planned(coordinator, *SEEDS).kind == "waiting"
    store, decisions = coordinator.session.store, Approvals(coordinator.session.store.folder)
    (waiting,) = decisions.all()
    (total,) = (line for line in waiting.description if line.startswith("noise on rows of all runs"))
    noises = [line.strip() for line in waiting.description if "times the bound" in line]
    assert store.ledger.spent("row") == 0, "nothing is set aside"
    decisions.decide(waiting.name, "approved")
    assert planned(coordinator, *SEEDS).kind == "planned"
    assert f"ε = {store.ledger.spent('row'):.4g} of 5 at" in total
    reserved = [multiplier for (multiplier,) in store.records.rows("SELECT multiplier FROM row_runs ORDER BY rowid")]
    assert reserved[0] < reserved[1]
    assert all(f" {multiplier:.3g} times" in line for multiplier, line in zip(reserved, noises, strict=True))


def test_noise_on_updates_is_added_up(attack):
    coordinator = attack((*ALLOWED, "uplink=clip,laplace"), approval="ask")
    assert planned(coordinator, *SEEDS).kind == "waiting"
    (waiting,) = Approvals(coordinator.session.store.folder).all()
    said = "\n".join(waiting.description)
    alone = float(re.search(r"ε = (\S+) a round", said)[1])
    assert f"noise on updates of all runs: ε = {6 * alone:.4g}, plainly added up; over all runs: no limit" in said
