"""The promise of a run: what is printed and summarized, by how often silos take part, and a budget that ends it."""

from __future__ import annotations

import json

import pytest
import torch

from silotune.communication.privacy.accountant import (
    BudgetSpent,
    GaussianAccount,
    Privacy,
    SampledCentralAccount,
    gaussian_multiplier,
)
from silotune.communication.uplink import BUILT_IN_CODECS, NOISES
from silotune.config import registries
from silotune.config import uplink as words_of_the_uplink
from silotune.errors import InputError
from silotune.runs.build.builder import build
from silotune.runs.build.coordinator import ACCOUNTS, make_privacy
from silotune.runs.build.resolve import read_config
from silotune.runs.run_result import load_run
from silotune.training.client import USES, SiloClient
from tests.support.method_cases import logged, same, tapped

LDP = ("uplink=clip,laplace", "uplink.epsilon=8")


def privacy_guarantee(
    *words: str, choices: list[list[str]] | None = None, silos: int = 4, a_round: int = 4
) -> Privacy | None:
    """Of 10 rounds, in which all of `silos` take part unless `choices` says who does."""
    config = read_config("demo", ["rounds=10", *words])
    names = [f"silo{number}" for number in range(silos)]
    return make_privacy(config, [(silos, a_round)], lambda number: choices[number - 1] if choices else names)


# -- how much ---------------------------------------------------------------------------------------------------------


def test_without_noise_nothing_is_promised():
    assert privacy_guarantee() is None
    assert privacy_guarantee("uplink=clip,int8") is None


def test_laplace_adds_up_over_the_rounds_a_silo_takes_part_in():
    everyone = privacy_guarantee(*LDP)
    assert (everyone.epsilon_round, everyone.account.total(everyone.uses), everyone.account.delta) == (8, 80, 0)
    choices = [["a", "b"], ["b", "c"], ["b"], ["c"], *[["a"]] * 3, *[["d"]] * 3]
    some = privacy_guarantee(*LDP, choices=choices)
    assert (some.uses, some.account.total(some.uses)) == (4, 32)  # a took part most often; the silos' sums do not add


def test_gaussian_is_composed_exactly():
    found = privacy_guarantee("uplink=clip,gaussian", "uplink.epsilon=2", "uplink.delta=1e-6")
    expected = GaussianAccount(gaussian_multiplier(2.0, 1e-6), 1e-6).total(10)
    assert found.summary()["epsilon_total"] == expected
    assert found.summary()["delta"] == 1e-6
    assert privacy_guarantee("uplink=clip,gaussian", "privacy.delta=1e-4").account.delta == 1e-4


CENTRAL = ("aggregation=uniform", "aggregation.clip=3", "aggregation.noise_multiplier=4", "privacy.delta=1e-5")


def test_central_noise_is_half_its_multiplier_to_one_silo():
    """The noise is z·C/m and replacing one silo's rows moves the mean by 2C/m."""
    found = privacy_guarantee(*CENTRAL, "privacy.secret=FILE", silos=100, a_round=5)
    assert found.account.total(10) == SampledCentralAccount(2.0, 1e-5, 100, 5).total(10)
    assert found.summary()["mechanism"] == "central-gaussian"
    assert found.epsilon_round == found.account.total(1) < found.account.total(10)
    assert found.lines()[0].endswith("(over 10 rounds; a secret draws who takes part)")
    assert not found.uncovered
    assert "uncovered" not in found.summary()
    assert len(found.lines()) == 1


