"""Rows of several silos in one forward: each segment as if its rows went through alone; on every family, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from silotune.config.train import TrainConfig
from silotune.core.randomness import Stream
from silotune.errors import InputError
from silotune.models.backbone.segments import Segments
from silotune.models.forward.mixing import MixEntry, can_share_forward
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS
from silotune.training.at_once import choose_cohort
from tests.support.tuner_families import (
    PAIRS,
    as_parameters,
    batch,
    make_backbone,
    make_tuner,
    random_part,
    real_states,
    shared_backbone,
    trainable,
)
from tests.support.views import encoded_cohort, encoded_views

TOGETHER = [
    (kind, family)
    for kind, family in PAIRS
    if can_share_forward(shared_backbone(family, double=True), make_tuner(kind))
]
APART = [*{kind: (kind, family) for kind, family in reversed(PAIRS) if (kind, family) not in TOGETHER}.values()]
"""One family of each kind that cannot share a forward there."""
RAGGED = ((5, 2, 6, 4), (3,), (4, 7, 1))
"""Lengths of the rows of three silos."""
EVEN = ((5, 2), (3, 3), (4, 7))


def silos_inputs(family, lengths):
    """Each silo's batch as it is alone, and all of them behind one another."""
    alone = [batch(family, lengths=row_lengths, seed=seed) for seed, row_lengths in enumerate(lengths)]
    longest = max(map(max, lengths))
    pad = 1 if family in ("roberta", "mpnet") else 0

    def wide(name, tensor):
        missing = 0 if name.startswith("decoder_") else longest - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (0, missing), value=pad if name == "input_ids" else 0)

    whole = {name: torch.cat([wide(name, inputs[name]) for inputs in alone]) for name in alone[0]}
    return alone, whole


def silos_mixes(tuner, backbone, silo, received, weights=(0.5, 0.5)):
    """A silo's own views, and one that is the same for all."""
    one, other = (trainable(random_part(tuner, backbone, 10 * silo + seed)) for seed in (1, 2))
    mixes = {
        "both": [MixEntry(tuner, one, weights[0]), MixEntry(tuner, other, weights[1])],
        "one": [MixEntry(tuner, one, 1)],
        "received": [MixEntry(tuner, received, 1)],
        "base": [],
    }
    return mixes, [*one.values(), *other.values()]


def score(actual, inputs):
    return sum(
        (weight + 1) * row.square().sum()
        for weight, states in enumerate(actual.values())
        for row in real_states(states, inputs)
    )


def compare(backbone, tuner, family, lengths, weights=None, streams=False):
    """States and gradients, all silos together against one after the other."""
    alone, whole = silos_inputs(family, lengths)
    received = random_part(tuner, backbone, 99)
    silos = [
        silos_mixes(tuner, backbone, silo, received, weights[silo] if weights else (0.5, 0.5))
        for silo in range(len(lengths))
    ]
    expected, gradients = [], []
    for silo, (inputs, (mixes, leaves)) in enumerate(zip(alone, silos, strict=True)):
        with Stream(1, "silo", silo):
            actual = encoded_views(backbone, inputs, mixes)
        gradients.append(torch.autograd.grad(score(actual, inputs), leaves, retain_graph=True))
        expected.append({name: real_states(states.detach(), inputs) for name, states in actual.items()})
    silo_streams = [Stream(1, "silo", silo) for silo in range(len(lengths))] if streams else []
    actual = encoded_cohort(backbone, alone, whole, [mixes for mixes, _ in silos], silo_streams)
    total = 0
    for silo, inputs in enumerate(alone):
        width = inputs["input_ids"].shape[1]
        pieces = {}
        for name, states in actual[silo].items():
            pieces[name] = states if "decoder_input_ids" in inputs else states[:, :width]
            for row, there in zip(real_states(pieces[name].detach(), inputs), expected[silo][name], strict=True):
                torch.testing.assert_close(row, there, rtol=1e-10, atol=1e-10)
        total = total + score(pieces, inputs)
    leaves = [leaf for _, own_leaves in silos for leaf in own_leaves]
    flat = [gradient for own_gradients in gradients for gradient in own_gradients]
    for gradient, there in zip(torch.autograd.grad(total, leaves), flat, strict=True):
        largest = max(float(there.abs().max()), 1e-3)
        torch.testing.assert_close(gradient, there, rtol=1e-10, atol=1e-10 * largest)


