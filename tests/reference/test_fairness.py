"""q-FedAvg and agnostic federated learning against NumPy, the loss that they read, and who is asked for none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.aggregation import Update, by_samples
from silotune.aggregation.fairness import AgnosticMean, AgnosticOptions, QFedAvg, QFedAvgOptions, on_simplex
from silotune.distributed.protocol.frames import HandshakeRefused
from silotune.distributed.silo.local_config import check_settings, local_config
from silotune.errors import InputError
from silotune.training.client import SiloReply
from silotune.training.coordinator import Coordinator
from tests.support.session_rig import local_configs
from tests.support.silos_by_hand import loss_of, set_up

START = {"global/w": np.linspace(-1, 1, 6).reshape(2, 3), "head/b": np.zeros(2)}
LOSSES = {"east": 0.2, "north": 1.5, "west": 0.7}
SILOS = list(LOSSES)


def tensors(values):
    return {name: torch.tensor(value) for name, value in values.items()}


def updates(seed, silos=SILOS, losses=LOSSES):
    draws = np.random.default_rng(seed)
    return [
        Update(silo, tensors({n: v + draws.normal(size=v.shape) for n, v in START.items()}), rows, score=losses[silo])
        for rows, silo in zip((10, 18, 14), silos, strict=False)
    ]


@pytest.mark.parametrize(("q", "lipschitz"), [(0.5, 1.0), (2.0, 0.1)])
def test_q_fedavg_is_algorithm_2(q, lipschitz):
    sent = updates(3)
    moved = {name: np.zeros_like(value) for name, value in START.items()}
    curvature = 0.0
    for update in sent:
        delta = {name: lipschitz * (START[name] - update.tensors[name].numpy()) for name in START}
        square = sum(np.sum(value**2) for value in delta.values())
        loss = LOSSES[update.silo]
        curvature += update.rows * (q * loss ** (q - 1) * square + lipschitz * loss**q)
        moved = {name: moved[name] + update.rows * loss**q * delta[name] for name in START}
    after = QFedAvg(QFedAvgOptions(q=q, lipschitz=lipschitz)).aggregate(iter(sent), tensors(START))
    for name, value in START.items():
        np.testing.assert_allclose(after[name], value - moved[name] / curvature, rtol=1e-8)


def test_q_fedavg_with_q_0_is_fedavg_whatever_the_losses():
    after = QFedAvg(QFedAvgOptions(q=0)).aggregate(updates(3), tensors(START))
    torch.testing.assert_close(after, by_samples(updates(3)), rtol=0, atol=1e-14)


def projected(point):
    """The nearest point of the simplex, by bisection of the threshold."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)


def test_afl_by_hand_with_an_absent_silo_and_a_restart():
    rate, weights = 0.5, np.full(3, 1 / 3)
    shared = {"global": {"w": torch.tensor(START["global/w"])}, "head": {"b": torch.tensor(START["head/b"])}}

    def made():
        return Coordinator(shared, AgnosticMean(AgnosticOptions(mixture_lr=rate)))

    coordinator = made()
    for number, absent in enumerate((None, "north", None), 1):
        present = [silo for silo in SILOS if silo != absent]
        sent = updates(number, present)
        coordinator.aggregate(sent, number)
        own = np.array([weights[SILOS.index(silo)] for silo in present])
        for name, value in (
            ("global/w", coordinator.shared["global"]["w"]),
            ("head/b", coordinator.shared["head"]["b"]),
        ):
            mean = sum(w * update.tensors[name].numpy() for w, update in zip(own / own.sum(), sent, strict=True))
            np.testing.assert_allclose(value, mean, rtol=0, atol=1e-12)
        weights = projected(weights + rate * np.array([LOSSES[silo] if silo in present else 0 for silo in SILOS]))
        np.testing.assert_allclose(list(coordinator.report["weights"].values()), weights, rtol=0, atol=1e-12)
        kept, coordinator = coordinator.flat(), made()
        coordinator.load_flat(kept)
    assert weights.min() == 0  # the edge of the simplex was met


def test_afl_keeps_the_model_when_all_silos_of_a_round_have_no_weight():
    aggregation = AgnosticMean(AgnosticOptions())
    aggregation.state = {"east": torch.tensor(1.0), "north": torch.tensor(0.0)}
    assert aggregation.aggregate(updates(1, ["north"]), tensors(START)) == {}
    assert 0 < aggregation.report["weights"]["north"] < 0.2


@pytest.mark.parametrize("point", [[0.2, 0.3, 0.5], [3.0, 0.1, -2.0], [0.4, 0.4, 0.4]])
def test_the_nearest_mixture(point):
    found = on_simplex(torch.tensor(point, dtype=torch.float64))
    np.testing.assert_allclose(found, projected(np.array(point)), rtol=0, atol=1e-12)


def test_a_silo_measures_the_received_model_over_all_its_rows(tiny_federation):
    federation, wholes = set_up(
        tiny_federation, "fedavg", "method.adapters=1", "aggregation=q-fedavg", "train.batch_size=4", "train.steps=1"
    )
    for name, whole in wholes.items():
        (result,) = federation.trainer.rounds([federation.silos[name]], federation.coordinator.shared, 1)
        expected = loss_of(federation, name, whole["head"], (1, whole["global"]))
        assert result.metrics["received_loss"] == pytest.approx(float(expected), rel=1e-9)
        assert result.metrics["loss"] != pytest.approx(float(expected), rel=1e-3)
        assert result.metrics["rows"] == 4  # of the one step


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("aggregation.secure=true",), "secure: q-fedavg is no sum of the silos' updates"),
        (("privacy.unit=row", "privacy.epsilon=8", "tuner=lora"), "privacy.unit: aggregation=q-fedavg reads a number"),
        (("uplink=clip,laplace",), "uplink: aggregation=q-fedavg reads a number of silos' rows that has no noise"),
    ],
)
def test_neither_masks_nor_noise(words, line, tiny_federation):
    with pytest.raises(InputError, match=line):
        tiny_federation("fedavg", "aggregation=q-fedavg", *words)


@pytest.mark.parametrize("loss", [None, float("nan"), -0.1])
def test_an_update_without_the_loss_is_refused(loss, tiny_federation):
    coordinator = tiny_federation("fedavg", "aggregation=afl").coordinator
    coordinator.receive = lambda *_: Update("alpha", {}, 1)
    received = coordinator.read_reply(1, SiloReply("alpha", b"", {} if loss is None else {"received_loss": loss}))
    assert received.refusal == f"received_loss is {loss}, which aggregation=afl cannot read"


def test_a_silo_that_says_no_losses_refuses_and_one_that_does_measures(tiny_config, tmp_path):
    config = tiny_config("fedavg", "aggregation=afl")
    silent, open_ = (local_configs(config, tmp_path / word, share=[word])["alpha"] for word in ("rows", "loss"))
    with pytest.raises(HandshakeRefused, match="aggregation=afl reads received_loss, and this one does not say its"):
        check_settings(silent, config)
    check_settings(open_, config)
    assert local_config(open_, config, None).aggregation.name == "afl"
