"""Real processes of a run under masks, ended by `kill -9` in every stage of a sum (long).

`test_masked_runs.py` has the same over sessions, where a silo comes back within the attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3

import pytest

from silotune.communication.masks import coordinator
from silotune.communication.masks.fixed_point import Sum
from silotune.communication.masks.silo import STAGES
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.support.processes import assert_nothing_is_left, finish, processes, wait_until

SILOS = ("alpha", "beta", "gamma")


def plain_sum(silos, summands):
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
@pytest.mark.parametrize("party", ["coordinator", "beta"])
def test_killed_once_in_every_stage_a_run_ends_with_the_plain_sum(start, tiny_config, tmp_path, monkeypatch, party):
    """Round 1 in stage `offer`, round 2 in `share`, and so on: as alpha has stored its answer."""
    config = tiny_config("fedit", "aggregation.secure=true", "rounds=6", "train.steps=1", "tuner.r=2")
    for number, stage in enumerate(STAGES, 1):
        process, out = start(config, *(["--resume"] if number > 1 else []))
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
    monkeypatch.setattr(coordinator, "sum_in_process", plain_sum)
    expected, found = run(config, out=tmp_path / "whole").summary, read_summary(out)
    for key in ("shared_sha256", "state_sha256", "best_round"):
        assert found[key] == expected[key]
    for silo in SILOS:
        of_sums = [line for line in lines(out / "checkpoints" / "silos" / silo) if line.get("kind") == "masks"]
        told = {(line["round"], *line["shown"]) for line in of_sums if line["stage"] in ("consent", "unmask")}
        assert told == {(number, *SILOS) for number in range(1, 7)}, "one list of survivors in every round"
