"""A run that a silo has not seen waits for its operator; a decision holds for one run with one configuration."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from silotune.core.clock import current_user
from silotune.core.records import check_audit
from silotune.distributed.coordinator import dispatcher
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.session import Session
from silotune.errors import InputError, SilotuneError
from silotune.runs.storage.readers import read_summary
from tests.support.malicious import CAPS
from tests.support.session_rig import DirectLink, answering, coordinated, job, local_configs

ALLOWED = ("fedmcp", "tuner.r=1", "rounds=1", "train.steps=6")

STEPS = CAPS | {"row_order": "seed"}
"""What a policy says that lets such a run be what it is in one process."""


@pytest.fixture
def asking(attack):
    """`asking(words, …)` → a coordinator and a silo whose operator decides about every run."""

    def begin(words=ALLOWED, run="a" * 16, **settings):
        return attack(words, run, approval="ask", policy={"row_order": "seed"}, **settings)

    return begin


def approvals(coordinator):
    return Approvals(coordinator.session.store.folder)


def test_an_unseen_run_waits_and_learns_nothing(asking):
    coordinator = asking()
    for kind in ("hello", "round", "score", "final", "hello"):
        reply = coordinator.ask(kind)
        assert reply.kind == "waiting"
        assert reply.fields["reason"].startswith("waits for approval at alpha (silotune silo show aaaaaaaaaaaaaaaa-")
        assert reply.fields.keys() == {"silo", "reason"}
        assert reply.blobs == {}
    (request,) = approvals(coordinator).all()
    assert request.state == "pending"
    approvals(coordinator).decide(request.name, "approved")
    assert coordinator.ask("hello").kind == "hello"
    assert coordinator.ask("round").kind == "answer"
    coordinator.restart()
    assert coordinator.ask("score").kind == "scores"
    approvals(coordinator).decide(request.name, "rejected")
    assert "its operator rejected the run aaaaaaaaaaaaaaaa-" in coordinator.reason("score", 0)


def test_another_configuration_under_an_approved_name_waits(asking):
    coordinator = asking()
    coordinator.ask("hello")
    approvals(coordinator).decide("a" * 16, "approved")
    for changes in ({"seed": 2}, {"description": "the same run"}, {"federation__silos": ["alpha"]}):
        coordinator.configure(**changes)
        assert coordinator.ask("round").kind == "waiting"
    coordinator.configure(federation__deadline=5)  # how long the coordinator waits is its own affair
    assert coordinator.ask("round").kind == "answer"
    other = asking(run="b" * 16)
    assert other.ask("hello").kind == "waiting"
    assert len(approvals(other).all()) == 5


@pytest.mark.parametrize(
    ("words", "sent", "said"),
    [
        (("train.steps=1",), {}, "its policy refuses an update of so few steps; at least 4"),
        (("rounds=2",), {"shapes": {"global/x": [1]}}, ""),
    ],
)
def test_what_a_run_comes_to_over_the_rows_is_for_the_operator_alone(asking, words, sent, said):
    """Refusals would count a silo's rows, and shapes its labels, before anybody approved anything."""
    coordinator = asking((*ALLOWED, *words), share=[])
    identity = coordinator.identity.fields() | sent
    assert coordinator.ask("hello", identity=identity).kind == "waiting"
    (request,) = approvals(coordinator).all()
    assert any(said in line for line in request.description)
    assert any("cannot take place here: " in line for line in request.description) is bool(said)
    approvals(coordinator).decide(request.name, "approved")
    reply = coordinator.ask("hello", identity=identity)
    assert (reply.kind, (said or "other part shapes") in reply.fields["reason"]) == ("refused", True)


def test_a_configuration_of_the_same_name_replaces_none(tmp_path):
    """Two digests that begin alike are found in seconds; what an operator reads must be what is approved."""
    decisions = Approvals(tmp_path)
    shown = decisions.ask("a" * 16, "0" * 64, {}, lambda: ["harmless"])
    with pytest.raises(InputError, match=f"another configuration is named {shown.name}"):
        decisions.ask("a" * 16, "0" * 63 + "1", {}, lambda: ["harmful"])
    assert decisions.decide(shown.name, "approved").description == ("harmless",)
    assert decisions.find("a" * 16, "0" * 63 + "1") is None


@pytest.mark.long
def test_no_more_than_a_few_runs_wait(asking):
    for number in range(10):
        assert asking(run=f"{number:016x}").ask("hello").kind == "waiting"
    last = asking(run="f" * 16)
    assert "10 other runs wait for approval; no more may" in last.reason("hello")
    approvals(last).decide("0" * 15 + "3", "rejected")
    assert last.ask("hello").kind == "waiting"
    assert len(approvals(last).all()) == 11