def test_without_a_secret_sampling_hides_nobody():
    """Who takes part then follows from the seed: a silo pays in full for each of its rounds, and for no other."""
    choices = [["a", "b"], ["c", "d"], ["b", "c"], *[["d", "e"]] * 2, *[["b", "f"]] * 2, *[["g", "h"]] * 3]
    found = privacy_guarantee(*CENTRAL, choices=choices, silos=100, a_round=2)
    assert found.uses == 4, "b's"
    assert found.summary()["epsilon_total"] == pytest.approx(GaussianAccount(2.0 / 2, 1e-5).total(1))  # 2 = √4
    assert found.epsilon_round == GaussianAccount(2.0, 1e-5).total(1)
    assert "up to 4 of 10 rounds" in found.lines()[0]
    assert "not for whoever knows the run's seed" in found.lines()[1]
    assert len(found.lines()) == 2
    assert found.summary()["uncovered"] == "; ".join(found.uncovered)
    once = privacy_guarantee(*CENTRAL, f"privacy.epsilon={found.epsilon_round}", choices=choices, silos=100, a_round=2)
    assert (once.rounds, once.uses) == (2, 1)


def test_central_noise_over_groups_hides_a_silo_as_in_the_group_of_which_most_take_part():
    config = read_config("demo", [*CENTRAL, "rounds=10", "privacy.secret=FILE"])
    found = make_privacy(config, [(100, 2), (20, 2), (50, 1)], lambda number: [])
    assert found.account.total(10) == SampledCentralAccount(2.0, 1e-5, 20, 2).total(10)
    assert "over 5 of 170 silos" in found.noise


# -- how long ---------------------------------------------------------------------------------------------------------


def test_a_budget_ends_the_run_before_the_round_that_would_break_it():
    for budget, rounds in ((8, 1), (15.9, 1), (16, 2), (79.9, 9), (80, 10), (1000, 10)):
        assert privacy_guarantee(*LDP, f"privacy.epsilon={budget}").rounds == rounds
    choices = [["a", "b"], ["c"], ["a"], ["d"], ["a"], *[["b"]] * 5]
    found = privacy_guarantee(*LDP, "privacy.epsilon=16", choices=choices)
    assert (found.rounds, found.uses) == (4, 2)
    assert "lasts for 4 of 10 rounds" in found.stops
    assert found.lines()[-1] == found.stops
    assert privacy_guarantee(*LDP).stops == ""


def test_a_budget_for_no_round_is_refused():
    found = privacy_guarantee(*LDP, "privacy.epsilon=7.9")
    with pytest.raises(InputError, match=r"privacy.epsilon: a budget of 7.9 is less than the ε = 8 of one round"):
        found.require_a_round()
    privacy_guarantee(*LDP, "privacy.epsilon=8").require_a_round()


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_stops_when_the_budget_is_spent_with_its_state_kept(federate, tmp_path):
    lines: list[str] = []
    words = (*LDP, "privacy.epsilon=16", "rounds=5")

    def announce(line: str) -> None:
        assert not list((tmp_path / "run" / "checkpoints").glob("round-*"))  # before the first
        lines.append(line)

    run = federate.run("fedavg", tmp_path / "run", *words, announce=announce)
    assert len(lines) == 3
    assert "not for whoever knows the run's seed" in lines[1]
    assert "ε = 8 a round, ε = 16 in total at δ = 0" in lines[0]
    assert "ends after round 2" in lines[2]
    assert [event["round"] for event in logged(run.folder, "round")] == [1, 2]
    assert [event["round"] for event in logged(run.folder, "budget")] == [2]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["rounds"] == 2
    entry = {key: summary["privacy"][key] for key in ("mechanism", "epsilon_round", "epsilon_total", "delta")}
    assert entry == {"mechanism": "laplace", "epsilon_round": 8.0, "epsilon_total": 16.0, "delta": 0.0}
    for silo in run.federation.silos.values():
        assert int(silo.state.memory[USES]) <= 2
    two = federate.run("fedavg", tmp_path / "two", *LDP, "rounds=2")
    assert same(two.summary) == same(run.summary)
    again = federate.run("fedavg", tmp_path / "run", *words, resume=True)
    assert same(again.summary) == same(run.summary)
    assert len(logged(run.folder, "budget")) == 1


@pytest.mark.parametrize("method", ["local", "centralised"])
def test_where_nothing_leaves_no_budget_is_spent(federate, method, tmp_path):
    run = federate.run(method, tmp_path / "run", *LDP, "privacy.epsilon=1")
    assert "privacy" not in run.summary
    assert run.summary["rounds"] == 2
    assert run.summary["bytes_up"] == 0


