"""FedFAME: loss terms against NumPy, limit cases, first participation, the server step, silos without labels."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from silotune.core.tensors import digest, flatten
from silotune.errors import InputError
from silotune.methods import Phase, Setting
from silotune.methods.fedavg import FedAvg
from silotune.methods.fedfame import PROJECTION
from silotune.methods.similarity import model_contrast
from silotune.methods.validation import check_method
from silotune.models.forward.mixing import MixEntry
from silotune.models.heads import LinearHead
from silotune.models.tuners import TUNERS
from silotune.runs.build import builder as building
from silotune.runs.run import run
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo import SiloState
from tests.support import by_hand
from tests.support.numeric_rig import arrays, doubled, make_step, random_parts, some_rows, trained
from tests.support.tiny import UNPARTITIONED
from tests.support.views import view_of_batch

SHARED = {"global", "head", PROJECTION}


@pytest.fixture(scope="module")
def federation(tiny_federation):
    return doubled(tiny_federation("fedfame", "head=linear"))


# -- NumPy ------------------------------------------------------------------------------------------------------------


def project(tensors, x):
    return np.stack([tensors["projection.weight"] @ row + tensors["projection.bias"] for row in x])


def softmax(row):
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def distil(teacher, student):
    """Eq. 3: −Σ_c p_g(c)·log p(c), mean over rows."""
    pairs = zip(teacher, student, strict=True)
    losses = [-(softmax(g) * np.log(softmax(own))).sum() for g, own in pairs]
    return sum(losses) / len(losses)


# -- one step ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts_of(federation):
    silo = next(iter(federation.silos.values()))
    state, received, before = (random_parts(federation, silo, seed=seed) for seed in (1, 2, 3))
    return silo, state, received, before


def step_of(federation, silo, state, received, before):
    """Return a step whose memory holds the silo's previous parts, as after an earlier participation."""
    (phase,) = federation.context.phases
    memory = {f"previous/{part}/{key}": t for part in ("global", PROJECTION) for key, t in before[part].items()}
    return phase, make_step(federation.context, phase, some_rows(federation, silo), state, received, memory)


def test_loss_terms_against_numpy(federation, parts_of):
    silo, state, received, before = parts_of
    phase, step = step_of(federation, silo, state, received, before)
    pooling = federation.method.setting.head.pooling
    training = federation.context
    tuner = federation.method.setting.tuner

    def pooled(tensors):
        return view_of_batch(training.backbone, step.batch, [MixEntry(tuner, tensors["global"], 1)])[pooling].numpy()

    own, glob, last = pooled(state), pooled(received), pooled(before)
    assert np.abs(own - glob).max() > 1e-3
    assert np.abs(last - glob).max() > 1e-3
    q, q_global, q_previous = (
        project(arrays(tensors[PROJECTION]), x) for tensors, x in ((state, own), (received, glob), (before, last))
    )
    assert q.shape == (len(step.batch), 256)
    expected_contrast = by_hand.model_contrast(q, q_global, q_previous, 0.5)
    heads = ((received, glob), (state, own))
    expected_distil = distil(*(by_hand.linear_head(arrays(whole["head"]), "alpha", x) for whole, x in heads))
    loss = phase.loss(step)
    assert float(step.terms["contrastive"]) == pytest.approx(expected_contrast, abs=1e-10)
    assert float(step.terms["distillation"]) == pytest.approx(expected_distil, abs=1e-10)
    assert float(loss) == pytest.approx(expected_contrast + expected_distil, abs=1e-10)
    assert abs(expected_contrast - math.log(2)) > 1e-3  # not a limit case by chance


def test_the_weight_of_the_distillation(tiny_federation, parts_of):
    """`method.distillation` weighs eq. 3 alone."""
    light = doubled(tiny_federation("fedfame", "head=linear", "method.distillation=0.25"))
    phase, step = step_of(light, *parts_of)
    loss = float(phase.loss(step))
    terms = {name: float(value) for name, value in step.terms.items()}
    assert loss == pytest.approx(terms["contrastive"] + 0.25 * terms["distillation"], abs=1e-10)
    assert terms["distillation"] > 0.1


