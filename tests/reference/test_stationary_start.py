"""FedFAME at the start of a participation: what has no gradient does not move, in any precision and in all ways."""

from __future__ import annotations

import math

import pytest
import torch

from silotune.core.tensors import flatten
from silotune.methods.fedfame import PROJECTION
from silotune.methods.similarity import distillation, model_contrast, row_cosine, row_cosine_by_distance
from silotune.training.silo import SiloState
from tests.support import by_hand
from tests.support.numeric_rig import doubled

DTYPES = [torch.float32, torch.float64]


def drawn(dtype, *shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- the two terms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_distillation_of_a_model_by_itself_has_no_gradient(dtype, classes):
    logits = drawn(dtype, 33, classes).requires_grad_()
    (gradient,) = torch.autograd.grad(distillation(logits, logits.detach()), logits)
    assert torch.equal(gradient, torch.zeros_like(logits))


def test_autograds_own_gradient_is_rounding_there():
    """So that the test above can fail."""
    logits = drawn(torch.float32, 33, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(distillation(logits, logits.detach(), exact=False), logits)
    assert 0 < float(gradient.abs().max()) < 1e-7


@pytest.mark.parametrize("exact", [True, False])
def test_distillation_is_the_cross_entropy_and_its_gradient(exact):
    logits, teacher = drawn(torch.float64, 9, 4).requires_grad_(), drawn(torch.float64, 9, 4, seed=2)
    loss = distillation(logits, teacher, exact)
    p, p_t = torch.log_softmax(logits.detach(), -1), torch.softmax(teacher, -1)
    assert float(loss.detach()) == pytest.approx(float(-(p_t * p).sum(-1).mean()), rel=1e-14)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    torch.testing.assert_close(gradient, 3 * (p.exp() - p_t) / 9, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cosine_of_equal_rows_has_no_gradient(dtype):
    x = drawn(dtype, 17, 31).requires_grad_()
    (gradient,) = torch.autograd.grad(row_cosine_by_distance(x, x.detach()).sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))
    (usual,) = torch.autograd.grad(row_cosine(x, x.detach()).sum(), x)
    assert 0 < float(usual.abs().max()) < 100 * torch.finfo(dtype).eps


def test_the_contrast_by_distance_is_the_contrast():
    z, positive, negative = (drawn(torch.float64, 6, 5, seed=seed) for seed in (1, 2, 3))
    for tau in (0.05, 0.5, 2.0):
        expected = by_hand.model_contrast(z.numpy(), positive.numpy(), negative.numpy(), tau)
        found = model_contrast(z, positive, negative, tau, row_cosine_by_distance)
        assert float(found) == pytest.approx(expected, rel=1e-12)
    assert float(model_contrast(z, z, -z, 0.5, row_cosine_by_distance)) == pytest.approx(math.log(1 + math.exp(-4)))


# -- a participation --------------------------------------------------------------------------------------------------


def participations(tiny_federation, *words):
    """Return a federation whose silos took part before, and the shared parts that they are sent now."""
    federation = tiny_federation("fedfame", "head=linear", "train.steps=1", *words)
    shared = federation.coordinator.shared
    for silo in federation.silos.values():
        previous = federation.trainer.rounds([silo], shared, 1)[0].memory
        silo.state = SiloState({}, previous)
    moved = {part: {key: t + 0.05 * torch.sin(t * 99 + 1) for key, t in shared[part].items()} for part in shared}
    return federation, moved


WAYS = {
    "whole batch": (),
    "mlp head": ("head=mlp",),
    "one pass": ("train.tokens_at_once=64",),
    "cohort": ("cohort=3",),
    "bf16": ("precision=bf16",),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_step_moves_no_classifier(tiny_federation, way):
    """Its whole gradient is eq. 3's; what eq. 2 has by the previous model moves."""
    federation, shared = participations(tiny_federation, *WAYS[way])
    silos = list(federation.silos.values())
    for result in federation.trainer.rounds(silos, shared, 2):
        assert result.metrics["steps"] == 1
        for key, tensor in shared["head"].items():
            assert torch.equal(result.state["head"][key], tensor)
        for part in ("global", PROJECTION):
            assert any(not torch.equal(result.state[part][key], tensor) for key, tensor in shared[part].items())


def test_without_the_guard_it_moves_by_rounding(tiny_federation):
    """So that the test above can fail; the answer in exact arithmetic is 0."""
    federation, shared = participations(tiny_federation, "method.guard=false")
    result = federation.trainer.rounds([next(iter(federation.silos.values()))], shared, 2)[0]
    moved = max(float((result.state["head"][key] - tensor).abs().max()) for key, tensor in shared["head"].items())
    assert moved > 1e-5


@pytest.mark.parametrize("words", [("tuner=lora", "tuner.dropout=0.3"), ("train.dropout=own",), ("tuner=full",)])
def test_with_dropout_the_two_models_are_not_the_same(tiny_federation, words):
    """Each view draws its own numbers, so the start is not stationary and nothing is taken for equal."""
    federation, shared = participations(tiny_federation, *words)
    result = federation.trainer.rounds([next(iter(federation.silos.values()))], shared, 2)[0]
    assert any(not torch.equal(result.state["head"][key], tensor) for key, tensor in shared["head"].items())


# -- three rounds -----------------------------------------------------------------------------------------------------


def after_three_rounds(tiny_federation, double, *words):
    """Return the shared parts before and after, as vectors in float64; uniform mean, then the coordinator's step."""
    federation = tiny_federation("fedfame", "head=linear", *words)
    shared = federation.coordinator.shared
    if double:
        doubled(federation)
        shared = {part: {key: t.double() for key, t in tensors.items()} for part, tensors in shared.items()}
    before = vector(shared)
    for number in (1, 2, 3):
        found = [federation.trainer.rounds([silo], shared, number)[0] for silo in federation.silos.values()]
        for silo, result in zip(federation.silos.values(), found, strict=True):
            silo.state = SiloState({}, result.memory)
        shared = {
            part: {key: torch.stack([result.state[part][key] for result in found]).mean(0) for key in tensors}
            for part, tensors in shared.items()
        }
        shared |= federation.trainer.server_step(federation.server, shared, number).state
    return before, vector(shared)


def vector(state):
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(flatten(state).items())])


def differences(tiny_federation, *words):
    """Return how far float32 ends from float64, as a share of what moved: of the norm, and of the largest number."""
    start, single = after_three_rounds(tiny_federation, False, *words)
    begun, double = after_three_rounds(tiny_federation, True, *words)
    assert torch.equal(start, begun)
    apart, moved = single - double, double - begun
    assert moved.abs().max() > 5e-3
    return float(apart.norm() / moved.norm()), float(apart.abs().max() / moved.abs().max())


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_rounds_in_both_precisions_end_alike(tiny_federation, seed):
    """Adam: by norm; and every single number where ε is above the rounding of gradients.

    Numbers whose gradient is below its rounding take whole steps of Adam, and how many there are depends on the
    processor's kernels (from 4e-5 to 2.3e-4 of the norm), so the measure is the same run without the guard.
    """
    by_norm, _ = differences(tiny_federation, f"seed={seed}")
    unguarded, _ = differences(tiny_federation, f"seed={seed}", "method.guard=false")
    assert by_norm < 0.01 * unguarded
    _, largest = differences(tiny_federation, f"seed={seed}", "train.adam_epsilon=1e-4")
    assert largest < 1e-4


@pytest.mark.long
def test_without_the_guard_they_do_not(tiny_federation):
    by_norm, largest = differences(tiny_federation, "method.guard=false")
    assert by_norm > 1e-3
    assert largest > 0.1
