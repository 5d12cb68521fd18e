"""What a silo paid for with privacy is counted by the silo: no coordinator, and no new run, makes it forget."""

from __future__ import annotations

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.run_status import RunFollower
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.store import Price, SiloAnswer, SiloStore
from silotune.errors import InputError, SilotuneError
from silotune.training.client import PrivacySpent
from tests.support.session_rig import DirectLink, answering, coordinated, job, local_configs

NOISE = ("uplink=clip,laplace", "uplink.epsilon=2", "rounds=2", "train.steps=1")
TRUSTING = {"preset": "trusting"}


def answers(link: DirectLink) -> list[Frame]:
    """The noised answers among all that came."""
    frames = (decode(data) for _, data in link.came)
    return [frame for frame in frames if frame.kind == "answer" and frame.blobs.get("message")]


def refused(config, out, reason=None, **settings) -> DirectLink:
    """Run a federation that ends for this reason over silos with these settings; returns its link."""
    configs = local_configs(config, out, **settings)
    link = DirectLink(answering(configs))
    with pytest.raises(SilotuneError, match=reason):
        coordinate(job(config, out, configs), link)
    return link


def epsilons(folder):
    """The ε of all answers with noise that left a silo."""
    return [epsilon for (epsilon,) in SiloStore(folder).records.rows("SELECT epsilon FROM released ORDER BY rowid")]


def test_uses_of_this_run_and_the_sum_of_the_others(tmp_path):
    store = SiloStore(tmp_path)
    two, half = Price("laplace", 2.0, 0.0), Price("laplace", 0.5, 0.0)
    assert store.spent("a" * 16, two) == PrivacySpent(0, 0.0)
    for run, price in (("a", two), ("a", two), ("b", half)):
        store.commit(run * 16, SiloAnswer(Frame("answer"), price=price), {})
    assert store.spent("a" * 16, two) == PrivacySpent(2, 0.5)
    assert store.spent("b" * 16, half) == PrivacySpent(1, 4.0)
    assert store.spent("c" * 16, half) == store.spent("") == PrivacySpent(0, 4.5)
    for other in (half, Price("gaussian", 2.0, 0.0), Price("laplace", 2.0, 1e-5)):  # the same run, another price
        assert store.spent("a" * 16, other) == PrivacySpent(0, 4.5)


def test_another_run_over_the_same_rows_finds_the_budget_spent(tiny_config, tmp_path):
    config = tiny_config("fedavg", *NOISE, "privacy.epsilon=4")
    configs = local_configs(config, tmp_path / "one")
    link = coordinated(config, tmp_path / "one", configs)
    assert len(answers(link)) == 2 * len(configs)  # two rounds of ε = 2 each
    link.came.clear()
    with pytest.raises(SilotuneError, match="quorum"):
        coordinate(job(config, tmp_path / "two", configs), link)
    assert answers(link) == []
    reasons = [frame.fields["reason"] for frame in (decode(data) for _, data in link.came) if frame.kind == "failed"]
    assert reasons
    assert all("budget of 4 is spent" in reason for reason in reasons)


def test_a_rewound_state_does_not_rewind_the_count(tiny_config, tmp_path):
    """The coordinator asks again, now from the state before round 1."""
    config = tiny_config("fedavg", *NOISE, "privacy.epsilon=4")
    configs = local_configs(config, tmp_path / "one")
    link = coordinated(config, tmp_path / "one", configs)
    requests = [decode(data) for node, data in link.sent if node == 0]
    last = next(frame for frame in requests if frame.kind == "round" and frame.fields["round"] == 2)
    assert last.fields["base"] == "0001"
    answered = decode(link.joined[0](last.encode()))  # the same question: the stored answer
    refused = decode(link.joined[0](Frame("round", {**last.fields, "base": ""}, last.blobs).encode()))
    assert (answered.kind, refused.kind) == ("answer", "failed")
    assert "budget" in refused.fields["reason"]
    assert epsilons(tmp_path / "one" / "checkpoints" / "silos" / next(iter(configs))) == [2.0, 2.0]


def test_noise_that_the_coordinator_knows_is_refused(tiny_config, tmp_path):
    config = tiny_config("fedavg", *NOISE)
    assert answers(refused(config, tmp_path / "run", "secret", seeded_noise=False)) == []


@pytest.mark.parametrize("overrides", [{"secret": "key", "epsilon": "unlimited"}, {"epsilon": 3.0}])
def test_a_silo_that_wants_noise_answers_no_run_without(overrides, tiny_config, tmp_path):
    """Whatever the coordinator's configuration says: it could ask for the parts as they are."""
    (tmp_path / "key").write_bytes(b"s" * 32)
    overrides = {key: str(tmp_path / value) if key == "secret" else value for key, value in overrides.items()}
    config = tiny_config("fedavg", "rounds=1")
    reason = f"answers with noise alone.*{next(iter(overrides))}"
    assert answers(refused(config, tmp_path / "run", reason, **overrides)) == []