def test_a_silo_counts_for_itself_and_refuses_to_overspend(federate):
    """Whatever rounds a coordinator calls for."""
    federation = build(federate.config("fedmcp", *LDP, "privacy.epsilon=16"), federate.backbone)
    participant, silo = federation.client(), federation.silos["alpha"]
    assert isinstance(participant, SiloClient)
    for number in (1, 7):
        assert participant.rounds([silo], federation.coordinator.broadcast(number))[0].message
    assert int(silo.state.memory[USES]) == 2
    before = silo.state
    with pytest.raises(BudgetSpent, match=r"budget of 16 is spent after 2 rounds \(ε = 16\)"):
        participant.rounds([silo], federation.coordinator.broadcast(8))[0]
    assert silo.state is before


def test_central_noise_in_a_run(federate, tmp_path):
    """It is added once, after the mean: the messages are those of a run without it, silos count nothing."""
    words = ("aggregation.clip=0.5", "rounds=1")
    with tapped() as plain:
        without = federate.run("fedmcp", tmp_path / "plain", *words)
    with tapped() as noised:
        run = federate.run("fedmcp", tmp_path / "run", *words, "aggregation.noise_multiplier=1.2")
    assert noised.up == plain.up
    assert all(USES not in silo.state.memory for silo in run.federation.silos.values())
    shared, clean = (found.federation.coordinator.shared["global"] for found in (run, without))
    noise = torch.cat([(shared[name] - clean[name]).reshape(-1) for name in sorted(shared)])
    assert noise.std().item() == pytest.approx(1.2 * 0.5 / 3, rel=0.1)
    assert run.summary["privacy"]["mechanism"] == "central-gaussian"
    assert run.summary["privacy"]["epsilon_total"] == pytest.approx(GaussianAccount(0.6, 1e-5).total(1))


def test_a_secret_gives_other_noise_the_same_on_resume_and_is_not_written_down(federate, tmp_path):
    (tmp_path / "key").write_bytes(bytes(range(32)))
    words = (*LDP, f"privacy.secret={tmp_path / 'key'}")
    run = federate.run("fedavg", tmp_path / "run", *words)
    seeded = federate.run("fedavg", tmp_path / "seeded", *LDP)
    assert run.summary["shared_sha256"] != seeded.summary["shared_sha256"]
    again = federate.run("fedavg", tmp_path / "again", *words)
    assert same(again.summary) == same(run.summary)
    written = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    assert bytes(range(32)) not in written
    (tmp_path / "key").unlink()
    assert load_run(run.folder, federate.backbone).summary == run.summary  # a finished run noises nothing
    with pytest.raises(InputError, match=r"privacy\.secret"):
        federate.run("fedavg", tmp_path / "third", *words)


def test_the_command_prints_the_promise_before_it_starts(silotune, place):
    words = ("run", "federation.yaml", "method=fedavg", *LDP, "rounds=3", "privacy.epsilon=8", "--out", "out")
    done = silotune(*words)
    assert done.code == 0
    assert "privacy: laplace noise in every silo, on a change clipped to an l1 norm of 1; ε = 8 a round" in done.out
    assert done.out.count("the run ends after round 1 with ε = 8 spent and its state kept") == 2
    refused = silotune(*words[:-2], "privacy.epsilon=2", "--out", "other")
    assert refused.code == 2
    assert "privacy.epsilon" in refused.err
    assert not (place / "other").exists()


def test_every_noise_has_a_step_and_an_account():
    """A word that the configuration knows and one of them does not would be another noise, or free of cost."""
    assert set(NOISES) == set(ACCOUNTS) == set(words_of_the_uplink.NOISES)
    built_in = {name for name, made in registries.CODECS.items() if made.__module__.startswith("silotune.")}
    assert set(registries.CODECS.reserved) <= set(BUILT_IN_CODECS) == built_in <= {*registries.CODECS}
