"""Heads by hand: logits in NumPy, and how they begin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from silotune.data.tasks import Task
from silotune.models.backbone.loading import load_backbone
from silotune.models.heads import LinearHead, MLPHead
from tests.support import by_hand
from tests.support.numeric_rig import arrays

TASKS = [Task("two", ("a", "b")), Task("three", ("a", "b", "c"))]


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize(("kind", "formula"), [(MLPHead, by_hand.mlp_head), (LinearHead, by_hand.linear_head)])
def test_head_logits_by_hand(kind, formula, pooling, backbone_folder):
    backbone = load_backbone(str(backbone_folder("bert")), precision="fp32")
    head = kind(pooling)
    tensors = {key: t.double() for key, t in head.init(backbone, TASKS, torch.Generator().manual_seed(4)).items()}
    draws = np.random.default_rng(0)
    view = {how: torch.tensor(draws.normal(size=(6, 32))) for how in ("first", "mean")}
    for task in TASKS:
        logits = head.logits(tensors, view, task).numpy()
        expected = formula(arrays(tensors), task.name, view[pooling].numpy())
        assert logits.shape == (6, len(task.labels))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-13)


def test_head_starts_as_a_torch_linear_layer_does(backbone_folder):
    backbone = load_backbone(str(backbone_folder("bert")), precision="fp32")
    tensors = MLPHead().init(backbone, TASKS, torch.Generator().manual_seed(0))
    bound = 1 / math.sqrt(32)
    for tensor in tensors.values():
        assert tensor.abs().max() <= bound
    assert tensors["two.dense.weight"].std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert tensors["two.dense.weight"].mean().abs() < 0.02
    assert not torch.equal(tensors["two.dense.weight"], tensors["three.dense.weight"])
