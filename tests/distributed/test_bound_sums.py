"""What a lying coordinator cannot vary between members of a sum, attack by attack, and what is left after a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.communication.masks.fixed_point import SUMMAND
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import Frame, decode, state_name
from silotune.distributed.silo import mask_ledger
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloStore
from silotune.errors import SilotuneError
from silotune.runs.storage.readers import read_summary
from tests.distributed.test_masked_runs import SECURE, losing, run_masked, unended
from tests.support.masks import secure_silos
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, answering, job


def masked_policy(config, out):
    silos = secure_silos(config, out)
    made = {name: each.model_dump(exclude_none=True) | {"policy": {"preset": "masked"}} for name, each in silos.items()}
    return {name: SiloSettings(**fields) for name, fields in made.items()}


def summands_of(silos, number):
    """Silo → the summand that it keeps of a round; None if there is none."""
    kept = {}
    for name, settings in silos.items():
        store = SiloStore(Path(settings.folder))
        ((run,),) = store.records.rows("SELECT DISTINCT run FROM requests")
        found = store.answer_of(run, state_name(number))
        kept[name] = found and found[1].frame.blobs.get(SUMMAND)
    return kept


def test_a_first_participation_of_all_but_one_is_refused(tiny_config, tmp_path):
    """FedFAME changes nothing at the first: the sum of round 2 was the third silo's summand, bit for bit."""
    config = tiny_config("fedfame", *SECURE, "federation.retries=0")
    silos = masked_policy(config, tmp_path / "run")
    target = sorted(silos)[0]

    def lying(name, honest):
        def answer(data):
            frame = decode(data)
            lie = frame.kind == "round" and frame.fields["round"] == 2 and name != target
            return honest(Frame(frame.kind, frame.fields | {"base": ""}, frame.blobs).encode() if lie else data)

        return answer

    answers = answering(silos)
    link = DirectLink({node: lying(name, answers[node]) for node, name in enumerate(silos)})
    with pytest.raises(SilotuneError, match=r"round 2: 1 of 3 silos sent a valid update"):
        coordinate(job(config, tmp_path / "run", silos), link)
    reasons = {event["silo"]: event["reason"] for event in logged(tmp_path / "run", "silo-failed")}
    assert reasons.keys() == silos.keys() - {target}
    assert all(reason.startswith("asked to start from first; the last sum") for reason in reasons.values())


def test_a_round_is_not_trained_anew_once_its_sum_was_begun(tiny_config, tmp_path):
    """FedMCP from another state of its own: the difference of two sums was of that silo alone."""
    config = tiny_config("fedmcp", *SECURE)
    silos = secure_silos(config, tmp_path / "own")
    answers = answering(silos)
    unended(answers, silos)
    link = DirectLink(answers)
    coordinate(job(config, tmp_path / "run", silos, local=False), link)
    before = summands_of(silos, 2)
    requests = [decode(data) for node, data in link.sent if node == 0 and decode(data).kind == "round"]
    (first, second), session = requests, Session(silos["alpha"])

    def reply_to(kind="round", broadcast=second.blobs["broadcast"], **changes):
        return decode(session.answer(Frame(kind, second.fields | changes, {"broadcast": broadcast}).encode()))

    assert reply_to("final", first.blobs["broadcast"], round=1, base="0001").kind == "answer"
    other = first.blobs["broadcast"].replace(b'\\"round\\": 1', b'\\"round\\": 2')
    assert other != first.blobs["broadcast"]
    for reply, words in (
        (reply_to(base=""), "a sum of round 2 was begun here; the round is not trained anew"),
        (reply_to(base="0001-final"), "state '0001-final' was not trained in a round of sums under masks"),
        (reply_to(broadcast=other), "a sum of round 2 was begun here; the round is not trained anew"),
        (reply_to(round=1, base="0001", broadcast=first.blobs["broadcast"]), "a sum of round 1 was begun here"),
    ):
        assert (reply.kind, words in reply.fields["reason"]) == ("refused", True), reply.fields
    assert summands_of(silos, 2) == before
    assert reply_to().kind == "answer"


def test_private_parts_of_an_earlier_run_are_no_start(attack, tiny_config, tmp_path):
    """Its broadcasts, one for each silo, would be in no agreement; shared parts start from the broadcast."""
    masked = secure_silos(tiny_config("fedmcp", *SECURE), tmp_path / "own")["alpha"].masked.model_dump()
    attacker = attack(("fedmcp", *SECURE), caps=False, masked=masked, policy={"preset": "masked"})
    attacker.configure(start=f"run-{'1' * 16}")
    assert "start: under aggregation.secure private parts begin anew" in attacker.reason("hello")


@pytest.fixture
def secrets_of_sums(monkeypatch):
    """All seeds, shares and summands that silos stored in a run."""
    found, keep, begin = set(), mask_ledger.keep, mask_ledger.begin

    def spy(records, agreement, kept):
        pairs = [*kept["seeds"], *(pair for of_peer in kept.get("shares", {}).values() for pair in of_peer)]
        found.update(secret.encode() for secret in (kept["seal"], *(each for pair in pairs for each in pair)) if secret)
        told = [share for of_round in kept["rounds"].values() for share in of_round.get("told", {}).values()]
        found.difference_update(share.encode() for share in told)
        keep(records, agreement, kept)

    def spy_begin(records, agreement, after, summand):
        for (frame,) in records.rows("SELECT frame FROM answers"):
            if blob := decode(frame).blobs.get(SUMMAND):
                found.add(blob[-200:])
        begin(records, agreement, after, summand)

    monkeypatch.setattr(mask_ledger, "keep", spy)
    monkeypatch.setattr(mask_ledger, "begin", spy_begin)
    return found


def left(silos, secrets):
    data = b"".join((Path(settings.folder) / "records.db").read_bytes() for settings in silos.values())
    return sum(secret in data for secret in secrets)


def test_after_a_run_no_seed_share_or_summand_is_left(tiny_config, tmp_path, secrets_of_sums):
    config = tiny_config("fedit", *SECURE)
    run_masked(config, tmp_path / "kept", unended)
    silos = secure_silos(config, tmp_path / "kept")
    summands = {secret for secret in secrets_of_sums if len(secret) == 200}
    assert left(silos, summands) >= 3
    assert left(silos, secrets_of_sums - summands) == 0, "seeds and shares went with the last stage"
    secrets_of_sums.clear()
    run_masked(config, tmp_path / "run")
    assert len(secrets_of_sums) > 3 * 2 * 6
    assert left(secure_silos(config, tmp_path / "run"), secrets_of_sums) == 0


def test_a_run_that_failed_leaves_nothing_either_and_can_be_resumed(whole, tmp_path, secrets_of_sums):
    config, expected = whole(
        "fedit", *SECURE, "federation.deadline=0.2", "federation.patience=0.01", "federation.retries=0"
    )
    with pytest.raises(SilotuneError, match="nothing was revealed"):
        run_masked(config, tmp_path / "run", losing("consent", ends=True))
    assert len(secrets_of_sums) > 3 * 6
    assert left(secure_silos(config, tmp_path / "run"), secrets_of_sums) == 0
    run_masked(config, tmp_path / "run")
    assert read_summary(tmp_path / "run")["shared_sha256"] == expected["shared_sha256"]
