"""Fed-SB and RAVAN against dense products: bases, what acts, and two rounds whose means are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.errors import InputError
from silotune.models.tuners.fed_sb import FedSB, FedSBOptions
from silotune.models.tuners.ravan import RavanOptions, RavanTuner
from silotune.models.tuners.target_modules import layer_weight
from tests.support.rounds_by_hand import Stage, descended
from tests.support.silos_by_hand import assert_models, averaged, loss_of, run_rounds, set_up
from tests.support.tuner_families import make_backbone, random_part, shared_backbone

RANK = 3


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("bases", ["svd", "random"])
def test_what_acts_is_a_matrix_between_orthonormal_bases(bases, family):
    backbone, options = shared_backbone(family, double=True), FedSBOptions(r=RANK, alpha=5, bases=bases)
    tuner, like = FedSB(options), torch.zeros((), dtype=torch.float64)
    part = random_part(tuner, backbone)
    acting = tuner.effective(backbone, part)
    for module in tuner.target_modules(part):
        a, b = (each.numpy() for each in tuner._bases(backbone, module, like))
        again = FedSB(options)._bases(make_backbone(family, double=True), module, like)
        np.testing.assert_array_equal(a, again[0])
        np.testing.assert_array_equal(b, again[1])
        np.testing.assert_allclose(a @ a.T, np.eye(RANK), atol=1e-6)
        np.testing.assert_allclose(b.T @ b, np.eye(RANK), atol=1e-6)
        if bases == "svd":
            weight = layer_weight(backbone.module(module)).double().numpy()
            values = np.linalg.svd(weight, compute_uv=False)[:RANK]
            np.testing.assert_allclose(b.T @ weight @ a.T, np.diag(values), atol=1e-5)
        change = acting[f"{module}.lora_B.weight"] @ acting[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(change, b @ part[f"{module}.middle.weight"].numpy() @ a, atol=1e-12)


def test_heads_act_as_the_sum_of_their_products():
    backbone, tuner = shared_backbone("bert", double=True), RavanTuner(RavanOptions(r=6, heads=3, alpha=5))
    part = random_part(tuner, backbone)
    acting = tuner.effective(backbone, part)
    for module in tuner.target_modules(part):
        a, b = (each.numpy() for each in tuner._bases(backbone, module, torch.zeros((), dtype=torch.float64)))
        heads, scales = (part[f"{module}.{name}.weight"].numpy() for name in ("middle", "scales"))
        change = sum(scales[i] * b[:, 2 * i : 2 * i + 2] @ heads[i] @ a[2 * i : 2 * i + 2] for i in range(3))
        product = acting[f"{module}.lora_B.weight"] @ acting[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(product, change, atol=1e-12)


def as_trained(whole):
    return whole


def folded_by_hand(whole):
    """RAVAN sends `s_i·H_i`, with scales of 1."""
    part, scales = dict(whole["global"]), {n: t for n, t in whole["global"].items() if n.endswith("scales.weight")}
    for name, own in scales.items():
        middle = name.replace("scales", "middle")
        part |= {middle: torch.stack([s * h for s, h in zip(own, part[middle], strict=True)]), name: own / own}
    return whole | {"global": part}


@pytest.mark.parametrize(
    ("words", "sent"), [("fedit tuner=fed-sb", as_trained), ("ravan tuner=ravan tuner.heads=2", folded_by_hand)]
)
def test_two_rounds_of_two_silos_have_exact_means(tiny_federation, words, sent):
    federation, wholes = set_up(tiny_federation, *words.split(), "tuner.r=4")
    tuner, backbone = federation.method.setting.tuner, federation.context.backbone
    run_rounds(federation)
    for _ in range(2):
        changes = []
        for silo, whole in wholes.items():

            def loss(now, silo=silo):
                return loss_of(federation, silo, now["head"], (1, tuner.effective(backbone, now["global"])))

            wholes[silo] = descended(whole, [Stage(("global", "head"), loss)])
            changes.append(products(tuner.effective(backbone, wholes[silo]["global"])))
            wholes[silo] = sent(wholes[silo])
        averaged(wholes, ("global", "head"))
        mean = products(tuner.effective(backbone, next(iter(wholes.values()))["global"]))
        for module, product in mean.items():
            torch.testing.assert_close(product, (changes[0][module] + changes[1][module]) / 2, rtol=0, atol=1e-12)
    assert_models(federation, wholes)


def products(acting):
    ending = ".lora_A.weight"
    names = [name.removesuffix(ending) for name in acting if name.endswith(ending)]
    return {name: acting[f"{name}.lora_B.weight"] @ acting[f"{name}{ending}"] for name in names}


def test_more_directions_than_a_module_has_are_refused():
    with pytest.raises(InputError, match=r"tuner\.r: 99 directions of .*, which has \d+; allowed: up to that"):
        FedSB(FedSBOptions(r=99)).init(shared_backbone("bert"), [], torch.Generator())


def test_heads_that_do_not_divide_the_rank_are_refused():
    with pytest.raises(ValueError, match=r"heads: 3 heads do not divide the rank r=4"):
        RavanOptions(r=4, heads=3)
