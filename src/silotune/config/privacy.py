"""Section `privacy`: a run's budget of ε at δ, and the secret file from which its noise is derived."""

from __future__ import annotations

from pydantic import Field

from silotune.config.section import Section


class PrivacyConfig(Section):
    """The privacy budget, and the source of noise.

    Attributes:
        epsilon: the budget of the whole run; the run stops before exceeding it.
        delta: δ of the whole run.
        secret: a file of at least 16 random bytes from which noise is derived. Without it noise is derived from the
            seed, which everyone who knows the configuration can repeat.
    """

    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    secret: str | None = Field(None, min_length=1)
