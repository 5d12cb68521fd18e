"""A run changes no bit of the backbone, also under full fine-tuning."""

from __future__ import annotations

import hashlib

import pytest
import torch

from silotune.core.tensors import digest, unflatten
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build.resolve import make_method
from silotune.training.context import TrainingContext
from tests.support.method_cases import BATCH, CASES, of_kinds, read_message, tapped

TWO_STEPS = (f"train.batch_size={BATCH // 2}",)
"""At least two steps in every silo, since a part's first gradient may be zero."""


def bits(backbone: Backbone) -> dict[str, str]:
    """Hash every parameter and buffer."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in [*backbone.model.named_parameters(), *backbone.model.named_buffers()]
    }


def assert_idle(backbone: Backbone) -> None:
    """Assert that no training mode and no gradient is left."""
    assert not any(module.training for module in backbone.model.modules())
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in backbone.model.parameters())


@pytest.mark.parametrize("case", of_kinds(CASES, ("fedmcp", "flora, ranks", "feddpa-t, dropout", "fedfame")))
def test_a_run_changes_no_bit_of_the_backbone(federate, case, tmp_path):
    before = bits(federate.backbone)
    identities = {name: id(tensor) for name, tensor in federate.backbone.model.named_parameters()}
    with tapped() as wire:
        last = 1 + any(phase.skips_first for phase in make_method(federate.config(case)).phases())
        run = federate.run(case, tmp_path / "run", f"rounds={last}", "train.lr=0.05", *TWO_STEPS)
    assert bits(federate.backbone) == before
    assert {name: id(tensor) for name, tensor in federate.backbone.model.named_parameters()} == identities
    assert_idle(federate.backbone)
    training: TrainingContext = run.federation.context
    silos = run.federation.silos
    shared = unflatten(read_message(wire.down[-1])[0]) if last > 1 else training.initial.shared(silos.values())
    for (number, name), result in wire.results.items():  # and it did train: no part is where it started
        if number < last:
            continue
        silos[name].state = None
        start = shared | training.state_of(silos[name]).private
        trained = {part for phase in training.phases if phase.runs_in(number) for part in phase.trains if start[part]}
        assert trained  # the head of retrieval has no tensors
        for part in trained:
            assert digest(result.state[part]) != digest(start[part])


@pytest.mark.parametrize("case", ["fedavg-full", "fedmcp"])
def test_an_interruption_amid_a_forward_leaves_the_backbone_as_it_was(federate, case, tmp_path):
    before, forwards = bits(federate.backbone), []

    def interrupt(module: torch.nn.Module, *_: object) -> None:
        forwards.append(module.training)
        if len(forwards) == 4:
            raise KeyboardInterrupt

    site = federate.backbone.module("encoder.layer.0.intermediate")
    handle = site.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            federate.run(case, tmp_path / "run")
    finally:
        handle.remove()
    assert forwards == [case == "fedavg-full"] * 4  # dropout is on in full fine-tuning alone
    assert bits(federate.backbone) == before
    assert_idle(federate.backbone)
    again = federate.run(case, tmp_path / "run", resume=True)
    fresh = federate.run(case, tmp_path / "fresh")
    assert again.summary["state_sha256"] == fresh.summary["state_sha256"]


@pytest.mark.parametrize("case", ["fedavg-full", "fedmcp"])
def test_one_backbone_for_many_runs_gives_what_one_of_its_own_gives(
    federate, reference, small_backbone, case, tmp_path
):
    """Earlier runs over the shared backbone, with their hooks, do not change a result."""
    run, _ = reference(case)
    from silotune.runs.run import run as run_alone

    alone = run_alone(federate.config(case), out=tmp_path / "alone")
    assert alone.federation.backbone is not federate.backbone
    assert alone.summary["state_sha256"] == run.summary["state_sha256"]
    assert alone.federation.backbone.fingerprint == load_backbone(str(small_backbone)).fingerprint
