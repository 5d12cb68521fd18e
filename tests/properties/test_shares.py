"""With one noise shared out under masks a round is the one with each silo's own noise, but for the noise; or refused.

Nothing that a silo keeps depends on its own sum of gradients, which has too little noise by itself.
"""

from __future__ import annotations

import pytest
import torch

from silotune.communication.masks import shared_noise
from silotune.communication.privacy import row_accountant
from silotune.core.tensors import flatten
from silotune.errors import InputError
from silotune.methods import mean_over_rows
from silotune.methods.ditto import Ditto
from silotune.runs.build import plan_row_noise
from silotune.runs.release import Membership, Release
from silotune.training import noised_steps
from tests.support.method_cases import every_case, read_message, tapped

NOISE = (
    *("privacy.unit=row", "privacy.epsilon=8", "privacy.delta=1e-5", "privacy.rate=1", "aggregation=samples"),
    *("train.steps=1", "train.optimizer=sgd", "train.lr=0.1", "uplink=none", "method.mu=0"),
)
SHARED = ("privacy.shares=true", "aggregation.secure=true")
RUNS = {
    *("fedavg", "fedprox", "fedap", "fedlr", "fedrep", "fedper", "fedmatch", "ditto", "apfl", "fedprompt", "fedit"),
    *(
        "fedlora",
        "feddpa-f",
        "hetlora",
        "ffa-lora",
        "fedsa-lora",
        "rolora",
        "fedsvd",
        "fedmcp",
        "fedmcp, shared heads",
        "fedmcp, entities",
    ),
    *("fedavg, shared head", "fedavg, server adam", "fedmcp, windows", "fedavg, entities in windows"),
}
"""The cases that run; all others are refused, by name."""


def words(case: str) -> tuple[str, ...]:
    given = NOISE if case.startswith(("fedmcp", "fedprox")) else NOISE[:-1]
    return tuple(word for word in given if case != "fedavg, q-fedavg" or not word.startswith("aggregation="))


@pytest.fixture(autouse=True)
def hardly_any_noise(monkeypatch):
    for module in (shared_noise, plan_row_noise):
        monkeypatch.setattr(module, "noise_multiplier", lambda *_: 1e-6)
    monkeypatch.setattr(row_accountant, "row_epsilon", lambda *_: 8.0)
    monkeypatch.setattr(shared_noise, "_FINENESS", 2**20)


@every_case
def test_a_round_with_shares(federate, case, tmp_path):
    if case not in RUNS:
        with pytest.raises(InputError, match=r"privacy|aggregation|train|tuner"):
            federate.run(case, tmp_path / "run", *words(case), *SHARED)
        return
    with tapped() as shared:
        federate.run(case, tmp_path / "run", *words(case), *SHARED)
    with tapped() as own:
        federate.run(case, tmp_path / "own", *words(case))
    (tensors, _), (expected, _) = (read_message(wire.down[len(wire.down) // 2]) for wire in (shared, own))
    torch.testing.assert_close(tensors, expected, atol=1e-4, rtol=1e-4)  # the second round's broadcast
    assert not shared.up, "the coordinator reads no single update"


@pytest.mark.parametrize("case", ["fedmcp", "fedrep", "ditto"])
def test_what_a_silo_keeps_does_not_depend_on_its_own_sum(federate, case, tmp_path, monkeypatch):
    with tapped() as before:
        federate.run(case, tmp_path / "run", *words(case), *SHARED, "rounds=1")
    noise = noised_steps.with_integer_noise
    spoiled = lambda *args: {name: tensor + 2**20 for name, tensor in noise(*args).items()}  # noqa: E731
    monkeypatch.setattr(noised_steps, "with_integer_noise", spoiled)
    with tapped() as after:
        federate.run(case, tmp_path / "spoiled", *words(case), *SHARED, "rounds=1")
    for key, result in before.results.items():
        other = after.results[key]
        assert not torch.equal(next(iter(result.noised_sums[1].values())), next(iter(other.noised_sums[1].values())))
        for mine, theirs in ((flatten(result.state), flatten(other.state)), (result.memory, other.memory)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_a_loss_term_without_rows_on_shared_parts_is_refused(federate, tmp_path, monkeypatch):
    @mean_over_rows
    def loss(self, step):
        size = sum(tensor.square().sum() for tensor in step.state["global"].values())
        return step.cross_entropy("global", "head_global") + step.without_rows(size)

    monkeypatch.setattr(Ditto, "global_loss", loss)
    with pytest.raises(InputError, match=r"privacy\.shares: method ditto has a loss term without rows"):
        federate.run("ditto", tmp_path / "run", *words("ditto"), *SHARED)


@pytest.mark.parametrize(
    "refused",
    [
        "aggregation=uniform", "aggregation.secure=false", "privacy.rate=null", "privacy.delta=null",
        "privacy.parts=all", "privacy.more_noise=true", "train.steps=2", "train.steps=null", "train.momentum=0.5",
        "train.optimizer=adam", "train.clip_norm=1", "train.weight_decay=0.1", "uplink=clip",
    ],
)  # fmt: skip
def test_keys_that_are_refused(federate, refused):
    key = refused.partition("=")[0].partition(".")[-1] or refused.partition("=")[0]
    with pytest.raises(InputError, match=rf"privacy\.shares beside .*{key}"):
        federate.config("fedper", *NOISE[:-1], *SHARED, refused)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("aggregation.least=4",), "aggregation.least: must be between 3 and 3"),
        (("aggregation.colluders=2",), "aggregation.colluders: at most 1 of 3 silos"),
        (
            ("method.head_rounds=1",),
            "in those of method.head_rounds only private heads train",
        ),
    ],
)
def test_values_that_are_refused(federate, tmp_path, given, why):
    with pytest.raises(InputError, match=why):
        federate.run("fedper", tmp_path / "run", *NOISE[:-1], *SHARED, *given)


def test_what_a_run_says(federate, tmp_path):
    found = federate.run("fedper", tmp_path / "run", *NOISE[:-1], *SHARED, "aggregation.colluders=0")
    assert "as long as at most 0 of the other silos spy" in found.summary["privacy"]["noise"]
    assert found.federation.context.row_privacy.shares.honest == 2
    page = Release("a", "row", 8.0, 1e-5, None, Membership(0.5, 0.1, (0.0, 0.2), (9, 9)), None, 0)
    assert "as long as at most 0 of the other silos" in list(page.lines())[1]
