"""A tuner or ranks that a method is not defined for: one line each, before training."""

from __future__ import annotations

import pytest

from silotune.aggregation import RankAggregation
from silotune.config import registries
from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.models.backbone.loading import load_backbone
from silotune.models.tuners import TUNERS
from tests.support.tiny import ONE_TASK

OF_SOME_TUNERS = [name for name, method in METHODS.items() if method.tuners is not None]


@pytest.fixture(scope="module")
def backbone(backbone_folder):
    return load_backbone(str(backbone_folder("bert")), precision="fp32")


@pytest.mark.parametrize("method", OF_SOME_TUNERS)
def test_a_tuner_that_the_method_is_not_defined_for(method, tiny_config):
    tuners = METHODS[method].tuners
    for tuner in TUNERS.keys() - {*tuners}:
        with pytest.raises(InputError) as refused:
            tiny_config(method, f"tuner={tuner}")
        assert str(refused.value) == (
            f"tuner={tuner}: method {method} is not defined for it; allowed: {', '.join(sorted(tuners))}"
        )


def mixes_ranks(method):
    """Whether the method's aggregation combines several ranks; it is asked nothing where nothing is shared."""
    kind = registries.AGGREGATIONS.get(METHODS[method].defaults.get("aggregation", "samples"))
    return method == "local" or (isinstance(kind, type) and issubclass(kind, RankAggregation))


EQUAL_RANKS = [
    name
    for name, method in METHODS.items()
    if not mixes_ranks(name) and name not in ONE_TASK and (method.tuners is None or "lora" in method.tuners)
]


@pytest.mark.parametrize("method", EQUAL_RANKS)
def test_ranks_that_the_method_cannot_mix(method, tiny_config, tiny_federation, backbone):
    words = ("tuner=lora", "tuner.r=4", "tuner.ranks.beta=2", "precision=fp32")
    with pytest.raises(InputError, match=r"^tuner\.ranks: .*(allowed: aggregation=flexlora|leave it out)") as refused:
        tiny_federation(method, *words, backbone=backbone)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("method", "aggregation"), [("ffa-lora", "hetlora"), ("fedsa-lora", "flexlora")])
def test_ranks_of_a_method_that_keeps_a_factor(method, aggregation, tiny_federation, backbone):
    with pytest.raises(InputError, match=f"^aggregation={aggregation}: the shared parts hold no pairs of LoRA's A and"):
        tiny_federation(method, f"aggregation={aggregation}", "tuner.ranks.beta=2", backbone=backbone)
