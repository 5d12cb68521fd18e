"""The views of a batch run together are the views run one by one: for every method, losses and gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from silotune.methods import Step
from silotune.methods.parts import Scope
from silotune.methods.step import PREVIOUS
from silotune.models.forward.mixing import MixEntry
from tests.support.method_cases import every_method
from tests.support.numeric_rig import cut_batch, doubled, random_parts, trained
from tests.support.tiny import ONE_TASK
from tests.support.views import view_of_batch, views_of_batch


def prepare(tiny_federation, method, *words):
    one_silo = ["partition.silos=1", "data.tasks=[beta]"] if method in ONE_TASK else []
    federation = doubled(tiny_federation(method, *one_silo, *words))
    silo = federation.silos.get("gamma") or next(iter(federation.silos.values()))
    state, other, old = (random_parts(federation, silo, seed=seed, spread=0.1) for seed in (1, 2, 3))
    received = {name: other[name] for name, part in federation.context.parts.items() if part.scope is Scope.SHARED}
    remembered = {
        f"{PREVIOUS}/{name}/{key}": tensor for name in federation.method.remembers for key, tensor in old[name].items()
    }
    rows = next(iter(silo.train.values()))
    return federation, cut_batch(federation.backbone, rows, range(8), 3), state, received, remembered


def result(training, phase, batch, state, received, memory, together):
    """Loss and gradients of a phase, its views run together as training does, or one by one."""
    state = dict(state)
    leaves = trained(state, phase)
    mixes = {name: training.resolve(mix, state, received, memory) for name, mix in phase.views.items()}
    if together:
        views = training.program([mixes])(batch)
    else:
        views = {name: training.program([{name: mix}])(batch)[name] for name, mix in mixes.items()}
    loss = phase.loss(Step(batch, views, state, received, memory, training.parts))
    loss.backward()
    return float(loss.detach()), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@every_method
def test_together_is_one_by_one(method, tiny_federation):
    federation, batch, state, received, memory = prepare(tiny_federation, method)
    for phase in (phase for phase in federation.context.phases if phase.trains):  # others copy
        loss, expected = result(federation.context, phase, batch, state, received, memory, together=False)
        shared_loss, shared_gradients = result(federation.context, phase, batch, state, received, memory, together=True)
        assert shared_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert shared_gradients.keys() == expected.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        assert largest > 1e-4
        for name, gradient in expected.items():
            torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-10, atol=1e-10 * largest, msg=name)


class Calls:
    """How often modules run, and over how many rows."""

    def __init__(self, backbone, **modules):
        self.rows = {name: [] for name in modules}
        self._handles = [
            backbone.module(site).register_forward_hook(
                lambda module, args, output, name=name: self.rows[name].append(len(output))
            )
            for name, site in modules.items()
        ]

    def close(self):
        for handle in self._handles:
            handle.remove()
        return self.rows


def test_what_lies_below_the_first_adapter_is_computed_once(tiny_federation):
    """Three trained views and a constant one: modules really run, not only their results, by FLOPs and by rows."""
    from torch.utils.flop_counter import FlopCounterMode

    federation, batch, state, received, memory = prepare(tiny_federation, "fedmcp")
    training = federation.context
    (phase,) = training.phases
    assert set(phase.views) == {"full", "global", "received", "private"}
    rows = [len(micro_batch) for micro_batch in batch.micro]
    counts = {}
    for together in (False, True):
        calls = Calls(
            training.backbone,
            first="encoder.layer.0.intermediate.dense",
            last="encoder.layer.1.output.dense",
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            mixes = {name: training.resolve(mix, state, received, memory) for name, mix in phase.views.items()}
            if together:
                views_of_batch(training.backbone, batch, mixes)
            else:
                for mix in mixes.values():
                    view_of_batch(training.backbone, batch, mix)
        counts[together] = counter.get_total_flops(), calls.close()
    assert Counter(counts[True][1]["last"]) == Counter([4 * number for number in rows])  # without gradient: one forward
    assert sorted(counts[False][1]["last"]) == sorted(4 * rows)
    # query, key, value and output of the first block's attention, its scores and their use: once instead of four times
    width = training.backbone.hidden_size
    shared = sum(
        8 * width * width * micro_batch.tokens(0) + 4 * width * len(micro_batch) * micro_batch.width**2
        for micro_batch in batch.micro
    )
    assert counts[False][0] - counts[True][0] == 3 * shared


def test_equal_mixes_are_one_view(tiny_federation):
    """A silo's first participation in MOON: its previous parts are the received ones."""
    federation, batch, state, received, _ = prepare(tiny_federation, "moon")
    training = federation.context
    (phase,) = training.phases
    calls = Calls(training.backbone, last="encoder.layer.1.output.dense")
    mixes = {name: training.resolve(mix, state, received, {}) for name, mix in phase.views.items()}
    with torch.no_grad():
        views = views_of_batch(training.backbone, batch, mixes)
    rows = [len(micro_batch) for micro_batch in batch.micro]
    assert calls.close()["last"] == [2 * number for number in rows]
    assert views["received"] is views["previous"]


def test_a_weight_of_its_own_for_each_row_goes_with_its_row(tiny_federation):
    federation, batch, state, *_ = prepare(tiny_federation, "fedmcp")
    training = federation.context
    tuner = training.parts["global"].module
    draws = torch.Generator().manual_seed(1)
    weight = torch.rand(len(batch), generator=draws, dtype=torch.float64)
    global_part, private_part = state["global"], state["private"]
    mixes = {
        "rows": [MixEntry(tuner, global_part, weight), MixEntry(tuner, private_part, 1 - weight)],
        "one": [MixEntry(tuner, global_part, 1)],
    }
    views = views_of_batch(training.backbone, batch, mixes)
    for name, mix in mixes.items():
        torch.testing.assert_close(views[name]["mean"], view_of_batch(training.backbone, batch, mix)["mean"])


@pytest.mark.parametrize(
    ("tuner", "written_once"), [("bottleneck", True), ("lora", True), ("ia3", True), ("dora", False)]
)
def test_plans_that_read_their_parts_are_written_once(tuner, written_once, tiny_federation, monkeypatch):
    """They follow what an optimizer does to the tensors; plans with something computed of parts are written anew."""
    federation, batch, state, received, memory = prepare(tiny_federation, "fedmcp", f"tuner={tuner}")
    training, calls = federation.context, []
    (phase,) = training.phases
    kind = type(training.parts["global"].module)
    act = kind.act
    monkeypatch.setattr(kind, "act", lambda *arguments: (calls.append(1), act(*arguments)))
    leaves = trained(state, phase)
    mixes = {name: training.resolve(mix, state, received, memory) for name, mix in phase.views.items()}
    program = training.program([mixes])
    for _ in "12":
        with torch.no_grad():
            for leaf in leaves.values():
                leaf.mul_(1.1)
        views = program(batch)
        expected = {name: view_of_batch(training.backbone, batch, mix) for name, mix in mixes.items()}
        for name, view in views.items():
            torch.testing.assert_close(view["mean"], expected[name]["mean"], rtol=1e-10, atol=1e-12)
        calls.clear()
    program(batch)
    assert bool(calls) is (tuner == "dora")
