"""Sums under masks over messages: the bits of one process, what leaves a silo, crashes at each stage, and dropouts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest

from silotune.communication.masks.silo import STAGES
from silotune.deploy.doctor import examine_silo
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import Frame, HandshakeRefused, decode
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import InputError, SilotuneError
from silotune.runs.storage.readers import read_summary
from tests.support.masks import secure_silos
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, LostError, answering, job, local_configs

SECURE = ("aggregation.secure=true", "rounds=2", "train.steps=1", "tuner.r=2")
FOUR = ("data.tasks=[alpha]", "partition=iid", "partition.silos=4", "federation.quorum=0.5", "federation.patience=0.01")


def run_masked(config, out, change=lambda answers, silos: None):
    """Run over sessions; `change` may replace the functions that answer for silos."""
    silos = secure_silos(config, out)
    answers = answering(silos)
    change(answers, silos)
    link = DirectLink(answers)
    coordinate(job(config, out, silos), link)
    return read_summary(out), link


@pytest.mark.parametrize("method", ["fedmcp", "fedit"])
def test_a_run_ends_with_the_bits_of_one_process_and_nothing_else_leaves(whole, tmp_path, method):
    config, expected = whole(method, *SECURE, "aggregation=samples")
    summary, link = run_masked(config, tmp_path / "run")
    assert summary["shared_sha256"] == expected["shared_sha256"]
    assert summary["state_sha256"] == expected["state_sha256"]
    assert summary["best_round"] == 2
    asked = Counter((_stage(data), decode(data).fields["round"]) for _, data in link.sent if _stage(data))
    made_once = {(stage, 1): 3 for stage in STAGES[:2]}
    assert asked == made_once | {(stage, number): 3 for stage in STAGES[2:] for number in (1, 2)}
    for _, data in link.came:
        frame = decode(data)
        assert frame.kind in ("hello", "answer", "masks", "scores", "ended"), frame.fields
        assert not frame.fields.get("metrics")
        assert not frame.fields.get("scores")
        assert {name for name, blob in frame.blobs.items() if blob} <= ({"masked"} if frame.kind == "masks" else set())


def killed_once(killed, after=True):
    """A change of `run_masked` that ends silo beta once in each stage, before or after its work, listed in `killed`."""

    def change(answers, silos):
        sessions = [Session(silos["beta"])]

        def answer(data):
            stage = _stage(data)
            if stage is not None and stage not in killed:
                killed.append(stage)
                if after:
                    sessions[0].answer(data)
                sessions[0] = Session(silos["beta"])
                raise LostError
            return sessions[0].answer(data)

        answers[1] = answer

    return change


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_silo_that_is_killed_at_every_stage_goes_on(whole, tmp_path, after):
    """Before it has worked on the request, or after it has stored what it did and before the answer was sent."""
    config, expected = whole("fedit", *SECURE, "federation.patience=0.01")
    killed = []
    summary, _ = run_masked(config, tmp_path / "run", killed_once(killed, after))
    assert killed == [*STAGES]
    assert summary["shared_sha256"] == expected["shared_sha256"]


def dying(stage, number):
    """Let the coordinator be killed as it asks the first silo in a stage of a round."""

    def change(answers, silos):
        honest = answers[0]

        def answer(data):
            if _stage(data) == stage and decode(data).fields["round"] == number:
                raise KeyboardInterrupt
            return honest(data)

        answers[0] = answer

    return change


def test_a_coordinator_that_is_killed_at_every_stage_repeats_the_round(whole, tmp_path):
    config, expected = whole("fedit", *SECURE)
    for stage in ("mask", *STAGES):  # at first with the keys that were made in round 1, and then with new ones
        with pytest.raises(KeyboardInterrupt):
            run_masked(config, tmp_path / "run", dying(stage, 2))
    summary, _ = run_masked(config, tmp_path / "run")
    assert summary["shared_sha256"] == expected["shared_sha256"]


def unended(answers, silos):
    """Keep from all silos that the run has ended."""

    def answering(name, honest):
        return lambda data: Frame("ended", {"silo": name}).encode() if decode(data).kind == "end" else honest(data)

    for node, name in enumerate(silos):
        answers[node] = answering(name, answers[node])


def losing(stage, ends=False):
    """Lose all requests to the first silo from a stage of round 1 on; `ends`: it learns that the run ends."""

    def change(answers, silos):
        honest, gone = answers[0], []

        def answer(data):
            if (gone or _stage(data) == stage) and not (ends and decode(data).kind == "end"):
                gone.append(stage)
                raise LostError
            return honest(data)

        answers[0] = answer

    return change


@pytest.mark.parametrize("stage", STAGES)
def test_a_silo_that_drops_out_stays_out(tiny_config, tmp_path, stage):
    config = tiny_config("fedit", *SECURE, *FOUR, "federation.deadline=0.2")
    _, link = run_masked(config, tmp_path / "run", losing(stage))
    silos = sorted({event["silo"] for event in logged(tmp_path / "run", "silo") if event["round"] == 2})
    survivors = json.loads((tmp_path / "run" / "federation" / "survivors.json").read_text())["survivors"]
    assert len(silos) == 3
    assert silos == survivors
    lists = [decode(data).fields["shown"] for _, data in link.sent if _stage(data) == "consent"]
    assert len(lists[-1]) == 3


def _stage(data):
    frame = decode(data)
    return frame.fields["stage"] if frame.kind == "masks" else None


def test_below_t_the_run_ends_by_name_and_nothing_is_revealed(tiny_config, tmp_path):
    config = tiny_config(
        "fedit", *SECURE, "federation.deadline=0.2", "federation.patience=0.01", "federation.retries=0"
    )
    with pytest.raises(
        SilotuneError, match=r"revealed: mask: 2 of 3 silos answered, 3 must; missing: alpha; alpha: mask: no answer;"
    ):
        run_masked(config, tmp_path / "run", losing("mask"))


def test_why_a_silo_did_not_train_is_said_where_the_sum_fails(tiny_config, tmp_path):
    """Two of three are enough for the round, and too few for a sum."""
    config = tiny_config("fedit", *SECURE, "federation.quorum=0.6", "federation.retries=0")

    def without_rows(answers, configs):
        honest = answers[1]

        def answer(data):
            failed = Frame("failed", {"silo": "beta", "reason": "its disk is full"}).encode()
            return failed if decode(data).kind == "round" else honest(data)

        answers[1] = answer

    words = "offer: 2 members; .*; beta: its disk is full; gamma: offer: 2 members; .*; what is finished is kept"
    with pytest.raises(SilotuneError, match=words):
        run_masked(config, tmp_path / "run", without_rows)


def test_after_a_crash_another_list_is_refused_and_the_run_ends_by_name(whole, tmp_path):
    """All four have signed; then one is gone for good: no second sum of the same broadcast."""
    config, expected = whole("fedit", *SECURE, *FOUR, "federation.deadline=0.2", "federation.retries=1")
    with pytest.raises(KeyboardInterrupt):
        run_masked(config, tmp_path / "run", dying("unmask", 1))
    with pytest.raises(SilotuneError, match="was begun, and no other can be made; missing"):
        run_masked(config, tmp_path / "run", losing("offer"))
    summary, _ = run_masked(config, tmp_path / "run")
    assert summary["shared_sha256"] == expected["shared_sha256"]


@pytest.mark.parametrize(
    ("words", "more", "reason"),
    [
        ((), {"policy": {"preset": "masked"}}, "its policy is masked; allowed: runs with aggregation.secure=true"),
        (SECURE, {}, "its silo config has no masked.peers"),
    ],
)
def test_what_a_silo_refuses_before_a_run(tiny_config, tmp_path, words, more, reason):
    config = tiny_config("fedit", *words)
    silos = local_configs(config, tmp_path / "run") if words else secure_silos(config, tmp_path / "run")
    if more:
        made = {name: each.model_dump(exclude_none=True) | more for name, each in silos.items()}
        silos = {name: SiloSettings(**fields) for name, fields in made.items()}
    with pytest.raises(HandshakeRefused, match=reason):
        coordinate(job(config, tmp_path / "run", silos), DirectLink(answering(silos)))


@pytest.mark.parametrize("key", ["peers", "least"])
def test_silos_with_other_lists_do_not_begin(tiny_config, tmp_path, key):
    """With another `masked.least` neither: one silo's larger one would not hold for the sums that others sign."""
    config = tiny_config("fedit", *SECURE, *FOUR)
    silos = secure_silos(config, tmp_path / "run")
    name = sorted(silos)[1]
    odd = silos[name].masked
    other = {"peers": odd.peers | {sorted(silos)[2]: odd.peers[sorted(silos)[0]][::-1]}, "least": 4}[key]
    silos[name] = silos[name].model_copy(update={"masked": odd.model_copy(update={key: other})})
    with pytest.raises(HandshakeRefused, match=r"masked\.peers .* are others than those of the silos before it"):
        coordinate(job(config, tmp_path / "run", silos), DirectLink(answering(silos)))


