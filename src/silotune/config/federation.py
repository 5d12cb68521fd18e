"""Section `federation`: silos, deadlines, retries and quorum of a run over machines; other engines ignore it."""

from __future__ import annotations

from pydantic import Field, field_validator

from silotune.config.section import Section
from silotune.config.validators import Name, distinct, listed


class FederationConfig(Section):
    """Who takes part in a run over several machines, and how long the coordinator waits.

    Attributes:
        silos: names of the silos, if their rows are on their own machines.
        labelled: folder of the coordinator's own labeled rows (see `docs/data.md`), for methods that train there.
        join: seconds until all silos must have joined.
        deadline: seconds that a silo has for one request.
        quorum: the fraction of a round's silos whose updates must arrive.
        retries: how often a round below its quorum is repeated.
        patience: seconds after which an unanswered request is sent again, doubled each time; a silo answers it once.
        away: seconds after which the coordinator stops waiting for a silo that is not connected.
    """

    silos: list[Name] = []
    labelled: str | None = Field(None, min_length=1)
    join: float = Field(600, gt=0)
    deadline: float = Field(3600, gt=0)
    quorum: float = Field(1.0, gt=0, le=1)
    retries: int = Field(2, ge=0)
    patience: float = Field(120, gt=0)
    away: float = Field(120, gt=0)

    _words = field_validator("silos", mode="before")(listed)

    @field_validator("silos")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        return distinct(names)