def test_gradient_against_finite_differences(federation, parts_of):
    """Only local parts have a gradient: received and previous ones are anchors."""
    silo, state, received, before = parts_of
    (phase,) = federation.context.phases
    state = {part: dict(tensors) for part, tensors in state.items()}
    leaves = trained(state, phase)
    anchors = [tensor.requires_grad_() for part in SHARED for tensor in received[part].values()]
    _, step = step_of(federation, silo, state, received, before)
    gradients = torch.autograd.grad(phase.loss(step), [*leaves.values(), *anchors], allow_unused=True)
    for tensor in anchors:
        tensor.requires_grad_(False)
    assert all(gradient is None for gradient in gradients[len(leaves) :])
    draws = torch.Generator().manual_seed(0)
    moved = 0
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=False):
        part = name.split("/")[0]
        direction = torch.randn(leaf.shape, generator=draws, dtype=torch.float64)
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                leaf.add_(sign * 1e-5 * direction)
                values.append(float(phase.loss(step_of(federation, silo, state, received, before)[1])))
                leaf.sub_(sign * 1e-5 * direction)
        expected = (values[0] - values[1]) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(expected, abs=2e-7), part
        moved += abs(expected) > 1e-4
    assert moved > len(leaves) / 2


def test_limit_cases():
    draws = torch.Generator().manual_seed(1)
    q, other, third = (torch.randn(6, 5, generator=draws, dtype=torch.float64) for _ in range(3))
    assert float(model_contrast(q, other, third, 1e12)) == pytest.approx(math.log(2), abs=1e-11)  # tau → ∞
    assert float(model_contrast(q, other, other, 0.5)) == pytest.approx(math.log(2), abs=1e-15)  # both anchors equal
    found = float(model_contrast(q, q, -q, 0.5))  # q = q_g, opposite to the previous: least possible at this tau
    assert found == pytest.approx(math.log(1 + math.exp(-4)), abs=1e-14)
    assert float(model_contrast(q, q, -q, 1e-3)) == pytest.approx(0, abs=1e-300)  # no overflow at a small tau
    assert float(model_contrast(q, -q, q, 1e-3)) == pytest.approx(2000, rel=1e-12)


def test_equal_to_the_global_model_the_loss_is_entropy_and_its_gradient_zero(federation, parts_of):
    """First participation: current = previous = received."""
    silo, state, *_ = parts_of
    (phase,) = federation.context.phases
    received = {part: dict(tensors) for part, tensors in state.items()}
    state = {part: dict(tensors) for part, tensors in state.items()}
    leaves = trained(state, phase)
    step = make_step(federation.context, phase, some_rows(federation, silo), state, received)
    loss = phase.loss(step)
    pooled = step.views["received"][federation.method.setting.head.pooling].numpy()
    logits = by_hand.linear_head(arrays(received["head"]), "alpha", pooled)
    entropies = [-(softmax(row) * np.log(softmax(row))).sum() for row in logits]
    assert float(loss) == pytest.approx(math.log(2) + sum(entropies) / len(entropies), abs=1e-12)
    for gradient in torch.autograd.grad(loss, list(leaves.values())):
        assert float(gradient.abs().max()) < 1e-13


# -- rounds -----------------------------------------------------------------------------------------------------------


def flat_bits(state) -> str:
    return digest(flatten({part: state[part] for part in SHARED}))


def test_first_participation_keeps_the_received_parts_bit_for_bit(tiny_federation):
    federation = tiny_federation("fedfame")
    training, shared = federation.context, federation.coordinator.shared
    silo = next(iter(federation.silos.values()))
    result = LocalTrainer(training).rounds([silo], shared, 1)[0]
    assert flat_bits(result.state) == flat_bits(shared)
    assert result.metrics["steps"] == 0
    assert "first participation" in result.note
    silo.state = SiloState({}, result.memory)
    # While it is not sampled the coordinator's parts move on; then it trains, with its own previous model kept.
    later = {part: {key: t + 0.05 * torch.sin(t * 99 + 1) for key, t in shared[part].items()} for part in shared}
    again = LocalTrainer(training).rounds([silo], later, 5)[0]
    assert again.note == ""
    assert again.metrics["steps"] == math.ceil(silo.rows / 8)
    for part in SHARED:
        assert digest(again.state[part]) != digest(later[part])
    remembered = {name: t for name, t in silo.state.memory.items() if name.startswith("previous/")}
    assert {name.split("/")[1] for name in remembered} == {"global", PROJECTION}
    assert all(torch.equal(t, shared[name.split("/")[1]][name.split("/", 2)[2]]) for name, t in remembered.items())
    silo.state = SiloState({}, again.memory)
    now = silo.state.memory
    assert all(torch.equal(now[f"previous/{PROJECTION}/{key}"], t) for key, t in again.state[PROJECTION].items())