@pytest.mark.parametrize(("kind", "family"), as_parameters(TOGETHER))
def test_a_segment_is_as_its_rows_alone(kind, family):
    backbone, tuner = shared_backbone(family, double=True), make_tuner(kind)
    compare(backbone, tuner, family, RAGGED)


@pytest.mark.parametrize("kind", ["ia3", "bitfit"])
def test_with_as_many_rows_in_each(kind):
    compare(shared_backbone("bert", double=True), make_tuner(kind), "bert", EVEN)


@pytest.mark.parametrize("kind", ["lora", "bottleneck"])
def test_mixes_of_different_forms(kind):
    """Weights that differ from silo to silo, and a part that is absent in one: acted on one after the other."""
    weights = [(0.5, 0.5), (0.2, 0.8), (1, 0)]
    backbone, tuner = shared_backbone("bert", double=True), make_tuner(kind)
    with pytest.raises(RuntimeError, match="unused"):  # the absent part has no gradient, there and here
        compare(backbone, tuner, "bert", RAGGED, weights)
    compare(backbone, tuner, "bert", RAGGED, [*weights[:2], (0.9, 0.1)])


@pytest.mark.parametrize("kind", ["lora", "dora", "bottleneck"])
@pytest.mark.parametrize("lengths", [RAGGED, EVEN])
def test_batched_products_are_used(kind, lengths, monkeypatch):
    """One change a site for all silos of a view, none for each."""
    backbone, tuner = shared_backbone("bert", double=True), make_tuner(kind)
    monkeypatch.setattr("silotune.models.forward.mixing.segment_plans", None)
    compare(backbone, tuner, "bert", lengths)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_a_segment_is_drawn_as_alone(checkpointing):
    """Also where blocks are computed again on the way back."""
    backbone = make_backbone("bert", double=True, checkpointing=checkpointing)
    tuner = TUNERS["lora"](TUNERS["lora"].Options(r=3, alpha=6.0, dropout=0.4))
    compare(backbone, tuner, "bert", RAGGED, streams=True)


@pytest.mark.parametrize(("kind", "family"), APART)
def test_refused_where_rows_cannot_be_told_apart(kind, family):
    backbone, tuner = shared_backbone(family, double=True), make_tuner(kind)
    alone, whole = silos_inputs(family, EVEN)
    mixes = [{"own": [MixEntry(tuner, random_part(tuner, backbone, seed), 1)]} for seed in range(3)]
    with pytest.raises(InputError, match=r"cohort"):
        encoded_cohort(backbone, alone, whole, mixes)


def test_a_tensor_without_the_rows_is_refused():
    with pytest.raises(InputError, match=r"^cohort: .*\(5, 2\) has not the 4 rows of the 2 silos"):
        Segments([3, 1]).split(torch.zeros(5, 2))


def test_stacks_of_what_is_trained_are_trained_in_a_pass_without_graph_too():
    """Otherwise the first of two passes (`train.tokens_at_once`) draws no dropout, and the second does."""
    parts = [{"A": torch.ones(2, requires_grad=True)}, {"A": torch.zeros(2, requires_grad=True)}]
    with torch.no_grad():
        stacked = Segments([1, 2]).stack_tensors(parts)
    assert stacked["A"].requires_grad
    assert not Segments([1]).stack_tensors([{"A": torch.ones(2)}])["A"].requires_grad


def test_dropout_in_an_encoder_decoder_is_refused():
    """A decoder's rows are padded to another width than its encoder's."""
    backbone, asked = shared_backbone("t5"), SimpleNamespace
    for rate, works in ((0.3, False), (0.0, True)):
        tuner = TUNERS["lora"](TUNERS["lora"].Options(dropout=rate))
        training = asked(backbone=backbone, tuners=[tuner], train=TrainConfig(), head=HEADS["linear"]())
        if works:
            assert choose_cohort(3, training, []).size == 3
        else:
            with pytest.raises(InputError, match=r"^cohort=3: .*encoder–decoder with dropout in tuner=lora; allowed"):
                choose_cohort(3, training, [])
            assert choose_cohort("auto", training, []).size == 1
