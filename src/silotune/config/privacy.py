"""The section `privacy`: a run's budget of ε at δ, and the secret file that its noise is derived from."""

from __future__ import annotations

from pydantic import Field

from silotune.config.section import Section


class PrivacyConfig(Section):
    """`epsilon`: the budget in total, by which a run stops; `delta`: of the total.

    `secret`: a file of at least 16 random bytes that noise is drawn from; without it, from the seed, which whoever
    knows the configuration can do as well.
    """

    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    secret: str | None = Field(None, min_length=1)
