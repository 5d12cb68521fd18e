"""Nothing is left on the CPU where a model is used, and nothing stays on the device: every method, head and action.

The device is a fake one (`tests/support/fake_cuda.py`), which needs no GPU. Round, final phases, server step, scores,
test-time personalization, prediction and generation run as they are; only the backward pass is replaced. With
`SILOTUNE_TEST_DEVICE=cuda` they run on a real GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from silotune.communication.privacy.integer_noise import grid_of
from silotune.communication.privacy.noise import NoiseStream, with_noise
from silotune.methods import METHODS
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads import HEADS
from silotune.training.noised_steps import clipped_sum
from tests.support.device_rig import actions, at_rest, made_or_skipped, prediction
from tests.support.fake_cuda import (
    CUDA,
    MISMATCH,
    counted_syncs,
    fake_cuda,
    is_on_device,
    is_tensor_on_device,
    without_float64,
)
from tests.support.method_cases import KINDS_OF_METHODS


def cases(quick: Collection[str]) -> pytest.MarkDecorator:
    """Return every method under every head; the short suite has the `quick` ones with the heads they bring along."""

    def marks(method: str, head: str) -> list[pytest.MarkDecorator]:
        return [] if method in quick and head == METHODS[method].defaults.get("head", "mlp") else [pytest.mark.long]

    pairs = itertools.product(METHODS, HEADS)
    found = [pytest.param(*pair, id=" ".join(pair), marks=marks(*pair)) for pair in pairs]
    return pytest.mark.parametrize(("method", "head"), found)


QUICK = ("fedmcp", "fedfame", "feddpa-t", "fdlora")
"""Several views and two passes, the server's rows, weights of each text, several phases."""

# -- every case --------------------------------------------------------------------------------------------------------


@cases((*KINDS_OF_METHODS, "fedprompt"))  # which brings a verbalizer
def test_every_action_runs_on_the_device_and_leaves_its_results_on_the_cpu(make, method, head):
    federation = made_or_skipped(make, method, head)
    assert is_on_device(federation.backbone)
    with fake_cuda():
        for action in actions(federation).values():
            action(federation)
            assert not any(is_tensor_on_device(tensor) for tensor in at_rest(federation))


@cases(("fedavg-full", "fedprompt", *QUICK))
def test_without_placement_every_action_fails(make, method, head, monkeypatch):
    federation = made_or_skipped(make, method, head)
    monkeypatch.setattr(Backbone, "place", lambda self, tensors: dict(sorted(tensors.items())))
    chosen = actions(federation)
    if all(phase.skips_first for phase in federation.context.phases):  # no silo trains in its first round
        chosen = {name: action for name, action in chosen.items() if name not in ("round", "second round", "cohort")}
    with fake_cuda():
        for action in chosen.values():
            with pytest.raises(MISMATCH):
                action(federation)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "beams", "family"),
    [("fedavg", 1, "t5"), ("fedavg", 3, "llama"), ("feddpa-t", 1, "llama"), ("feddpa-t", 3, "t5")],
)
def test_answers_are_those_of_the_cpu(make, method, beams, family):
    words = [f"head.beams={beams}", "tuner=lora", *(["method.adapters=1"] if method == "fedavg" else [])]
    on_cpu = prediction(make(method, "lm", *words, family=family, on_cuda=False))
    federation = make(method, "lm", *words, family=family)
    with fake_cuda():
        assert prediction(federation) == on_cpu


# -- how often the host waits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beams", "of_a_token"), [(1, 1), (3, 3)])
def test_the_host_waits_once_for_a_generated_token_and_thrice_with_beams(make, beams, of_a_token):
    """Beams are transformers' own search, which asks more often."""
    tokens = 6
    words = (f"head.beams={beams}", f"head.max_new_tokens={tokens}", "tuner=lora", "method.adapters=1")
    federation = make("fedavg", "lm", *words)
    with fake_cuda(), counted_syncs() as waits:
        prediction(federation)
    assert waits.total() <= of_a_token * tokens + 1  # and once to see on which side the prompts are padded


