"""Vectors of the untouched backbone and gradients of single rows from them, against the general way, in float64."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from silotune.communication.privacy.noise import NoiseStream
from silotune.methods.step import LocalTraining
from silotune.models.forward.untouched_vectors import UntouchedVectors
from silotune.runs.build.builder import build
from silotune.training.mean_of_iterates import MeanOfIterates
from silotune.training.noised_steps import NoisedSteps
from silotune.training.row_privacy import RowPlan, RowPrivacy
from tests.support.proof import RECIPE, double_backbone, in_double

WORDS = {
    "linear": ("fedavg", "method.head_rounds=1", "head=linear", "head.normalize=3"),
    "two heads": ("fedmcp", "method.head_rounds=1", "method.mu=0", "head=mlp"),
    "without adapters": ("fedprox", "method.adapters=0", "train.label_smoothing=0.1"),
}


@pytest.fixture
def made(request, tiny_config, backbone_folder):
    method, *words = WORDS[request.param]
    with in_double():
        return build(tiny_config(method, *RECIPE, *words), double_backbone(backbone_folder("bert"), "AutoModel"))


@pytest.mark.parametrize("made", WORDS, indirect=True)
def test_gradients_of_rows_are_those_of_the_general_way(made):
    silo, context = next(iter(made.silos.values())), made.context
    phase = context.phases[0]
    plan = RowPlan("row", 1.0, (0, 1), 0.0)
    context.row_privacy = RowPrivacy(1.0, 2, {silo.name: plan}, frozenset({phase.name}), None, 1, "")
    steps = NoisedSteps(context, silo, phase, NoiseStream(b"key"), LocalTraining(0.1, {}, {}))
    with in_double():
        received = context.initial.shared([silo])
        state = context.model_state(silo, received)
        state = {part: {key: each + 0.1 for key, each in own.items()} for part, own in state.items()}
    places = [(task, row) for task, rows in silo.train.items() for row in range(len(rows))]
    assert steps._untouched is not None
    fast, beside, terms = steps._row_gradients(0, 0, places, state, received, {})
    steps._untouched = None
    general, expected, logged = steps._row_gradients(0, 0, places, state, received, {})
    for one, other in zip([*fast, *beside], [*general, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    for one, other in zip(terms, logged, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("made", ["linear"], indirect=True)
def test_a_rows_vector_has_equal_bits_whatever_the_other_rows_are_and_goes_with_them(made):
    rows = next(iter(next(iter(made.silos.values())).train.values()))
    store = UntouchedVectors(made.backbone)
    turned = replace(rows, ids=rows.ids[::-1], types=None if rows.types is None else rows.types[::-1])
    few = turned.first(3)
    for name, table in store.of(rows).items():
        assert torch.equal(store.of(turned)[name].flip(0), table)
        assert torch.equal(store.of(few)[name], store.of(turned)[name][:3])
        assert store.of(rows)[name] is table, "computed once"
    del turned, few
    gc.collect()
    assert len(store._tables) == 1


def test_the_mean_over_the_last_rounds_of_each_stage():
    mean = MeanOfIterates(0.5, [4, 7])
    states = {number: {"head/w": torch.tensor([float(number**2)])} for number in range(1, 8)}
    found = {number: mean.after(number, state) for number, state in states.items()}
    assert {number: None if each is None else float(each["head/w"]) for number, each in found.items()} == {
        **dict.fromkeys((1, 2, 3, 5, 6)),
        4: (9 + 16) / 2,
        7: (36 + 49) / 2,
    }
    assert not mean.state