def test_under_dropout_the_first_participation_trains(tiny_federation):
    """Algorithm 1: equal models under different masks have a gradient; the previous model is the received one."""
    federation = tiny_federation("fedfame", "train.dropout=own")
    shared, silo = federation.coordinator.shared, next(iter(federation.silos.values()))
    result = LocalTrainer(federation.context).rounds([silo], shared, 1)[0]
    assert (result.note, result.metrics["steps"]) == ("", math.ceil(silo.rows / 8))
    assert flat_bits(result.state) != flat_bits(shared)


def test_the_log_says_who_took_part_for_the_first_time(tiny_config, tmp_path):
    found = run(tiny_config("fedfame", "rounds=3", "sampling.count=2"), out=tmp_path / "run")
    events = [json.loads(line) for line in (found.folder / "events.jsonl").read_text().splitlines()]
    seen: set[str] = set()
    for event in events:
        if event["event"] == "silo":
            assert ("note" in event) == (event["silo"] not in seen)
            assert (event["steps"] == 0) == (event["silo"] not in seen)
            seen.add(event["silo"])
    assert len(seen) == 3
    server = [event for event in events if event["event"] == "server"]
    assert [event["round"] for event in server] == [1, 2, 3]
    assert {event["steps"] for event in server} == {2}  # 10 labeled rows in batches of 8


def test_the_server_step_trains_adapter_and_classifier_and_nothing_else(tiny_federation):
    federation = tiny_federation("fedfame", "method.server_epochs=3", "train.lr=1e-2")
    shared = federation.coordinator.shared
    before = {part: digest(tensors) for part, tensors in shared.items()}
    memory = {name: silo.state for name, silo in federation.silos.items()}
    result = federation.trainer.server_step(federation.server, shared, 1)
    assert {part: digest(tensors) for part, tensors in shared.items()} == before  # a result, nothing in place
    assert digest(result.state[PROJECTION]) == before[PROJECTION]
    assert digest(result.state["global"]) != before["global"]
    assert digest(result.state["head"]) != before["head"]
    assert result.state.keys() == SHARED
    assert result.metrics["rows"] == 3 * 10
    assert {name: silo.state for name, silo in federation.silos.items()} == memory
    one, other = (federation.trainer.server_step(federation.server, shared, number).state for number in (1, 2))
    assert digest(one["global"]) == digest(result.state["global"]) != digest(other["global"])


@pytest.mark.parametrize("method", ["fedfame", "fedavg-server"])
def test_one_server_step_is_a_gradient_step_on_cross_entropy(method, tiny_federation):
    """SGD with one batch: θ − η·∇CE, the gradient by autograd over the labeled rows written out in one rectangle."""
    words = ("head=linear", "train.optimizer=sgd", "train.lr=0.1", "train.batch_size=10")
    federation = doubled(tiny_federation(method, *words))
    server = federation.server
    (rows,) = server.train.values()
    shared = random_parts(federation, server)
    result = federation.trainer.server_step(server, shared, 1)
    weight, bias = shared["head"]["alpha.out.weight"], shared["head"]["alpha.out.bias"]
    batch = some_rows(federation, server, count=10, micro_batch=10)
    ingredient = MixEntry(federation.method.setting.tuner, shared["global"], 1)
    x = view_of_batch(federation.backbone, batch, [ingredient])[federation.method.setting.head.pooling].numpy()
    errors = np.stack([softmax(row) for row in x @ weight.numpy().T + bias.numpy()])
    errors[np.arange(10), batch.labels.numpy()] -= 1  # ∂CE/∂logits
    found = result.state["head"]
    np.testing.assert_allclose(found["alpha.out.weight"], weight.numpy() - 0.1 * errors.T @ x / 10, atol=1e-10)
    np.testing.assert_allclose(found["alpha.out.bias"], bias.numpy() - 0.1 * errors.mean(0), atol=1e-10)
    assert sorted(rows.labels.tolist()) == [0] * 5 + [1] * 5


@pytest.mark.parametrize(("number", "changed"), [(1, {"head"}), (2, {"global", "head"})])
def test_in_rounds_of_heads_the_coordinator_trains_the_head_alone(tiny_federation, number, changed):
    federation = tiny_federation("fedavg-server", "method.head_rounds=1", "rounds=2", "train.lr=1e-2")
    shared = federation.coordinator.shared
    state = federation.trainer.server_step(federation.server, shared, number).state
    assert {part for part in shared if digest(state[part]) != digest(shared[part])} == changed


