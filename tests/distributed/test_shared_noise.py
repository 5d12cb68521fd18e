"""One noise shared out over messages: what is agreed, who refuses, what is charged, and one sum whatever is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from silotune.communication.masks import shared_noise
from silotune.communication.masks.shared_noise import SharedNoise
from silotune.communication.masks.silo import STAGES
from silotune.communication.messages import read_broadcast
from silotune.communication.privacy import row_accountant
from silotune.core.tensors import flatten
from silotune.deploy.printing import print_audit, print_silo
from silotune.deploy.status import silo_status
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import Frame, HandshakeRefused, decode
from silotune.distributed.silo import mask_ledger
from silotune.distributed.silo.run_description import noise_on_rows
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.store import SiloStore
from silotune.errors import InputError, SilotuneError
from silotune.runs.build import plan_row_noise
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from silotune.training.row_privacy import RowPlan
from tests.distributed.test_masked_runs import FOUR, dying, killed_once, losing, unended
from tests.support.masks import secure_silos
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, answering, job

SHARES = (
    *("aggregation.secure=true", "privacy.shares=true", "aggregation=samples", "privacy.unit=row", "uplink=none"),
    *("privacy.epsilon=8", "privacy.delta=1e-5", "privacy.rate=1", "rounds=2", "train.steps=1", "train.optimizer=sgd"),
    *("tuner.r=2", "federation.patience=0.01"),
)
ONE = {"colluders": 1}
ASSUMED = "as long as at most 1 of the other silos spy, help the coordinator or leave out their noise"


def private_silos(config, out, masked=ONE, epsilon=8.0):
    budget = {"policy": {"preset": "private"}, "privacy": {"epsilon": epsilon}, "seeded_noise": False}
    return secure_silos(config, out, masked, **budget)


def run_shared(config, out, change=lambda answers, silos: None, **more):
    silos = private_silos(config, out.with_name("own"), **more)
    answers = answering(silos)
    change(answers, silos)
    link = DirectLink(answers)
    coordinate(job(config, out, silos, local=False), link)
    return silos, link


def records(settings, query):
    return SiloStore(Path(settings.folder)).records.rows(query)


def test_a_run_is_charged_once_a_round_and_says_what_it_assumes(tiny_config, tmp_path, capsys):
    """A budget that the run may use whole is enough; nothing but sums leaves."""
    silos, link = run_shared(tiny_config("fedper", *SHARES), tmp_path / "run")
    for _, data in link.came:
        frame = decode(data)
        assert frame.kind in ("hello", "answer", "masks", "scores", "ended"), frame.fields
        assert {name for name, blob in frame.blobs.items() if blob} <= ({"masked"} if frame.kind == "masks" else set())
    (text,) = {decode(data).fields["shares"] for _, data in link.came if decode(data).kind == "hello"}
    noise = SharedNoise.read(text)
    assert (noise.honest, noise.rate) == (2, 1.0)
    agreed = {decode(data).fields["agreement"]["noise"] for _, data in link.sent if decode(data).kind == "masks"}
    assert agreed == {text}
    assert read_summary(tmp_path / "run")["privacy"]["assumed"] == ASSUMED
    assert not logged(tmp_path / "run", "more-noise")
    for settings in silos.values():
        charges = records(settings, "SELECT steps, multiplier FROM row_charges")
        assert charges == [(1, noise.multiplier)] * 2
        ledger = SiloStore(Path(settings.folder), budget=settings.privacy).ledger
        assert 7.5 < ledger.spent("row") <= 8.0
        assert ledger.assumed() == 1
    capsys.readouterr()
    settings = silos["alpha"]
    print_silo(silo_status(settings, tmp_path / "silo.yaml"), as_json=False)
    print_audit(Path(settings.folder), False, SiloStore(Path(settings.folder), budget=settings.privacy).ledger)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(ASSUMED) == 3
    plan = RowPlan("row", 1.0, (0, 1, 2), noise.multiplier, colluders=1)
    assert ASSUMED in noise_on_rows(tiny_config("fedper", *SHARES), plan, settings)


def test_a_run_over_messages_is_that_of_one_process_but_for_its_noise(tiny_config, tmp_path, monkeypatch):
    for module in (shared_noise, plan_row_noise):
        monkeypatch.setattr(module, "noise_multiplier", lambda *_: 1e-6)
    monkeypatch.setattr(row_accountant, "row_epsilon", lambda *_: 8.0)
    monkeypatch.setattr(shared_noise, "_FINENESS", 2**20)
    config = tiny_config("fedper", *SHARES)
    silos = secure_silos(config, tmp_path / "over")
    link = DirectLink(answering(silos))
    coordinate(job(config, tmp_path / "over", silos), link)
    expected = run(config, out=tmp_path / "here").federation.coordinator
    last = [decode(data).blobs["broadcast"] for _, data in link.sent if decode(data).kind == "score"][-1]
    tensors, _ = read_broadcast(last, expected.expected)
    for name, tensor in flatten(tensors).items():
        torch.testing.assert_close(tensor, flatten(expected.shared)[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("masked", "epsilon", "why"),
    [
        ({}, 8.0, r"policy is private, and ε of shared noise depends on other silos .* needs masked\.colluders"),
        (ONE, 7.0, "the rest of the budget for each row takes"),
        ({"colluders": 2}, 8.0, r"masked\.colluders: at most 1, in sums of 3 \(got 2\)"),
    ],
)
def test_who_refuses_a_run(tiny_config, tmp_path, masked, epsilon, why):
    with pytest.raises(SilotuneError, match=why):
        run_shared(
            tiny_config("fedper", *SHARES, "federation.join=0.5"), tmp_path / "run", masked=masked, epsilon=epsilon
        )


def test_silos_that_assume_different_colluders_do_not_begin(tiny_config, tmp_path):
    config = tiny_config("fedper", *SHARES)
    silos = private_silos(config, tmp_path / "run")
    odd = silos["beta"]
    silos["beta"] = odd.model_copy(update={"masked": odd.masked.model_copy(update={"colluders": 0})})
    with pytest.raises(HandshakeRefused, match=r"masked\.least are others .* or its masked\.colluders"):
        coordinate(job(config, tmp_path / "run", silos), DirectLink(answering(silos)))


@pytest.mark.parametrize("word", ["aggregation.least=3", "aggregation.colluders=0"])
def test_a_coordinator_does_not_say_what_is_assumed(tiny_config, tmp_path, word):
    with pytest.raises(InputError, match=r"of a simulation; over machines each silo\.yaml has masked\.least"):
        run_shared(tiny_config("fedper", *SHARES, word), tmp_path / "run")


def test_what_a_lying_coordinator_asks_for_once_a_sum_was_begun(tiny_config, tmp_path):
    """Another noise, another broadcast or start, fewer members of a second attempt: refused, and nothing is charged."""
    silos, link = run_shared(tiny_config("fedper", *SHARES), tmp_path / "run", unended)
    session = Session(silos["alpha"])
    sums = records(silos["alpha"], "SELECT * FROM mask_sums")
    asked = [decode(data) for node, data in link.sent if node == 0]
    offer = next(each for each in asked if each.kind == "masks" and each.fields["round"] == 2)
    agreement = offer.fields["agreement"]
    noise = json.loads(agreement["noise"])
    lies = [
        ({"noise": json.dumps(noise | {"multiplier": noise["multiplier"] / 2})}, "another noise"),
        ({"noise": json.dumps(noise | {"least": 30})}, "another noise"),
        ({"noise": ""}, "another noise"),
        (
            {"attempt": "b", "members": agreement["members"][:2]},
            "2 members; this silo takes part in sums of at least 3",
        ),
        ({"configuration": "0"}, "another configuration"),
    ]
    for lie, words in lies:
        reply = decode(session.answer(Frame("masks", offer.fields | {"agreement": agreement | lie}).encode()))
        assert (reply.kind, words in reply.fields["reason"]) == ("refused", True), reply.fields
    first, second = (each for each in asked if each.kind == "round")
    for change, blobs in (
        ({}, {"broadcast": first.blobs["broadcast"]}),
        ({"base": ""}, second.blobs),
        ({"round": 1, "base": "0001"}, first.blobs),
    ):
        reply = decode(session.answer(Frame("round", second.fields | change, blobs).encode()))
        assert reply.kind in ("refused", "failed"), reply.fields
    assert records(silos["alpha"], "SELECT * FROM mask_sums") == sums
    assert len(records(silos["alpha"], "SELECT 1 FROM row_charges")) == 2


@pytest.mark.parametrize("party", ["silo", "coordinator"])
def test_killed_in_every_stage_there_is_one_summand_a_round_and_one_charge(tiny_config, tmp_path, monkeypatch, party):
    """The charge is there before the summand leaves; a second attempt has the same summand, noise included."""
    config, begun, begin = tiny_config("fedper", *SHARES, "rounds=1"), [], mask_ledger.begin

    def spy(ledger, agreement, after, summand):
        assert len(ledger.rows("SELECT 1 FROM row_charges")) == 1
        begun.append((ledger.folder.name, summand))
        begin(ledger, agreement, after, summand)

    monkeypatch.setattr(mask_ledger, "begin", spy)
    killed = []

    if party == "coordinator":
        for stage in STAGES:
            with pytest.raises(KeyboardInterrupt):
                run_shared(config, tmp_path / "run", dying(stage, 1))
    silos, _ = run_shared(config, tmp_path / "run", killed_once(killed) if party == "silo" else lambda *_: None)
    assert killed == ([*STAGES] if party == "silo" else [])
    assert len({*begun}) == 3
    assert len(begun) > 3 * 3
    for settings in silos.values():
        assert len(records(settings, "SELECT 1 FROM row_charges")) == 1
        assert len(records(settings, "SELECT 1 FROM mask_sums")) == 1


def test_with_fewer_than_least_nothing_is_opened_and_the_round_is_charged(tiny_config, tmp_path):
    config = tiny_config("fedper", *SHARES, *FOUR, "federation.deadline=0.2", "federation.retries=0", "rounds=1")
    with pytest.raises(SilotuneError, match="nothing was revealed: mask: 3 of 4 silos answered, 4 must"):
        run_shared(config, tmp_path / "run", losing("mask"), masked={"least": 4, "colluders": 1})
    for settings in private_silos(config, tmp_path / "own").values():
        assert len(records(settings, "SELECT 1 FROM row_charges")) == 1
        assert not records(settings, "SELECT 1 FROM mask_lists")


def test_nothing_but_masked_numbers_follows_from_labels(tiny_config, tmp_path):
    """The same run over rows with other labels: all else that alpha says, and what its audit log keeps, is equal."""
    config, said, kept = tiny_config("fedper", *SHARES, "rounds=1"), [], []
    for name in ("own", "other"):
        silos = private_silos(config, tmp_path / name)
        if name == "other":
            (file,) = Path(silos["alpha"].rows).glob("*train*")
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            assert {label for _, label, *_ in lines} == {0, 1}
            moved = [[text, 1 - label, *more] for text, label, *more in lines]
            file.write_text("".join(f"{json.dumps(line)}\n" for line in moved), encoding="utf-8")
        link = DirectLink(answering(silos))
        coordinate(job(config, tmp_path / f"{name}-run", silos, local=False), link)
        frames = [decode(data) for node, data in link.came if node == 0]
        said.append([(f.kind, _without(f.fields), {key: len(blob) for key, blob in f.blobs.items()}) for f in frames])
        audits = (json.loads(line) for (line,) in records(silos["alpha"], "SELECT line FROM audit ORDER BY number"))
        kept.append([_without(line) for line in audits])
    assert said[0] == said[1]
    assert kept[0] == kept[1]


def _without(fields):
    """Return fields without what is drawn anew or names the run."""
    drawn = (
        "told",
        "run",
        "time",
        "sha256",
        "digest",
        "base",
        "shown",
        "after",
        "peers",
        "masks",
        "tensors",
        "previous",
    )
    return {key: value for key, value in fields.items() if key not in drawn}