def test_what_the_policy_refuses_does_not_wait(asking):
    coordinator = asking(("fedavg", "tuner=full", "rounds=1"))
    assert coordinator.ask("hello").kind == "refused"
    assert approvals(coordinator).all() == []


@pytest.mark.parametrize("settings", [{"approval": "policy"}, {"config": "agreed"}])
def test_what_is_approved_beforehand_does_not_wait(asking, tmp_path, settings, tiny_config):
    coordinator = asking()
    fields = coordinator.settings.model_dump(exclude_none=True) | settings
    if "config" in settings:
        (tmp_path / "agreed.yaml").write_text(coordinator.text)
        fields["config"] = str(tmp_path / "agreed.yaml")
    coordinator.session = Session(type(coordinator.settings)(**fields))
    assert coordinator.ask("round").kind == "answer"


def test_a_federation_waits_for_its_operators_and_goes_on(tiny_config, in_one_process, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dispatcher, "APPROVAL_INTERVAL", 0.0)
    config = tiny_config(*ALLOWED)
    configs = local_configs(config, tmp_path / "elsewhere", policy=STEPS, approval="ask")
    answers, progress = answering(configs), []
    names = list(configs)

    def operator(node):
        """Approves when it has been asked five times."""
        asked = []

        def answer(data):
            if decode(data).kind == "hello":
                asked.append(data)
                if len(asked) == 5:
                    status = tmp_path / "run" / "federation" / "status.json"
                    progress.append(json.loads(status.read_text())["progress"][1])
                    decisions = Approvals(tmp_path / "elsewhere" / "checkpoints" / "silos" / names[node])
                    decisions.decide(decisions.all()[0].name, "approved")
            return answers[node](data)

        return answer

    link = DirectLink({node: operator(node) for node in range(3)})
    coordinate(job(config, tmp_path / "run", configs, local=False), link)
    alone = in_one_process(*ALLOWED).summary
    assert read_summary(tmp_path / "run")["shared_sha256"] == alone["shared_sha256"]
    assert all(line.startswith("waits for approval at ") for line in progress)
    said = capsys.readouterr().out
    for name in configs:  # once, however often it was asked
        assert said.count(f"silotune coordinator: {name}: waits for approval at {name}") == 1
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "silo-failed" not in events


def test_a_rejected_run_ends_by_name_and_one_without_a_silo_at_federation_join(tiny_config, tmp_path):
    """Operators may take days; a silo that is not there may not."""
    config = tiny_config(*ALLOWED, "federation.join=0.2")
    configs = local_configs(config, tmp_path / "elsewhere", policy=STEPS, approval="ask")
    answers = answering(configs)
    there = {node: answers[node] for node in (0, 1)}
    with pytest.raises(SilotuneError, match=r"did not join within .*: gamma; nothing began; alpha: waits .*; beta: "):
        coordinate(job(config, tmp_path / "run", configs, local=False), DirectLink(there))
    decisions = Approvals(tmp_path / "elsewhere" / "checkpoints" / "silos" / "beta")
    decisions.decide(decisions.all()[0].name, "rejected")
    with pytest.raises(SilotuneError, match="silo 'beta': its operator rejected the run"):
        coordinated(config, tmp_path / "run", configs, local=False)