def test_a_server_phase_over_a_private_part_is_refused():
    class Wrong(FedAvg):
        def server_phases(self):
            return [Phase("server", trains=("head",), views={"full": self.mix}, loss=self.loss)]

    method = Wrong(Setting(TUNERS["lora"](TUNERS["lora"].Options()), LinearHead()))  # heads are private by default
    with pytest.raises(InputError, match="private part"):
        check_method(method)


# -- labels -----------------------------------------------------------------------------------------------------------


def flipped(rows):
    return [replace(row, label=1 - row.label) for row in rows]


@pytest.mark.parametrize("method", ["fedfame", "fedavg"])
def test_silos_labels_change_nothing(method, tiny_config, tmp_path, monkeypatch):
    """Flipped training labels of all silos change nothing; with FedAvg they do, so the test can fail."""
    words = ("data.tasks=[alpha]", "partition=iid", "partition.silos=3", "server.labels_per_class=5", "rounds=3")
    config = tiny_config(method, *words, "head.scope=shared")
    plain = run(config, out=tmp_path / "plain")
    load, draw = building.load_silos, building.draw_labeled_rows

    def turned(config):
        silos = load(config)
        for silo in silos:
            silo.splits.train = flipped(silo.splits.train)
        return silos

    monkeypatch.setattr(building, "load_silos", turned)
    monkeypatch.setattr(building, "draw_labeled_rows", lambda data, server, seed: draw(load(config), server, seed))
    other = run(config, out=tmp_path / "turned")
    same = plain.summary["state_sha256"] == other.summary["state_sha256"]
    assert same == (method == "fedfame")
    assert (plain.summary["global"] == other.summary["global"]) or not same


def test_silos_hold_no_labels(tiny_federation):
    federation = tiny_federation("fedfame")
    for silo in federation.silos.values():
        (rows,) = silo.train.values()
        assert set(rows.labels.tolist()) == {-1}
        assert len(rows) == 20
    (rows,) = federation.server.train.values()
    assert sorted(rows.labels.tolist()) == [0] * 5 + [1] * 5
    step = make_step(
        federation.context,
        federation.context.phases[0],
        some_rows(federation, next(iter(federation.silos.values()))),
        federation.coordinator.shared,
        federation.coordinator.shared,
    )
    with pytest.raises(IndexError):  # a loss that asks for labels fails
        step.cross_entropy("own")


# -- the coordinator's labeled rows ----------------------------------------------------------------------------------


def texts(rows) -> list[tuple[str, ...]]:
    return sorted((row.label, *row.texts) for row in rows.splits.train)


def test_labeled_rows_do_not_depend_on_the_partition_and_stay_in_the_silos(tiny_config):
    found = []
    for words in (("partition=iid", "partition.silos=3"), ("partition=dirichlet", "partition.alpha=0.1"), ("seed=9",)):
        config = tiny_config("fedfame", "data.seed=4", *words)
        data = building.load_silos(config)
        found.append(texts(building.draw_labeled_rows(data, config.server, 4)))
        everywhere = sorted((row.label, *row.texts) for silo in data for row in silo.splits.train)
        assert len(everywhere) == 60
        assert all(row in everywhere for row in found[-1])
    assert found[0] == found[1] == found[2]
    assert texts(building.draw_labeled_rows(data, config.server, 5)) != found[0]


def test_labeled_rows_in_all(tiny_config):
    config = tiny_config("fedfame", "server.labels_per_class=", "server.labelled_rows=7")
    rows = building.draw_labeled_rows(building.load_silos(config), config.server, 1).splits.train
    assert [sum(row.label == label for row in rows) for label in (0, 1)] == [4, 3]


REFUSED = {
    ("server.labels_per_class=31",): r"^server\.labels_per_class: 31 rows of label 'bad' .* only 30$",
    ("server.labels_per_class=",): r"^server\.labels_per_class: say how many",
    ("server.labelled_rows=10",): r"^server: labels_per_class and labelled_rows exclude each other",
    ("server.labels_per_class=0",): r"^server\.labels_per_class: must be greater than or equal to 1",
    ("data.tasks=[alpha,beta]", *UNPARTITIONED): r"^head\.scope: .* method=fedfame shares its head$",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line(tiny_config, words):
    with pytest.raises(InputError, match=REFUSED[words]) as refused:
        building.build(tiny_config("fedfame", *words))
    assert "\n" not in str(refused.value)
