"""Section `audit`: canary rows, which measure how much a finished model reveals about its training rows."""

from __future__ import annotations

from pydantic import Field

from silotune.config.section import Section


class AuditConfig(Section):
    """Canaries in every silo, for `silotune release`."""

    canaries: int = Field(
        0,
        ge=0,
        le=100_000,
        description="rows of random words that every silo adds to its training rows, each present or empty by a fair "
        "coin; `silotune release` guesses the coins. A silo on its own machine adds at most its file's `canaries`.",
    )
