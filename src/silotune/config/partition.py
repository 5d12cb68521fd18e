"""Section `partition`: how one labeled data set is divided among silos: iid, Dirichlet, shards, by column, …."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from silotune.config.section import Section


class PartitionConfig(Section):
    """How one labeled data set is divided among silos.

    Attributes:
        name: the partitioner. `dirichlet` skews labels, `quantity` skews sizes, `shards` deals pieces of one or two
            labels, `column` makes one silo per value of a column; `none` divides nothing.
        silos: the number of silos.
        alpha: the concentration of `dirichlet` and `quantity`.
        seed: seed of the division; unset, the seed of the data.
        min_rows: the least number of rows of a silo.
        balanced: whether `dirichlet` gives all silos equally many rows.
        shards: the number of shards that each silo gets.
        column: the column of `column`.
    """

    common: ClassVar = ("silos", "alpha", "seed", "min_rows")
    owners: ClassVar = {
        "silos": ("iid", "dirichlet", "quantity", "shards"),
        "alpha": ("dirichlet", "quantity"),
        "balanced": ("dirichlet",),
        "shards": ("shards",),
        "column": ("column",),
    }

    name: Literal["none", "iid", "dirichlet", "quantity", "shards", "column"] = "none"
    silos: int = Field(10, ge=1, le=100_000)
    alpha: float = Field(1.0, gt=0, le=1e6)
    seed: int | None = Field(None, ge=0)
    min_rows: int = Field(1, ge=1)
    balanced: bool = False
    shards: int = Field(2, ge=1, le=1000)
    column: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _fitting(self) -> PartitionConfig:
        if self.name == "column" and self.column is None:
            raise ValueError("which column makes the silos? give partition.column=NAME")
        return self
