"""The configuration as it travels: what all parties must run alike, without anybody's paths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from silotune.config import Config, dump
from silotune.config.data import DataConfig
from silotune.config.merging import parse_tree
from silotune.config.parse import validated
from silotune.config.partition import PartitionConfig
from silotune.errors import InputError
from silotune.methods import METHODS

_RULES = ("merge", "ratio", "seed", "rows_per_silo", "train_rows", "validation_rows", "test_rows")
"""The keys of `data` by which a silo splits its own rows."""

_OWN = {"backbone", "start", "precision", "federation", "description"}
"""What parties say for themselves, or what is compared apart."""


def check_federated(config: Config) -> None:
    """Refuse what cannot be done without bringing silos' rows together.

    Raises:
        InputError: naming the key.
    """
    if config.method.name in METHODS and METHODS[config.method.name].centralized:
        raise InputError(f"method={config.method.name}: needs all silos' rows in one place; use --engine inprocess")
    if config.attack.name != "none":
        raise InputError("attack: simulated with --engine inprocess only; here silos are what they are")
    if config.cohort not in (1, "auto"):
        raise InputError(f"cohort={config.cohort}: every silo trains on its own machine; allowed: cohort=1 or auto")
    for key in ("test_time", "unseen", "new_silos"):
        if getattr(config.evaluation, key):
            raise InputError(f"evaluation.{key}: needs other silos' rows; use --engine inprocess")


def wire_config(config: Config, silos: Iterable[str]) -> str:
    """A resolved configuration as YAML for the silos.

    Args:
        config: with precision settled.
        silos: the names of all.
    """
    rules = {key: getattr(config.data, key) for key in _RULES}
    update: dict[str, Any] = {
        "backbone": Path(config.backbone).name,
        "start": None if config.start is None else Path(config.start).name,
        "threads": None,
        "privacy": config.privacy.model_copy(update={"secret": config.privacy.secret and "own"}),
        "silos": [],
        "data": DataConfig(**rules),
        "partition": PartitionConfig(),
        "federation": config.federation.model_copy(update={"silos": sorted(silos), "labelled": None}),
    }
    return dump(config.model_copy(update=update))


def parse_wire_config(text: str) -> Config:
    """A configuration that arrived.

    Raises:
        InputError: if it is none.
    """
    return validated(parse_tree(text, "of the coordinator"))


def check_agreed(found: Config, agreed: Config) -> None:
    """Refuse a configuration that is not the one agreed on.

    Raises:
        InputError: naming the first key that differs.
    """
    one, other = (parse_wire_config(wire_config(config, ["silo"])) for config in (found, agreed))
    here, there = (config.model_dump(mode="json", exclude=_OWN) for config in (one, other))
    for key in here:
        if here[key] != there[key]:
            raise InputError(f"configuration: {key} is {here[key]!r}, agreed on was {there[key]!r}")
