"""`changed_settings`: the keys of a run that are off their defaults, in groups, with what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from silotune.config import Config
from silotune.config.meanings import attributes, option_meanings
from silotune.config.trees import flat
from silotune.distributed.silo.policy_keys import changed_keys, default_keys
from silotune.methods import METHODS
from silotune.models.tuners import TUNERS

_GROUPS = {
    "method, tuner and head": ("method", "tuner", "head"),
    "settings of training": ("train", "rounds", "seed"),
    "rows": ("data", "partition", "silos"),
    "what is done to an update before it leaves": ("uplink", "privacy"),
    "who takes part, and how updates are combined": ("sampling", "aggregation", "server", "attack"),
    "scores": ("evaluation",),
}
"""Group → sections and plain keys; all others are `_OTHERS`."""

_OTHERS = "backbone, computing and names"

LONGEST = 100
"""Characters of a value, and of a meaning."""


def changed_settings(config: Config) -> list[str]:
    """Return lines about a run's keys that are off their defaults.

    Args:
        config: the run's, as it was sent.
    """
    groups: dict[str, list[str]] = {}
    defaults = dict(_defaults(config))
    for key, value in changed_keys(config).items():
        section, _, name = key.partition(".")
        if key in defaults and defaults[key] == value:
            continue
        group = next((group for group, sections in _GROUPS.items() if section in sections), _OTHERS)
        default = f" (default {_text(defaults[key])})" if key in defaults else ""
        meaning = _meaning(config, section, name)
        groups.setdefault(group, []).append(f"  {key} = {_text(value)}{default}{f': {meaning}' if meaning else ''}")
    lines = [line for group in (*_GROUPS, _OTHERS) if group in groups for line in (f"{group}:", *groups[group])]
    return ["settings off their defaults:" if lines else "settings off their defaults: none", *lines]


def _defaults(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the schema's defaults, and those of the options of the chosen method and tuner."""
    for key, value in default_keys(config).items():
        if not key.startswith(("method.", "tuner.")) or key.endswith(".name"):
            yield key, value
    for section, options in _options(config).items():
        try:
            values = options().model_dump(mode="json")
        except ValidationError:  # an option has no default
            continue
        for key, value in flat(values):
            yield f"{section}.{key}", value


def _options(config: Config) -> Mapping[str, type[BaseModel]]:
    """Return the classes of the options of the chosen method and tuner."""
    return {"method": METHODS[config.method.name].Options, "tuner": TUNERS[config.tuner.name].Options}


def _meaning(config: Config, section: str, name: str) -> str:
    """Return what a key means, up to the end of its first clause; empty where nothing says so."""
    if section in ("method", "tuner") and name != "name":
        meaning = option_meanings(_options(config)[section]).get(name.split(".")[0], "")
    elif name:
        meaning = attributes(type(getattr(config, section))).get(name.split(".")[0], "")
    else:
        meaning = attributes(Config).get(section, "")
    clause = re.split(r"(?<=\w)[.;](?: |$)", meaning)[0]
    return clause if len(clause) <= LONGEST else f"{clause[:LONGEST]}…"


def _text(value: object) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"
