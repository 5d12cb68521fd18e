"""A silo whose rows change within a run says so, and goes on only where its own file allows it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from silotune.data.rows import Row, Splits
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.setup import rows_digest
from silotune.errors import SilotuneError
from silotune.runs.storage.readers import read_summary
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, answering, job, local_configs


def flipped(settings):
    """Swap the labels of a silo's rows."""
    path = settings.rows + "/train.jsonl"
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps([texts, 0 if label else 1, *rest]) + "\n" for texts, label, *rest in rows)


def changed_in_round_2(config, out, **more):
    """Run a federation in which beta's worker is restarted over other rows before round 2."""
    configs = local_configs(config, out, **more)
    answers, seen = answering(configs), []

    def beta(data):
        if decode(data).kind == "round":
            seen.append(data)
            if len(seen) == 2:
                flipped(configs["beta"])
                answers[1] = Session(configs["beta"]).answer
        return answers[1](data)

    coordinate(job(config, out, configs), DirectLink(answers | {1: beta}))


def test_it_is_refused_and_named(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=2", "train.steps=1", "federation.retries=0")
    with pytest.raises(SilotuneError, match="missing: beta"):
        changed_in_round_2(config, tmp_path / "run")
    (failed,) = logged(tmp_path / "run", "silo-failed")
    words = "silo 'beta': its rows changed within this run; its silo config has changed_rows: refuse (or accept)"
    assert failed["reason"] == words


def test_where_the_file_accepts_it_the_run_goes_on_and_says_so(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=3", "train.steps=1")
    changed_in_round_2(config, tmp_path / "run", changed_rows="accept")
    notes = {
        (event["round"], event["silo"]) for event in logged(tmp_path / "run", "silo") if "rows changed" in str(event)
    }
    assert notes == {(2, "beta"), (3, "beta")}
    assert read_summary(tmp_path / "run")["rounds"] == 3


def test_the_same_rows_again_are_no_change(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=2", "train.steps=1")
    configs = local_configs(config, tmp_path / "run")
    again = {node: (lambda data, s=settings: Session(s).answer(data)) for node, settings in enumerate(configs.values())}
    coordinate(job(config, tmp_path / "run", configs), DirectLink(again))
    assert not logged(tmp_path / "run", "silo-failed")


def test_a_conversation_or_a_rejected_answer_is_part_of_a_row():
    plain = Row(("How are you?",), 0, "Well.")
    rows = [plain, replace(plain, rejected="Go away."), replace(plain, turns=(("user", "Hello."),))]
    assert len({rows_digest(Splits(train=[row])) for row in rows}) == 3
