"""The section `federation`: silos, deadlines and quorum of a run over machines; other engines ignore it."""

from __future__ import annotations

from pydantic import Field, field_validator

from silotune.config.section import Section
from silotune.config.validators import Name, distinct, listed


class FederationConfig(Section):
    """Who takes part, and how long the coordinator waits.

    `silos`: the silos by name, where their rows are not named here (they are on the silos' own disks). `labelled`: the
    coordinator's own labeled rows (a folder as in `docs/data.md`), where the method trains there. `join`:
    seconds until all of them must have joined. `deadline`: seconds a silo has for one request. `quorum`: the share of
    a round's silos whose updates must arrive. `retries`: how often a round below its quorum is asked again. `patience`:
    seconds after which an unanswered request is sent again (a silo answers it once), each further time twice as many;
    `away`: after which a silo that is not connected is not waited for.
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
