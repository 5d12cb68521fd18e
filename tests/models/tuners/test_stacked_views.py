"""Several mixes over the same rows, together and one by one: every kind of part on every family, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from silotune.models.forward.mixing import MixEntry, fold_entries, make_plan
from tests.support.tuner_families import (
    FAMILIES,
    KINDS,
    LENGTHS,
    PAIRS,
    batch,
    forms_of,
    make_backbone,
    make_tuner,
    random_part,
    real_states,
    run,
    shared_backbone,
    trainable,
)
from tests.support.views import encoded_views

BATCHES = (("right", LENGTHS), ("left", (7, 3, 6)), ("right", (5,)))
"""Padding side and lengths of rows; in a batch of one row nothing tells one copy from what broadcasts."""


def cases():
    """All pairs with all batches; the short suite has one batch for a pair of the representative families."""
    for kind, family in PAIRS:
        chosen = ([*KINDS].index(kind) + [*FAMILIES].index(family)) % len(BATCHES)
        for number, (side, lengths) in enumerate(BATCHES):
            short = number == chosen and (kind == "lora" or family in forms_of(kind, 3))
            marks = [] if short else [pytest.mark.long]
            yield pytest.param(kind, family, side, lengths, marks=marks, id=f"{kind} {family} {side} {len(lengths)}")


def mixes_of(tuner, backbone):
    """Three mixes of two trained parts, two constant ones, and the backbone alone; and the trained parts."""
    one, other, third = (trainable(random_part(tuner, backbone, seed)) for seed in (1, 2, 3))
    constant = ({name: tensor.detach() for name, tensor in part.items()} for part in (one, third))
    received, previous = ([MixEntry(tuner, part, 1)] for part in constant)
    both = [MixEntry(tuner, one, 0.5), MixEntry(tuner, other, 0.5)]
    mixes = {"both": both, "one": [MixEntry(tuner, one, 1)], "other": [MixEntry(tuner, other, 1)]}
    return mixes | {"received": received, "previous": previous, "base": []}, (one, other)


def states_and_gradients(actual, inputs, parts):
    total = sum(
        (weight + 1) * row.square().sum()
        for weight, states in enumerate(actual.values())
        for row in real_states(states, inputs)
    )
    leaves = [tensor for part in parts for tensor in part.values()]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return {name: real_states(states.detach(), inputs) for name, states in actual.items()}, gradients


@pytest.mark.parametrize(("kind", "family", "side", "lengths"), cases())
def test_together_is_one_by_one(kind, family, side, lengths):
    backbone, tuner = shared_backbone(family, double=True), make_tuner(kind)
    mixes, parts = mixes_of(tuner, backbone)
    inputs = {name: tensor.to(backbone.device) for name, tensor in batch(family, side, lengths).items()}
    alone = {name: encoded_views(backbone, inputs, {name: mix})[name] for name, mix in mixes.items()}
    states, gradients = states_and_gradients(alone, inputs, parts)
    actual, their_gradients = states_and_gradients(encoded_views(backbone, inputs, mixes), inputs, parts)
    assert list(states) == ["both", "one", "other", "received", "previous", "base"]
    for name, rows in states.items():
        for row, expected in zip(actual[name], rows, strict=True):
            torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)
    largest = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    for gradient, expected in zip(their_gradients, gradients, strict=True):
        assert (gradient is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10 * largest)


def test_an_unknown_family_takes_a_forward_for_each_mix():
    backbone, tuner, inputs = make_backbone("bert"), make_tuner("lora-patterns"), batch("bert")
    parts = [trainable(random_part(tuner, backbone, seed)) for seed in (1, 2)]
    backbone.model_type = "something-new"
    calls = []
    backbone.module("encoder.layer.1.output.dense").register_forward_hook(lambda *args: calls.append(len(args[2])))
    actual = encoded_views(backbone, inputs, {name: [MixEntry(tuner, parts[name], 1)] for name in (0, 1)})
    assert calls == [len(LENGTHS)] * 2
    for name in (0, 1):
        torch.testing.assert_close(actual[name], run(backbone, inputs, (tuner, [(parts[name], 1.0)])))


class Computes(TorchFunctionMode):
    """Fails at the first operation on tensors; their shapes and the like may be read."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func.__name__ in ("__get__", "__len__", "dim", "numel", "size"), f"{func} computes"
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor), f"{func} computes"
        return result


def test_plans_that_hold_compute_nothing():
    """Else their values would be those of the first batch, and parts change from step to step."""
    backbone, holding = shared_backbone("bert"), [kind for kind in KINDS if make_tuner(kind).plan_holds]
    assert {"bottleneck", "lora", "ia3", "bitfit"} <= {*holding}
    for tuner in map(make_tuner, holding):
        one, other = (trainable(random_part(tuner, backbone, seed)) for seed in (1, 2))
        with Computes():
            mix = fold_entries(backbone, [MixEntry(tuner, one, 0.5), MixEntry(tuner, other, 2)])
            assert make_plan(backbone, mix).outputs
