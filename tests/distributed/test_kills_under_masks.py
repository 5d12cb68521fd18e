"""Real processes of a run under masks, ended by `kill -9` in every stage of a sum (long)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from silotune.communication.masks import agreement
from silotune.communication.masks.coordinator import SumsInProcess
from silotune.communication.masks.fixed_point import Sum
from silotune.communication.masks.silo import STAGES
from silotune.config import Config
from silotune.core.records import Records
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER
from silotune.distributed.protocol.frames import ProtocolError, ask_worker, decode
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.worker import ping, serve
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.distributed.test_shared_noise import SHARES
from tests.support.masks import secure_silos
from tests.support.processes import assert_nothing_is_left, finish, processes, wait_until
from tests.support.session_rig import DirectLink, LostError, job

MASKED = ("aggregation.secure=true", "train.steps=1", "tuner.r=2", "federation.patience=0.01")
RUNS = pytest.mark.parametrize("words", [("fedit", *MASKED), ("fedper", *SHARES)], ids=["", "shares"])
SILOS = ("alpha", "beta", "gamma")
KILLED_IN = ("offer", "mask", "consent", "unmask", "mask", "share", "mask", "consent", "unmask", "consent")
"""Stages of rounds 1 to 10, of which the first and the sixth make keys."""

MOMENTS = [(*at, silo) for at in zip((1, 1, 2, 3, 4), STAGES, strict=True) for silo in ("alpha", "gamma")]
"""Rounds and stages, as the first and as the last silo has stored its answer."""

_FORKED = get_context("fork")  # these processes have imported what a run needs


def plain_sum(_, number, summands):
    """The sum without masks."""
    names = sorted(summands)
    return Sum(sum(summands[name] for name in names), names, dict.fromkeys(names, b""), dict.fromkeys(names, 0))


def lines(folder, query="SELECT line FROM audit ORDER BY number"):
    """The lines of a party's audit log, also while it writes."""
    if not (folder / "records.db").exists():
        return []
    connection = sqlite3.connect(f"file:{folder}/records.db?mode=ro", uri=True, timeout=60)
    try:
        return [json.loads(line) for (line,) in connection.execute(query)]
    except sqlite3.OperationalError:  # its tables are not there yet
        return []
    finally:
        connection.close()


def answered(out, silo, stage, number):
    """Whether a silo has stored its answer in a stage of a round."""
    last = lines(out / "checkpoints" / "silos" / silo, "SELECT line FROM audit ORDER BY number DESC LIMIT 8")
    return any((line.get("stage"), line.get("round")) == (stage, number) for line in last)


