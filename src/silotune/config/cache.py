"""The section `cache`: what is kept between steps instead of being computed again."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from silotune.config.section import Section


class CacheConfig(Section):
    """`frozen-prefix`: what the frozen layers below the lowest adapter make of a row is kept across epochs and rounds.

    `mib`: the memory it may take, in MiB; the least recently used rows go first.
    """

    owners: ClassVar = {"mib": ("frozen-prefix",)}

    name: Literal["none", "frozen-prefix"] = "none"
    mib: int = Field(512, ge=1, le=2**22)
