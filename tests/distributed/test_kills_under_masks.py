"""Real processes of a run under masks, ended by `kill -9` in every stage of a sum (long)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from silotune.communication.masks import coordinator
from silotune.communication.masks.fixed_point import Sum
from silotune.communication.masks.silo import STAGES
from silotune.core.files import dump_yaml
from silotune.core.records import Records
from silotune.distributed.coordinator import masked_engine
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER
from silotune.distributed.protocol.frames import ProtocolError, ask_worker, decode
from silotune.distributed.silo.worker import ping
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.distributed.test_shared_noise import SHARES
from tests.support.masks import secure_silos
from tests.support.processes import assert_nothing_is_left, end_with_parent, finish, processes, wait_until
from tests.support.session_rig import DirectLink, LostError, answering, job

WORDS = ("aggregation.secure=true", "train.steps=1", "tuner.r=2")
SILOS = ("alpha", "beta", "gamma")
KILLED_IN = ("offer", "mask", "consent", "unmask", "mask", "share", "mask", "consent", "unmask", "consent")
"""Stages of rounds 1 to 10, of which the first and the sixth make keys."""


def plain_sum(silos, summands, least):
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


def victim(out, party):
    if party != "coordinator":
        return processes(out, f"worker-{party}")
    return [line["process"] for line in lines(out / FEDERATION_FOLDER) if line["kind"] == "started"][-1:]


@pytest.mark.long
def test_a_worker_killed_in_every_stage_goes_on_within_the_attempt(short, tiny_config, tmp_path, monkeypatch):
    """Once 10 ms after it has got the request, and in five more rounds after 100 ms; its next process says the same."""
    monkeypatch.setattr(masked_engine, "MOST_ROUNDS", 5)
    config = tiny_config("fedit", *WORDS, "rounds=10", "federation.patience=0.01")
    silos, socket, file = secure_silos(config, tmp_path / "run"), short / "w.sock", tmp_path / "beta.yaml"
    settings = silos["beta"].model_copy(update={"socket": str(socket)})
    file.write_text(dump_yaml(settings.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    answers, workers, killed = answering(silos), [], []

    def begin():
        words = [sys.executable, "-m", "silotune.distributed.silo.worker", str(file)]
        workers.append(subprocess.Popen(words, preexec_fn=end_with_parent))
        until = time.monotonic() + 300
        while ping(socket) is None and time.monotonic() < until:
            time.sleep(0.05)

    def answer(data):
        fields = decode(data).fields
        number, stage = fields.get("round", 0), fields.get("stage")
        if stage is None or number in killed or stage != KILLED_IN[number - 1]:
            return ask_worker(socket, data)
        killed.append(number)
        kill = threading.Timer(0.01 if number <= 5 else 0.1, workers[-1].kill)
        kill.start()
        with contextlib.suppress(ProtocolError):
            ask_worker(socket, data)
        kill.join()
        workers[-1].wait()
        begin()
        raise LostError

    begin()
    answers[list(silos).index("beta")] = answer
    link = DirectLink(answers)
    try:
        coordinate(job(config, tmp_path / "run", silos), link)
    finally:
        workers[-1].kill()
        workers[-1].wait()
    assert killed == list(range(1, 11))
    asked = [decode(data).fields for _, data in link.sent if decode(data).kind == "masks"]
    assert len({(fields["round"], fields["agreement"]["attempt"]) for fields in asked}) == 10, "one attempt a round"
    monkeypatch.setattr(coordinator, "sum_in_process", plain_sum)
    expected = run(config, out=tmp_path / "whole").summary
    assert read_summary(tmp_path / "run")["shared_sha256"] == expected["shared_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("party", ["coordinator", "beta"])
@pytest.mark.parametrize("words", [("fedit", *WORDS), ("fedper", *SHARES)], ids=["", "shares"])
def test_killed_once_in_every_stage_a_run_ends_with_the_plain_sum(
    start, tiny_config, tmp_path, monkeypatch, party, words
):
    """As alpha has stored its answer. Keys are made in round 1, and again by each coordinator that goes on."""
    config = tiny_config(*words, "rounds=5", "federation.patience=120")
    for number, stage in zip((1, 1, 2, 3, 4), STAGES, strict=True):
        process, out = start(config, *([] if stage == "offer" else ["--resume"]))
        wait_until(lambda at=(stage, number), out=out: answered(out, "alpha", *at), process)
        for target in victim(out, party):
            os.kill(target, signal.SIGKILL)
        output = finish(process)
        assert process.returncode == 1, output
        assert "(run again with --resume)" in output
        assert_nothing_is_left(out)
    process, out = start(config, "--resume")
    output = finish(process)
    assert process.returncode == 0, output
    for silo in SILOS:
        folder = out / "checkpoints" / "silos" / silo
        of_sums = [line for line in lines(folder) if line.get("kind") == "masks"]
        told = {(line["round"], *line["shown"]) for line in of_sums if line["stage"] in ("consent", "unmask")}
        assert told == {(number, *SILOS) for number in range(1, 6)}, "one list of survivors in every round"
        sums = Records(folder).rows("SELECT round FROM mask_sums ORDER BY round")
        assert sums == [(number,) for number in range(1, 6)], "one summand in every round"
        if config.privacy.shares:  # a silo draws its own noise, so that no other run has the bits of this one
            assert Records(folder).rows("SELECT steps FROM row_charges") == [(1,)] * 5
    if not config.privacy.shares:
        monkeypatch.setattr(coordinator, "sum_in_process", plain_sum)
        expected, found = run(config, out=tmp_path / "whole").summary, read_summary(out)
        for key in ("shared_sha256", "state_sha256", "best_round"):
            assert found[key] == expected[key]