@pytest.mark.parametrize("method", ["fedavg", "fedmcp"])
def test_losses_are_fetched_once_a_step_and_states_once_a_round(make, method):
    counts = []
    for steps in (1, 3):
        federation = make(method, "mlp", "tuner=lora", f"train.steps={steps}", "train.batch_size=2")
        with fake_cuda(), counted_syncs() as waits:
            federation.client().rounds([federation.silos["alpha"]], federation.coordinator.broadcast(1))
        counts.append(waits)
    assert [waits["tolist"] for waits in counts] == [1, 3]
    assert counts[0]["to cpu"] == counts[1]["to cpu"] > 0


def test_loss_scaling_waits_once_a_phase(make, monkeypatch):
    """A fused optimizer leaves out a step without asking the host; the number of such steps is fetched at the end."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    waits = {}
    for precision in ("fp32", "fp16"):
        words = ("tuner=lora", "train.steps=3", "train.batch_size=2", f"precision={precision}")
        federation = make("fedavg", "mlp", *words)
        with fake_cuda(), counted_syncs() as waits[precision]:
            client, silo = federation.client(), federation.silos["alpha"]
            (reply,) = client.rounds([silo], federation.coordinator.broadcast(1))
    assert reply.metrics["skipped_steps"] == 0
    assert waits["fp16"] - waits["fp32"] == {"tolist": 1}


@pytest.mark.parametrize("bounded", [pytest.param(False, marks=pytest.mark.long, id="whole"), True])
@pytest.mark.parametrize(
    ("method", "attention"),
    [
        pytest.param(
            method, attention, marks=() if attention == "eager" and method in ("scaffold", *QUICK) else pytest.mark.long
        )
        for attention in ("eager", "sdpa")
        for method in METHODS
    ],
)
def test_training_waits_once_a_step_however_many_micro_batches(make, method, attention, bounded):
    """Whatever has no padding, some, several views, two passes: only the losses are fetched, and states at the end."""
    head = str(METHODS[method].defaults.get("head", "mlp"))
    federation = made_or_skipped(make, method, head, "train.steps=2", f"backbone.attention={attention}")
    context, silo = federation.context, next(iter(federation.silos.values()))
    if bounded and context.phases:
        longest = max(rows.longest for rows in silo.train.values()) + context.virtual_tokens
        context.tokens_at_once = longest * max(phase.views_with_gradient for phase in context.phases)
    forwards = 0
    with fake_cuda(), counted_syncs() as waits, pytest.MonkeyPatch.context() as patch:
        encode = Backbone.encode

        def counted(*args: object) -> Tensor:
            nonlocal forwards
            forwards += 1
            return encode(*args)  # type: ignore[arg-type]

        patch.setattr(Backbone, "encode", counted)
        taken = 0
        for number in (1, 2):  # in the first round, some methods have no anchors yet
            (reply,) = federation.client().rounds([silo], federation.coordinator.broadcast(number))
            taken += int(reply.metrics["steps"])
    if federation.context.phases:
        assert taken > 0
        assert waits["tolist"] == taken
        assert not waits.keys() - {"tolist", "to cpu"}
        assert not bounded or forwards > taken


@pytest.mark.parametrize(
    ("method", "head"), [("fedmcp", "mlp"), pytest.param("feddpa-t", "lm", marks=pytest.mark.long)]
)
def test_nothing_on_the_device_is_float64(make, method, head):
    """`mps` has no float64. Beams are not searched here: they use it where the device has it."""
    federation = make(method, head)
    with fake_cuda(), without_float64():
        for action in actions(federation).values():
            action(federation)


def test_sums_of_clipped_vectors_are_equal_on_every_device():
    """Whole numbers, so whatever order and device; also the noise that is added to them."""
    grid, vectors = grid_of(1.0, 1.0), 3 * torch.randn(12, 50, generator=torch.Generator().manual_seed(1))
    on_cpu = clipped_sum(vectors, 1.0, grid)
    with fake_cuda():
        total = clipped_sum(vectors.to(CUDA), 1.0, grid)
        noised = with_noise({"a": total}, NoiseStream(b"key"), 1.0, grid, "gaussian")["a"]
        assert (total.device, noised.device) == (CUDA, CUDA)
        found = total.cpu(), noised.cpu()
    assert found[0].tolist() == on_cpu.tolist()
    assert found[1].tolist() == with_noise({"a": on_cpu}, NoiseStream(b"key"), 1.0, grid, "gaussian")["a"].tolist()
