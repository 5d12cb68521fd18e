"""The section `policy` of `silo.yaml`: caps on what a silo answers, whatever a coordinator asks for.

The caps bound amounts: numbers that leave, rows and steps behind an update, time, memory, disk, requests and rounds.
They do not promise that an update tells nothing about single rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from silotune.config.section import Section
from silotune.errors import unknown_name_error


def _amount(given: object) -> object:
    """Accept a count of numbers, or a percentage of the backbone's parameters."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    if isinstance(given, str) and re.fullmatch(r"\d+(\.\d+)?%", given):
        return given
    raise ValueError(f"must be a whole number, or a share of the backbone such as 3% (got {given!r})")


Amount = Annotated[int | str | None, BeforeValidator(_amount)]
"""A count of numbers, a share of the backbone's parameters (`3%`), or None: no limit."""

Count = Annotated[int | None, Field(ge=0)]

_PARTNERS: dict[str, Any] = {
    "numbers_per_round": "3%",
    "numbers_in_all": "1000%",
    "train_rows": 50,
    "train_steps": 4,
    "seconds": 3600,
    "memory_mib": 16_384,
    "disk_mib": 65_536,
    "rounds": 200,
    "requests_per_round": 3,
    "requests_in_all": 5000,
    "frame_mib": 1024,
    "row_order": "secret",
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "partners": _PARTNERS,
    "hospital": {
        **_PARTNERS,
        "numbers_per_round": "1%",
        "numbers_in_all": "200%",
        "train_rows": 200,
        "train_steps": 8,
        "rounds": 100,
        "requests_per_round": 2,
        "requests_in_all": 1000,
    },
    "lab": {**dict.fromkeys(_PARTNERS), "train_rows": 0, "train_steps": 0, "frame_mib": 1024, "row_order": "seed"},
}
"""Preset → its values; `lab` is for rehearsals and for rows that anybody may read."""


class PolicyConfig(Section):
    """What a silo answers. Limits are numbers; `null` is no limit. Unset keys have the preset's values.

    Args:
        preset: `partners`, `hospital` (smaller caps, and the silo needs `secret` and `epsilon`) or `lab` (no caps);
            `policy: lab` is short for `policy: {preset: lab}`.
        numbers_per_round: most numbers in one update, as a number or as a share of the backbone (`3%`).
        numbers_in_all: most numbers in all updates of all runs.
        train_rows: fewest rows in the training split.
        train_steps: fewest optimizer steps behind an update.
        seconds: most seconds of one request.
        memory_mib: most memory of the worker's process, in MiB.
        disk_mib: most MiB of the files of all runs at the silo.
        rounds: most rounds of a run.
        requests_per_round: most different requests to train for one round, e.g. with other broadcasts.
        requests_in_all: most different requests of all runs, to train or to score.
        frame_mib: largest request that is read, in MiB.
        row_order: `secret`: order of rows and dropout are drawn from a secret of the silo's own; `seed`: they are those
            of the same run in one process, and the coordinator knows them.
    """

    preset: Literal["partners", "hospital", "lab"] = "partners"
    numbers_per_round: Amount
    numbers_in_all: Amount
    train_rows: Annotated[int, Field(ge=0)]
    train_steps: Annotated[int, Field(ge=0)]
    seconds: Annotated[float | None, Field(ge=0)]
    memory_mib: Count
    disk_mib: Count
    rounds: Count
    requests_per_round: Count
    requests_in_all: Count
    frame_mib: Annotated[int, Field(ge=1)]
    row_order: Literal["secret", "seed"]

    @classmethod
    def of(cls, preset: str = "partners") -> PolicyConfig:
        """Return a preset's policy."""
        return cls.model_validate(preset)

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """Fill in the preset's values."""
        given = {"preset": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "partners")
        if name not in PRESETS:
            raise ValueError(str(unknown_name_error("policy", name, PRESETS)))
        return {**PRESETS[name], **given, "preset": name}