@dataclass
class Parties:
    """A coordinator and silos as processes of their own, whose messages go through the silos' sockets."""

    config: Config
    out: Path
    sockets: Path
    workers: dict[str, BaseProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.silos: dict[str, SiloSettings] = {
            name: each.model_copy(update={"socket": str(self.sockets / f"{name}.sock")})
            for name, each in secure_silos(self.config, self.out).items()
        }
        self.job = job(self.config, self.out, self.silos)

    def begin(self) -> None:
        """Start the silos that do not run, and wait until they answer."""
        for name, settings in self.silos.items():
            if name not in self.workers or not self.workers[name].is_alive():
                self.workers[name] = _FORKED.Process(target=serve, args=(settings,), daemon=True)
                self.workers[name].start()
        until = time.monotonic() + 300
        while not all(ping(each.socket_path) for each in self.silos.values()) and time.monotonic() < until:
            time.sleep(0.01)

    def kill(self, *names: str) -> None:
        for name in names or SILOS:
            self.workers[name].kill()
            self.workers[name].join()

    def ask(self, name: str, data: bytes) -> bytes:
        try:
            return ask_worker(self.silos[name].socket_path, data)
        except ProtocolError as error:
            raise LostError from error

    def link(self, answer) -> DirectLink:
        """A link over which `answer(name, data)` answers for a silo."""
        return DirectLink({n: lambda data, name=name: answer(name, data) for n, name in enumerate(self.silos)})


@pytest.fixture
def parties(short, tiny_config, tmp_path):
    begun = []

    def made(*words):
        begun.append(Parties(tiny_config(*words), tmp_path / "run", short))
        begun[-1].begin()
        return begun[-1]

    yield made
    for each in begun:
        each.kill()


def at(data):
    """Round and stage of a request; a stage of None if it is no part of a sum."""
    fields = decode(data).fields
    return fields.get("round", 0), fields.get("stage")


def assert_one_sum_a_round(config, out, rounds, tmp_path, monkeypatch):
    for silo in SILOS:
        folder = out / "checkpoints" / "silos" / silo
        of_sums = [line for line in lines(folder) if line.get("kind") == "masks"]
        told = {(line["round"], *line["shown"]) for line in of_sums if line["stage"] in ("consent", "unmask")}
        assert told == {(number, *SILOS) for number in range(1, rounds + 1)}, "one list of survivors in every round"
        sums = Records(folder).rows("SELECT round FROM mask_sums ORDER BY round")
        assert sums == [(number,) for number in range(1, rounds + 1)], "one summand in every round"
        if config.privacy.shares:  # a silo draws its own noise, so that no other run has the bits of this one
            assert Records(folder).rows("SELECT steps FROM row_charges") == [(1,)] * rounds
    if not config.privacy.shares:
        monkeypatch.setattr(SumsInProcess, "sum", plain_sum)
        expected, found = run(config, out=tmp_path / "whole").summary, read_summary(out)
        for key in ("shared_sha256", "state_sha256", "best_round"):
            assert found[key] == expected[key]


@pytest.mark.long
@RUNS
def test_a_worker_killed_in_every_stage_goes_on_within_the_attempt(parties, tmp_path, monkeypatch, words):
    """Once 10 ms after it has got the request, and in five more rounds after 100 ms; its next process says the same."""
    monkeypatch.setattr(agreement, "MOST_ROUNDS", 5)
    here, killed = parties(*words, "rounds=10"), []

    def answer(name, data):
        number, stage = at(data)
        if name != "beta" or stage is None or number in killed or stage != KILLED_IN[number - 1]:
            return here.ask(name, data)
        killed.append(number)
        kill = threading.Timer(0.01 if number <= 5 else 0.1, here.workers["beta"].kill)
        kill.start()
        with contextlib.suppress(LostError):
            here.ask(name, data)
        kill.join()
        here.workers["beta"].join()
        here.begin()
        raise LostError

    link = here.link(answer)
    coordinate(here.job, link)
    assert killed == list(range(1, 11))
    asked = [decode(data).fields for _, data in link.sent if decode(data).kind == "masks"]
    assert len({(fields["round"], fields["agreement"]["attempt"]) for fields in asked}) == 10, "one attempt a round"
    assert_one_sum_a_round(here.config, here.out, 10, tmp_path, monkeypatch)


@pytest.mark.long
@RUNS
@pytest.mark.parametrize("all_of_them", [False, True], ids=["coordinator", "all"])
def test_a_coordinator_killed_in_every_stage_repeats_the_round(parties, tmp_path, monkeypatch, words, all_of_them):
    """Alone, or with all silos at once. Keys are made in round 1, and again by each coordinator that goes on."""
    here = parties(*words, "rounds=5")

    def lead(moment):
        def answer(name, data):
            reply = here.ask(name, data)
            if (*at(data), name) == moment:
                for worker in here.workers.values() if all_of_them else ():
                    os.kill(worker.pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return reply

        coordinate(here.job, here.link(answer))

    for moment in (*MOMENTS, None):
        process = _FORKED.Process(target=lead, args=(moment,))
        process.start()
        process.join(300)
        assert process.exitcode == (0 if moment is None else -signal.SIGKILL), moment
        if all_of_them:
            for worker in here.workers.values():
                worker.join(1)
            here.begin()
    assert_one_sum_a_round(here.config, here.out, 5, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("party", "words"), [("coordinator", ("fedit", *MASKED)), ("beta", ("fedper", *SHARES))], ids=["", "shares"]
)
def test_a_run_over_flower_that_was_killed_amid_a_sum_is_resumed(
    start, tiny_config, tmp_path, monkeypatch, party, words
):
    """As alpha has signed the survivors of round 2."""
    config = tiny_config(*words, "rounds=2", "federation.patience=120")
    process, out = start(config)
    wait_until(lambda: answered(out, "alpha", "consent", 2), process)
    victims = processes(out, f"worker-{party}") if party in SILOS else coordinators(out)
    assert victims
    for target in victims:
        os.kill(target, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert "(run again with --resume)" in output
    assert_nothing_is_left(out)
    process, out = start(config, "--resume")
    output = finish(process)
    assert process.returncode == 0, output
    assert_one_sum_a_round(config, out, 2, tmp_path, monkeypatch)


def coordinators(out):
    return [line["process"] for line in lines(out / FEDERATION_FOLDER) if line["kind"] == "started"][-1:]