def test_the_operators_commands(asking, tmp_path, silotune, monkeypatch):
    coordinator = asking()
    coordinator.configure(description="\x1b[2Jharmless\nrun approved")
    coordinator.ask("hello")
    other = asking((*ALLOWED, "train.lr=0.002", "rounds=2"), run="b" * 16)
    other.ask("hello")
    settings = coordinator.settings
    tree = {"name": "alpha", "folder": settings.folder, "rows": settings.rows, "share": ["validation"]}
    tree |= {"policy": "trusting", "socket": "/tmp/unused.sock"}  # in the folder its path is too long here
    path = tmp_path / "silo.yaml"
    path.write_text(yaml.safe_dump(tree))

    def said(*words):
        done = silotune("silo", *words, "--config", path)
        assert done.code == 0, done.err
        return done.out

    listed = said("pending")
    assert [line[:16] for line in listed.splitlines()] == ["a" * 16, "b" * 16]
    shown = " ".join(said("show", "aaaa").split())
    for words in (
        ": pending, asked 20", "method: fedmcp, tuner bottleneck, head mlp (private)", "1 rounds, each 6 steps",
        "part 'global' (", "% of the backbone", "shared: validation, test, rows, loss, seconds",
        "the coordinator sees each change", "no run was approved before", "alpha: bad, good",
    ):  # fmt: skip
        assert words in shown
    keys = said("show", "aaaa").split("keys off their defaults:")[1].split("no run was approved")[0]
    assert {line.split(" = ")[0].strip() for line in keys.splitlines() if " = " in line} >= {"tuner.r", "train.steps"}
    assert not {"method.gamma", "tuner.sites"} & {line.split(" = ")[0].strip() for line in keys.splitlines()}
    state = json.loads(said("status", "--json"))
    assert ([name[:1] for name in state["waiting"]], state["run"], state["worker"]) == (["a", "b"], None, None)
    half = silotune("silo", "approve", "aaaa", "--until", "2999-01-01", "--config", path)
    assert (half.code, "--until DATE --times N" in half.err) == (2, True)
    assert "2 runs wait for approval" in silotune("silo", "approve", "--config", path).err
    told = said("approve", "aaaa", "--until", "2999-01-01", "--times", "3")
    assert "is approved" in told
    assert "so are 3 more runs of the same keys before 2999-01-01" in told
    assert "standing approval of aaaa" in said("pending")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))  # to the question about the only one that waits
    asked = silotune("silo", "approve", "--config", path)
    assert (asked.code, "rounds: 1 → 2" in asked.out, "is approved" in asked.out) == (1, True, False)
    assert coordinator.ask("round").kind == "answer"
    assert coordinator.session.present == {"run": "a" * 16, "rounds": 1}
    assert f"run {'a' * 16}: round, round 1 of 1\nwaits for approval: bbbb" in said("status")
    shown = said("show", "b")
    assert "\x1b" not in shown
    assert r"description: '\x1b[2Jharmless\nrun approved' → 'six small" in " ".join(shown.split())
    assert "rounds: 1 → 2" in shown
    assert "train.lr: 0.001 → 0.002" in shown
    assert "is rejected" in said("reject", "b")
    assert "no run waits" in said("pending")
    assert (
        "no run waits for approval yet; `silotune silo approve --wait`"
        in silotune("silo", "approve", "--config", path).err
    )
    third = asking(run="d" * 16)
    monkeypatch.setattr("silotune.deploy.silo_commands.time.sleep", lambda _: third.ask("hello"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert f"run {'d' * 16}" in said("approve", "--wait")
    decided = [line for line in said("audit").splitlines() if f" {current_user()}" in line]
    names = ("approved a", "approved a", "rejected b", "approved d")
    assert [line.split(maxsplit=1)[1][: len("approved a")] for line in decided] == [*names], "in the chain, by whom"
    assert "so are 3 more runs before 2999-01-01" in decided[1]
    for words, error in ((("show", "c"), "unknown run 'c'"), (("approve", ""), "unknown run ''")):
        failed = silotune("silo", *words, "--config", path)
        assert (failed.code, error in failed.err) == (2, True)
    monkeypatch.chdir(tmp_path / "silo")
    assert "name the silo's file" in silotune("silo", "pending").err


def test_a_standing_approval_has_a_count_and_an_end(asking, monkeypatch):
    first = asking()
    first.ask("hello")
    decisions = approvals(first)
    decisions.stand(decisions.decide("a" * 16, "approved"), "2999-01-01", 2)
    assert asking(run="b" * 16).ask("hello").kind == "hello"
    assert "approved by the standing approval of aaaa" in decisions.named("b").description[-1]
    (lines, _) = check_audit(Path(first.settings.folder))
    assert any("approved by the standing approval of aaaa" in line.get("reason", "") for line in lines)
    other = asking((*ALLOWED, "train.lr=0.002"), run="c" * 16)
    assert other.ask("hello").kind == "waiting", "other keys"
    assert [(until, times) for _, until, times in decisions.standing()] == [("2999-01-01", 1)]
    decisions.decide("b" * 16, "rejected")
    assert asking(run="d" * 16).ask("hello").kind == "waiting", "a rejection ends it"
    for run, (until, times) in {"e": ("2999-01-01", 1), "f": ("2020-01-01", 5)}.items():
        decisions.stand(decisions.named("a"), until, times)
        kinds = [asking(run=f"{number}" + run * 15).ask("hello").kind for number in (1, 2)]
        assert kinds == (["hello", "waiting"] if run == "e" else ["waiting", "waiting"])


def test_a_description_follows_the_silo_while_the_run_waits(asking):
    """The operator reads what the run is now, not what it was when it first asked."""
    coordinator = asking(share=["validation"])
    coordinator.ask("hello")
    (before,) = approvals(coordinator).all()
    coordinator = asking(share=["validation", "loss"])
    coordinator.ask("hello")
    (after,) = approvals(coordinator).all()
    assert (after.name, after.state, after.seen) == (before.name, "pending", before.seen)
    line = "numbers about the rows that are shared: validation"
    assert line in before.description
    assert f"{line}, loss" in after.description
    approvals(coordinator).decide(after.name, "approved")
    assert approvals(coordinator).described_anew(before, ["other"]).state == "approved"
    assert coordinator.ask("hello").kind == "hello"