def test_an_operators_own_budget_holds_where_the_run_has_none(tiny_config, tmp_path):
    config = tiny_config("fedavg", *NOISE)  # ε = 2 a round
    link = refused(config, tmp_path / "run", epsilon=3.0)
    assert {frame.fields["round"] for frame in answers(link)} == {1}
    assert epsilons(tmp_path / "run" / "checkpoints" / "silos" / "alpha") == [2.0]


def test_a_coordinator_that_changes_the_noise_within_a_run_does_not_stretch_the_budget(attack):
    """Round n at ε = 4/n: each alone would fit, priced at its own configuration, for ever."""
    attacker, left = attack(("fedavg", *NOISE, "rounds=9"), caps=False, policy=TRUSTING, epsilon=4.0), []
    for number in range(1, 6):
        attacker.configure(uplink__epsilon=4 / number)
        left.append(attacker.ask("round", number))
    assert [frame.kind for frame in left] == ["answer", *["failed"] * 4]
    assert all("budget of 4 is spent" in frame.fields["reason"] for frame in left[1:])


@pytest.mark.parametrize(("overrides", "kind"), [({}, "failed"), ({"delta": 0.9}, "answer")])
def test_a_coordinator_does_not_choose_the_delta_of_an_operators_budget(overrides, kind, attack):
    """Noise for ε = 0.1 at δ = 0.9 is next to none: at 1e-5 it costs far more than 4."""
    words = ("fedavg", "uplink=clip,gaussian", "uplink.epsilon=0.1", "uplink.delta=0.9", "rounds=1")
    assert attack(words, caps=False, policy=TRUSTING, epsilon=4.0, **overrides).ask("round").kind == kind


def test_what_the_noise_promises_is_said_before_the_first_round(tiny_config, tmp_path, capsys):
    config = tiny_config("fedavg", *NOISE)
    configs = local_configs(config, tmp_path / "run")
    answers_of, announced = answering(configs), []
    monitor = RunFollower(tmp_path / "run" / "federation", lambda *_: None, announced.append)
    told_at = []

    def first(data):
        monitor.poll()
        told_at.append((decode(data).kind, len(announced)))
        return answers_of[0](data)

    coordinate(job(config, tmp_path / "run", configs), DirectLink(answers_of | {0: first}))
    assert {count for kind, count in told_at if kind == "hello"} == {0}
    assert {count for kind, count in told_at if kind == "round"} == {2}
    assert "ε = 2 a round, ε = 4 in total at δ = 0" in announced[0]
    assert "silotune coordinator: privacy: laplace noise" in capsys.readouterr().out


def test_central_noise_on_machines_of_their_own_needs_a_secret_of_the_coordinator(tiny_config, tmp_path):
    """Silos know the seed. With the secret they need none of their own, and cannot tell who takes part."""
    words = ("rounds=2", "aggregation=uniform", "aggregation.clip=1", "aggregation.noise_multiplier=1")
    config = tiny_config("fedavg", *words, "sampling.count=1")
    configs = local_configs(config, tmp_path / "elsewhere", seeded_noise=False)
    with pytest.raises(InputError, match=r"noise_multiplier.*privacy\.secret"):
        coordinated(config, tmp_path / "run", configs, local=False)
    (tmp_path / "key").write_bytes(b"s" * 32)
    config = tiny_config("fedavg", *words, "sampling.count=1", f"privacy.secret={tmp_path / 'key'}")
    assert len(answers(coordinated(config, tmp_path / "run", configs, local=False))) == 2


def test_paths_of_the_silo_stay_there(tiny_config, tmp_path):
    config = tiny_config("fedavg", "rounds=1")
    link = refused(config, tmp_path / "run", backbone=str(tmp_path / "secret-place" / "model"))
    assert link.came
    assert not any(b"secret-place" in data or str(tmp_path).encode() in data for _, data in link.came)


def test_an_agreed_configuration_as_a_person_writes_it_is_warmed_up(tiny_config, tmp_path):
    config = tiny_config("fedavg", "rounds=1")
    written = tmp_path / "agreed.yaml"
    written.write_text(f"preset: demo\nbackbone: {config.backbone.name}\nrounds: 1\n", encoding="utf-8")
    local = local_configs(config, tmp_path / "run")["alpha"]
    Session(local.model_copy(update={"config": str(written)})).warm()
