"""Every tuner in a whole round of local training and averaging, chosen by its name alone."""

from __future__ import annotations

import pytest
import torch

from silotune.errors import InputError
from silotune.models.tuners import TUNERS
from silotune.runs.build.builder import build
from silotune.runs.run import run


@pytest.mark.parametrize("tuner", sorted(TUNERS))
def test_a_tuner_federates(tuner, tiny_config, tmp_path):
    result = run(tiny_config("fedavg", f"tuner={tuner}", "rounds=1", "train.steps=3"), out=tmp_path / "run")
    summary = result.summary
    assert summary["adapter_parameters"] > 0
    assert summary["sent_parameters"] >= summary["adapter_parameters"]
    assert summary["bytes_up"] > 4 * summary["adapter_parameters"]
    shared = result.federation.coordinator.shared
    start = result.federation.context.initial.shared(result.federation.silos.values())
    moved = [
        name
        for part, tensors in shared.items()
        for name, tensor in tensors.items()
        if not torch.equal(tensor, start[part][name])
    ]
    assert len(moved) > 0.9 * sum(len(tensors) for tensors in shared.values())


@pytest.mark.parametrize("tuner", ["prompt", "prefix", "p-tuning"])
def test_virtual_tokens_and_text_must_fit_the_backbone(tuner, tiny_config):
    """The tiny BERT has 128 positions; rows may have 32 tokens."""
    build(tiny_config("fedavg", f"tuner={tuner}", "tuner.tokens=96"))
    with pytest.raises(InputError, match=r"^train\.max_length: 32 .*97 virtual tokens .*up to 31$"):
        build(tiny_config("fedavg", f"tuner={tuner}", "tuner.tokens=97"))