def test_the_doctor_shows_the_fingerprint_of_the_pinned_list(tiny_config, tmp_path):
    """The same at all silos; an independent computation of it."""
    silos = secure_silos(tiny_config("fedit", *SECURE), tmp_path / "run")

    def found(settings):
        (finding,) = [each for each in examine_silo(settings, train=False) if each.check == "peers"]
        return finding

    peers = silos["alpha"].masked.peers
    fingerprint = hashlib.sha256(json.dumps([3, sorted(peers.items())]).encode()).hexdigest()
    for settings in silos.values():
        assert found(settings).state == "ok"
        assert found(settings).detail.startswith(f"fingerprint {fingerprint} of 3 silos; sums of at least 3 of them")
    del peers["gamma"]
    assert (found(silos["alpha"]).state, found(silos["alpha"]).detail) == (
        "problem", "masked.peers: 2 silos; the list has 3 to 50",
    )  # fmt: skip
    assert "each operator tells theirs" in found(silos["alpha"]).remedy


def test_requests_that_belong_to_no_sum_are_refused(tiny_config, tmp_path):
    config = tiny_config("fedit", *SECURE)
    _, link = run_masked(config, tmp_path / "run", unended)
    session = Session(secure_silos(config, tmp_path / "run")["alpha"])
    request = [decode(data) for _, data in link.sent if _stage(data) == "mask"][-1]
    for change, words in (
        ({"round": 7}, "no summand of round 7"),
        ({"agreement": {}}, "a malformed proposal"),
        ({"agreement": request.fields["agreement"] | {"broadcast": "0"}}, "another broadcast"),
        ({"agreement": request.fields["agreement"] | {"members": ["beta", "alpha", "gamma"]}}, "another members"),
        ({"agreement": request.fields["agreement"] | {"members": ["alpha", "alpha", "beta"]}}, "another members"),
        ({"agreement": request.fields["agreement"] | {"members": [1, "alpha"]}}, "a malformed proposal"),
        ({"agreement": request.fields["agreement"] | {"attempt": "0"}}, "asked before the stages"),
    ):
        reply = decode(session.answer(Frame("masks", request.fields | change).encode()))
        assert reply.kind == "refused"
        assert words in reply.fields["reason"]
    with pytest.raises(InputError, match="2 silos"):
        coordinate(job(config, tmp_path / "two", ["alpha", "beta"]), DirectLink({}))
