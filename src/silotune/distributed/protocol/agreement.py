"""The part of a configuration that silos receive, and which configurations a federation refuses.

`handshake.py` compares the sha256 of this configuration with other things that both sides must have alike;
`check_agreed` names the key that differs from the configuration that a silo's operator agreed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from silotune.config import BackboneConfig, Config, dump
from silotune.config.coordinator import FederationConfig
from silotune.config.data import DataConfig, PartitionConfig
from silotune.config.parse import validated
from silotune.config.trees import parse_tree
from silotune.errors import InputError
from silotune.methods import is_centralized

_SENT_KEYS = ("merge", "ratio", "seed", "rows_per_silo", "train_rows", "validation_rows", "test_rows", "allow_cut")
"""The keys of `data` that say how a silo splits its own rows, and whether they may be cut."""

_PER_PARTY = {"backbone", "start", "precision", "federation", "description"}
"""Keys that differ between parties, or that the handshake compares in another form."""


RUN_START = re.compile(r"run-([0-9a-f]{16})")
"""What silos receive as `start`, where the run goes on from a run of this federation: that one's id."""


def check_federated(config: Config) -> None:
    """Refuse configurations that need the rows of several silos in one place."""
    if is_centralized(config.method.name):
        raise InputError(f"method={config.method.name}: trains in one place, not in silos; use --engine inprocess")
    if not config.rounds:
        raise InputError("rounds=0: trains nothing, and needs no silos; use --engine inprocess")
    if config.attack.name != "none":
        raise InputError("attack: simulated with --engine inprocess only; here silos are what they are")
    if config.cohort not in (1, "auto"):
        raise InputError(f"cohort={config.cohort}: every silo trains on its own machine; allowed: cohort=1 or auto")
    if config.state.memory_mib is not None:
        raise InputError("state.memory_mib: of silos that one process simulates; use --engine inprocess")
    for key in ("test_time", "unseen", "new_silos"):
        if getattr(config.evaluation, key):
            raise InputError(f"evaluation.{key}: needs other silos' rows; use --engine inprocess")
    if config.evaluation.finish_per_round:
        raise InputError("evaluation.finish_per_round: sets silos back; use --engine inprocess")


def wire_config(config: Config, silos: Iterable[str]) -> str:
    """Write a resolved configuration as YAML for the silos.

    Args:
        config: the run's, with precision and quantization resolved.
        silos: names of all silos.

    Returns:
        YAML without local paths and without the secret's file name.
    """
    sent = {key: getattr(config.data, key) for key in _SENT_KEYS}
    update: dict[str, Any] = {
        "backbone": BackboneConfig(name=Path(config.backbone.name).name, quantization=config.backbone.quantization),
        "start": None if config.start is None else Path(config.start).name,
        "threads": None,
        "device": "auto",
        "privacy": config.privacy.model_copy(update={"secret": config.privacy.secret and "own"}),
        "silos": [],
        "data": DataConfig(**sent),
        "partition": PartitionConfig(),
        "federation": FederationConfig(silos=sorted(silos)),  # deadlines and quorum are the coordinator's own
    }
    return dump(config.model_copy(update=update))


def parse_wire_config(text: str) -> Config:
    """Parse a configuration that `wire_config` wrote."""
    return validated(parse_tree(text, "of the coordinator"))


def check_agreed(config: Config, agreed: Config) -> None:
    """Refuse a configuration that differs from the one agreed on."""
    values, agreed_values = (
        parse_wire_config(wire_config(side, ["silo"])).model_dump(mode="json", exclude=_PER_PARTY)
        for side in (config, agreed)
    )
    for key in values:
        if values[key] != agreed_values[key]:
            raise InputError(f"configuration: {key} is {values[key]!r}, agreed on was {agreed_values[key]!r}")
