"""Sections `aggregation`, `server` and `federation`: how updates are combined, and how long to wait for silos."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.registries import AGGREGATIONS
from silotune.config.section import ExtensibleSection, Section, one_of
from silotune.config.validators import ConfigPath, Names

SUMS = ("samples", "uniform")
"""Aggregations that a sum of the silos' updates is enough for."""


class AggregationConfig(ExtensibleSection):
    """How updates are combined."""

    registry: ClassVar = AGGREGATIONS
    common: ClassVar = ("outlier", "max_norm", "clip", "secure", "least", "colluders")
    owners: ClassVar = {
        "trim": ("trimmed-mean",),
        "byzantine": ("krum", "multi-krum"),
        "keep": ("multi-krum",),
        "regularization": ("lora-fair",),
    }

    name: str = Field(default="samples", description="the aggregation.")
    outlier: float | None = Field(
        default=100.0,
        gt=1,
        description="hold back updates with a change longer than this many times the round's median, if there are at "
        "least 3; `null`: never.",
    )
    max_norm: float | None = Field(default=None, gt=0, description="refuse updates with a change of larger L2 norm.")
    clip: float | None = Field(default=None, gt=0, description="scale the change of an update down to this L2 norm.")
    trim: float = Field(
        default=0.1,
        gt=0,
        lt=0.5,
        description="fraction of updates that a trimmed mean removes at each end, rounded up.",
    )
    byzantine: int | None = Field(
        default=None,
        ge=0,
        description="f, malicious silos in a round that Krum assumes; unset, the most that it tolerates.",
    )
    keep: int | None = Field(
        default=None, ge=1, description="updates that Multi-Krum averages; unset, all but `byzantine`."
    )
    regularization: float = Field(
        default=0.01,
        ge=0,
        description="LoRA-FAIR's λ, which keeps the corrected B near the mean of B; 0: the best correction.",
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="standard deviation of Gaussian noise on the mean, in units of `clip` divided by the number of "
        "silos in a round (central differential privacy).",
    )

    _name = field_validator("name", mode="before")(one_of(AGGREGATIONS))

    secure: bool = Field(
        default=False,
        description="sum the silos' updates under masks, so that the coordinator sees no single one "
        "(`docs/masks.md`; experimental).",
    )
    least: int | None = Field(
        default=None,
        ge=3,
        description="with `secure` in a simulation, the fewest silos of a sum; unset, more than two thirds of them. "
        "Over machines the silos' `masked.least` counts.",
    )
    colluders: int = Field(
        default=1,
        ge=0,
        description="with `privacy.shares` in a simulation, how many silos may spy, help the coordinator or add no "
        "noise. Over machines the silos' `masked.colluders` counts.",
    )

    @model_validator(mode="after")
    def _sums_alone(self) -> AggregationConfig:
        """Refuse what needs single updates; the default of `outlier` is switched off."""
        if not self.secure:
            if self.least is not None or self.colluders != 1:
                raise ValueError("least and colluders are about sums under masks; give aggregation.secure=true")
            return self
        if self.name not in SUMS:
            raise ValueError(
                f"secure: {self.name} is no sum of the silos' updates; allowed: aggregation={', '.join(SUMS)}"
            )
        self.outlier = self.outlier if "outlier" in self.model_fields_set else None
        for key in ("outlier", "max_norm", "clip", "noise_multiplier"):
            if getattr(self, key) is not None:
                raise ValueError(f"secure: {key} looks at single updates, and the coordinator sees none; leave it out")
        return self

    @model_validator(mode="after")
    def _fitting(self) -> AggregationConfig:
        if self.noise_multiplier is not None:
            if self.name != "uniform":
                raise ValueError(
                    f"noise_multiplier: noise is scaled to equal weights; needs aggregation=uniform, not {self.name}"
                )
            if self.clip is None:
                raise ValueError("noise_multiplier: the noise is in units of the clipping norm; give aggregation.clip")
        return self


class ServerConfig(Section):
    """The server optimizer, and the coordinator's labeled rows."""

    chooser: ClassVar = "optimizer"
    owners: ClassVar = {
        "beta1": ("avgm", "nesterov", "adam", "yogi", "adagrad"),
        "beta2": ("adam", "yogi"),
        "tau": ("adam", "yogi", "adagrad"),
    }

    optimizer: Literal["none", "avgm", "nesterov", "adam", "yogi", "adagrad"] = Field(
        default="none",
        description="`none` adopts the aggregate; `nesterov` is DiLoCo's; the others are from Hsu et al. 2019 and Reddi"
        " et al. 2021.",
    )
    lr: float = Field(default=1.0, gt=0, description="the server's learning rate.")
    average: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="the shared parts become their mean over this share of the rounds, the last ones, when the rounds "
        "of heads (`method.head_rounds`) and the run end; unset: they stay those of the last round.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="momentum.")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment.")
    tau: float = Field(
        default=1e-3,
        gt=0,
        description="τ, added to the root of the second moment; larger is less adaptive (Reddi et al. 2021).",
    )
    labels_per_class: int | None = Field(
        default=None, ge=1, description="labeled rows per label at the coordinator (FedFAME)."
    )
    labelled_rows: int | None = Field(
        default=None,
        ge=2,
        description="labeled rows in total, spread evenly over labels; instead of `labels_per_class`.",
    )

    @model_validator(mode="after")
    def _one_number_of_labeled_rows(self) -> ServerConfig:
        if self.labels_per_class is not None and self.labelled_rows is not None:
            raise ValueError("labels_per_class and labelled_rows exclude each other; unset one (server.labelled_rows=)")
        return self


class FederationConfig(Section):
    """Who takes part in a run over several machines, and how long the coordinator waits."""

    silos: Names = Field(default=[], description="names of the silos, if their rows are on their own machines.")
    labelled: ConfigPath | None = Field(
        default=None,
        min_length=1,
        description="folder of the coordinator's own labeled rows (see `docs/data.md`), for methods that train there.",
    )
    join: float = Field(
        default=600, gt=0, description="seconds until all silos must have joined; approvals take longer."
    )
    deadline: float = Field(default=3600, gt=0, description="seconds that a silo has for one request.")
    quorum: float = Field(default=1.0, gt=0, le=1, description="fraction of a round's silos whose updates must arrive.")
    retries: int = Field(default=2, ge=0, description="repetitions of a round below its quorum.")
    patience: float = Field(
        default=120,
        gt=0,
        description="seconds after which an unanswered request is sent again, doubled each time; a silo answers it "
        "once.",
    )
    away: float = Field(
        default=120,
        gt=0,
        description="seconds after which the coordinator stops waiting for a silo that is not connected.",
    )
