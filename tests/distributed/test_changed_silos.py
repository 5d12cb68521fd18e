"""A run goes on with another quorum, with fewer or more silos, and with other rows where a silo's file allows it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from silotune.data.rows import Row, Splits
from silotune.deploy.printing import incidents
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import prepare
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.setup import rows_digest
from silotune.errors import InputError, SilotuneError
from silotune.runs.storage.readers import events, read_summary
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, LostError, answering, job, local_configs

QUICK = ("rounds=3", "train.steps=2", "federation.patience=0.05", "federation.deadline=0.2", "federation.retries=0")


def leaving(answers, nodes):
    """A link whose nodes are gone as soon as round 2 is requested from them."""
    link = DirectLink(dict(answers))

    def leaves(node):
        def answer(data):
            if decode(data).fields.get("round") == 2:
                del link.joined[node]
                raise LostError
            return answers[node](data)

        return answer

    link.joined |= {node: leaves(node) for node in nodes}
    return link


@pytest.fixture
def interrupted(tiny_config, tmp_path):
    """A run whose silo gamma left for good in round 2: its configuration, sessions and folder."""
    config = tiny_config("fedmcp", *QUICK, "federation.away=0.2")
    configs = local_configs(config, tmp_path / "silos")
    link = leaving(answering(configs), [2])
    with pytest.raises(SilotuneError, match="quorum=1 asks for 3; missing: gamma"):
        coordinate(job(config, tmp_path / "run", configs, local=False), link)
    return config, configs, tmp_path / "run"


def resumed(config, configs, out, gone=(2,)):
    nodes = {node: answer for node, answer in answering(configs).items() if node not in gone}
    coordinate(job(config, out, configs, local=False), DirectLink(nodes))
    return read_summary(out)


def with_federation(config, **fields):
    return config.model_copy(update={"federation": config.federation.model_copy(update=fields)})


def test_a_run_outlives_a_silo_that_leaves_for_good(interrupted):
    config, configs, out = interrupted
    remaining = {name: configs[name] for name in ("alpha", "beta")}
    summary = resumed(config, remaining, out)
    assert summary["silos"].keys() == {"alpha", "beta"}
    assert [event["silos"] for event in logged(out, "round")] == [["alpha", "beta", "gamma"], *[["alpha", "beta"]] * 2]


def test_a_lower_quorum_on_resume_is_logged_and_nobody_waits_for_join(interrupted, capsys):
    """Other keys stay as they were."""
    config, configs, out = interrupted
    before = list(events(out))
    with pytest.raises(InputError, match=r"another configuration \(rounds: 3 → 4\)"):
        resumed(with_federation(config.model_copy(update={"rounds": 4}), quorum=0.5), configs, out)
    assert list(events(out)) == before
    summary = resumed(with_federation(config, quorum=0.5, join=600.0), configs, out)
    assert summary["rounds"] == 3
    (changed,) = logged(out, "federation")
    assert changed["changed"] == ["federation.quorum: 1.0 → 0.5"]
    assert "quorum: 0.5" in (out / "config.yaml").read_text(encoding="utf-8")
    assert "gamma: did not join again within federation.away=0.2 s; the run goes on" in capsys.readouterr().out
    assert logged(out, "round")[-1]["silos"] == ["alpha", "beta"]  # those that contributed, not those that were asked


def test_a_silo_that_comes_later_takes_part_from_then_on(tiny_config, tmp_path):
    config = tiny_config("fedmcp", *QUICK)
    configs = local_configs(config, tmp_path / "silos")
    two, out = {name: configs[name] for name in ("alpha", "beta")}, tmp_path / "run"
    link = leaving(answering(two), [0, 1])
    with pytest.raises(SilotuneError, match=r"missing: alpha \(no answer\), beta \(no answer\)"):
        coordinate(job(with_federation(config, away=0.1), out, two, local=False), link)
    summary = resumed(config, configs, out, gone=())
    assert summary["silos"].keys() == {"alpha", "beta", "gamma"}
    assert [event["silos"] for event in logged(out, "round")][1:] == [["alpha", "beta", "gamma"]] * 2


def test_central_noise_counts_its_silos(tiny_config, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    words = ("aggregation.noise_multiplier=1", "aggregation.clip=1", f"privacy.secret={secret}", "privacy.delta=1e-3")
    config = tiny_config("fedavg", "rounds=1", "train.steps=1", *words)
    configs = local_configs(config, tmp_path / "silos")
    resumed(config, configs, tmp_path / "run", gone=())
    two = {name: configs[name] for name in ("alpha", "beta")}
    with pytest.raises(InputError, match=r"federation.silos: the privacy guarantee of .* keeps alpha, beta, gamma"):
        resumed(config, two, tmp_path / "run")


def test_a_start_that_was_refused_leaves_a_folder_that_can_be_used(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=1", "train.steps=1", "federation.silos=alpha,beta,gamma")
    out = tmp_path / "run"
    prepare(config, out, resume=False)  # the coordinator is refused by a silo: nothing else is written
    assert prepare(config, out, resume=False).exists()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="already there and not empty"):
        prepare(config, out, resume=False)


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


def test_other_rows_are_refused_and_named(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=2", "train.steps=1", "federation.retries=0")
    words = "silo 'beta': its rows changed within this run; its silo config has changed_rows: refuse (or accept)"
    with pytest.raises(SilotuneError, match=re.escape(f"missing: beta ({words}); what is finished")):
        changed_in_round_2(config, tmp_path / "run")
    (failed,) = logged(tmp_path / "run", "silo-failed")
    assert failed["reason"] == words


def test_where_the_file_accepts_other_rows_the_run_goes_on_and_says_so(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=3", "train.steps=1")
    changed_in_round_2(config, tmp_path / "run", changed_rows="accept")
    notes = {
        (event["round"], event["silo"]) for event in logged(tmp_path / "run", "silo") if "rows changed" in str(event)
    }
    assert notes == {(2, "beta"), (3, "beta")}
    assert incidents(tmp_path / "run") == ["silo 'beta': its rows changed within this run (2 times)"]
    assert read_summary(tmp_path / "run")["rounds"] == 3


def test_a_conversation_or_a_rejected_answer_is_part_of_a_row():
    plain = Row(("How are you?",), 0, "Well.")
    rows = [plain, replace(plain, rejected="Go away."), replace(plain, turns=(("user", "Hello."),))]
    assert len({rows_digest(Splits(train=[row])) for row in rows}) == 3
