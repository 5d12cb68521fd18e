"""The families of `make test` span what an `Architecture` declares, and its pairs all tuners."""

from __future__ import annotations

import dataclasses

from silotune.models.backbone.architectures import ARCHITECTURES, TARGET_FIELDS, Architecture
from silotune.models.tuners import TUNERS
from tests.models.test_decoder_families import QUICK
from tests.support.tuner_families import FORMS, KINDS, PAIRS


def features(architecture: Architecture) -> set[str]:
    """Name the forms of an architecture's fields: of a module's name, whether there is none, one or several."""
    names = {}
    for field in dataclasses.fields(architecture):
        value = getattr(architecture, field.name)
        if field.name in TARGET_FIELDS:
            names[field.name] = min(len(list(filter(None, value.split(",")))), 2)
        elif field.name == "positions":
            names[field.name] = "table" if value not in (None, "rotary") else value
        elif field.name == "more":
            names |= {f"{field.name} {feature}": True for other in value for feature in features(other)}
        elif field.name not in ("blocks", "embeddings"):
            names[field.name] = value
    queries = {architecture.query, architecture.key, architecture.value}
    return {f"{name}: {value}" for name, value in names.items()} | {f"{len(queries)} layers before attention"}


def test_every_form_of_an_architecture_is_in_a_family():
    every = {name: features(architecture) for name, architecture in ARCHITECTURES.items()}
    assert {*FORMS, *QUICK} <= every.keys()
    assert set().union(*every.values()) == set().union(*(every[name] for name in (*FORMS, *QUICK)))


def test_every_tuner_is_on_a_family_of_each_form():
    built_in = {name for name, tuner in TUNERS.items() if tuner.__module__.startswith("silotune.")}
    assert {KINDS[kind][0] for kind, _ in PAIRS} == built_in
    for family in FORMS:
        assert {KINDS[kind][0] for kind, other in PAIRS if other == family} >= {"lora", "bottleneck", "ia3", "full"}
