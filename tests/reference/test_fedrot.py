"""FedRot-LoRA against SciPy's Procrustes: rounds of two silos, λ = 0, and what a rotation leaves as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes, polar

from silotune.methods.fedrot import rotation
from tests.support.rounds_by_hand import Stage, descended
from tests.support.silos_by_hand import assert_models, averaged, loss_of, run_rounds, set_up

WEIGHT = 0.4


def nearest(silo, reference):
    """R by SciPy, of determinant 1, for matrices whose columns are turned: `silo @ R` is near `reference`."""
    r, _ = orthogonal_procrustes(silo, reference)
    if np.linalg.det(r) < 0:
        u, _, vt = np.linalg.svd(silo.T @ reference)
        r = u @ np.diag([*np.ones(len(u) - 1), -1.0]) @ vt
    return polar((1 - WEIGHT) * np.eye(len(r)) + WEIGHT * r)[0]


def turned_by_hand(own, reference, factor):
    """Turn a silo's LoRA toward a reference's A or B."""
    tensors = dict(own)
    for name in [name for name in own if name.endswith("lora_A.weight")]:
        up = name.replace("lora_A", "lora_B")
        a, b = own[name].numpy(), own[up].numpy()
        r = nearest(a.T, reference[name].numpy().T) if factor == "A" else nearest(b, reference[up].numpy())
        tensors |= {name: torch.from_numpy(r.T @ a), up: torch.from_numpy(b @ r)}
    return tensors


def test_three_rounds_of_two_silos(tiny_federation):
    """The first turns nothing, the second turns A, the third B."""
    federation, wholes = set_up(tiny_federation, "fedrot-lora", f"method.rotation={WEIGHT}")
    run_rounds(federation, 3)
    for factor in (None, "A", "B"):
        reference = next(iter(wholes.values()))["global"]
        for name, whole in wholes.items():

            def loss(now, name=name):
                return loss_of(federation, name, now["head"], (1, now["global"]))

            trained = descended(whole, [Stage(("global", "head"), loss)])
            if factor:
                trained["global"] = turned_by_hand(trained["global"], reference, factor)
            wholes[name] = trained
        averaged(wholes, ("global", "head"))
    assert_models(federation, wholes)


def test_without_rotation_it_is_fedit(tiny_federation):
    found = []
    for method, words in (("fedrot-lora", ("method.rotation=0",)), ("fedit", ())):
        federation, _ = set_up(tiny_federation, method, *words)
        run_rounds(federation)
        found.append(federation.coordinator.shared)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reflected", [False, True])
def test_a_rotation_keeps_the_product_and_comes_nearer(reflected):
    draws = torch.Generator().manual_seed(3)
    reference, b = (torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((4, 11), (7, 4)))
    turn = torch.linalg.qr(torch.randn(4, 4, generator=draws, dtype=torch.float64))[0]
    turn[:, 0] *= (-1 if reflected else 1) * torch.linalg.det(turn).sign()
    a = turn @ reference
    distances = []
    for weight in (0.0, 0.3, 1.0):
        r = rotation(a @ reference.T, weight)
        assert torch.linalg.det(r) == pytest.approx(1)
        torch.testing.assert_close((b @ r) @ (r.T @ a), b @ a, rtol=0, atol=1e-12)
        distances.append(float((r.T @ a - reference).norm()))
    assert distances == sorted(distances, reverse=True)
    assert reflected == (distances[-1] > 0.1)  # a mirror image cannot be turned back
