"""Sections `uplink`, `privacy` and `audit`: the steps of a silo's change, the budget of its noise, its canaries."""

from __future__ import annotations

from math import inf
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from silotune.config import registries
from silotune.config.section import ExtensibleSection, Section, has_effect
from silotune.config.validators import ConfigPath, distinct, listed

NOISES = ("laplace", "gaussian")

NOTICEABLE = 1.05
"""A factor on the noise of a run; a budget's two filters ask up to 4.5 % more of a run that may use all of it."""

_DEFAULTS: dict[str, float] = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5}


class UplinkConfig(ExtensibleSection):
    """The steps that a silo applies to its change, in order (`uplink=clip,laplace,int8`).

    Without steps, the shared parts are sent unchanged.
    """

    registry: ClassVar = registries.CODECS
    owners: ClassVar = {
        "clip": ("clip",),
        "norm": ("clip",),
        "epsilon": NOISES,
        "scale": NOISES,
        "delta": ("gaussian",),
        "rounding": ("int8", "int4"),
        "feedback": registries.CODECS,
    }
    common: ClassVar = tuple(owners)
    doubles: ClassVar = ("delta",)

    name: list[str] = Field(default=[], description="the steps.")
    clip: float | None = Field(
        default=None, gt=0, description="largest norm of the change, which is scaled down to it; 1 if unset."
    )
    norm: Literal["l1", "l2"] | None = Field(
        default=None, description="the kind of norm; if unset, l1 before Laplace noise, else l2."
    )
    epsilon: float | None = Field(default=None, gt=0, description="ε of one round; 8 if unset.")
    delta: float | None = Field(
        default=None, gt=0, lt=1, description="δ of one round of Gaussian noise; 1e-5 if unset."
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        description="scale of Laplace noise, or standard deviation of Gaussian noise, on a change without `clip`. It "
        "promises nothing: there is no ε.",
    )
    rounding: Literal["nearest", "stochastic"] | None = Field(
        default=None, description="rounding of int8 and int4: to the nearest code, or stochastic and unbiased."
    )
    feedback: bool | None = Field(
        default=None,
        description="add the codec's error to the silo's next change; true if unset, false for an unbiased codec.",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        """Read a list, or words separated by commas; nothing and `none` mean no steps."""
        nothing = value is None or value == "none" or (isinstance(value, str) and not value.strip())
        return [] if nothing else listed(value)

    @field_validator("name")
    @classmethod
    def _in_order(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ("clip", *NOISES) and name not in registries.CODECS:
                allowed = ("clip", *NOISES, *registries.CODECS.names)
                raise ValueError(f"unknown step {name!r}; allowed: {', '.join(allowed)}")
        distinct(names)
        stages = [0 if name == "clip" else 1 if name in NOISES else 2 for name in names]
        if stages != sorted(set(stages)):
            codecs = ", ".join(registries.CODECS.names)
            raise ValueError(
                f"the order is clip, then laplace or gaussian, then one of {codecs} (got {','.join(names)})"
            )
        return names

    @model_validator(mode="after")
    def _fitting(self) -> UplinkConfig:
        self._check_scale()
        for key, default in _DEFAULTS.items():
            if getattr(self, key) is None and self.bare_noise is None and has_effect(UplinkConfig, key, self.name):
                setattr(self, key, default)
        if "clip" in self.name:
            fitting = {"laplace": "l1", "gaussian": "l2"}.get(self.noise or "")
            if fitting is not None and self.norm not in (None, fitting):
                raise ValueError(f"norm: {self.noise} noise is scaled to the {fitting} norm; allowed: {fitting}")
            self.norm = self.norm or ("l1" if fitting == "l1" else "l2")
        if self.codec is not None:
            unbiased = bool(self.options.get("unbiased"))
            if unbiased and self.feedback:
                raise ValueError("feedback: what an unbiased codec leaves out grows if it is kept; allowed: false")
            self.feedback = self.feedback is not False and not unbiased
            if self.codec in ("int8", "int4"):
                self.rounding = self.rounding or "nearest"
        return self

    def _check_scale(self) -> None:
        steps, keys = ",".join(self.name), [key for key in ("epsilon", "delta") if getattr(self, key) is not None]
        if self.scale is not None and self.noise is not None:
            raise ValueError(f"scale: that of {steps} follows from clip and epsilon; leave it out, or leave out clip")
        if self.bare_noise is not None and self.scale is None:
            raise ValueError(
                f"without clip before it, noise promises nothing (got {steps}); add clip, or give scale without an ε"
            )
        if self.bare_noise is not None and keys:
            raise ValueError(f"{keys[0]}: without clip, noise promises nothing (got {steps}); add clip")

    @property
    def noise(self) -> str | None:
        """The step that adds noise to a clipped change, which bounds what it tells; None if there is none."""
        return next((name for name in self.name if name in NOISES and "clip" in self.name), None)

    @property
    def bare_noise(self) -> str | None:
        """The step that adds noise to a change without bound, which promises nothing; None if there is none."""
        return next((name for name in self.name if name in NOISES and "clip" not in self.name), None)

    @property
    def codec(self) -> str | None:
        """The codec: the last step, if it is neither clipping nor noise."""
        return next((name for name in self.name if name != "clip" and name not in NOISES), None)

    @property
    @override
    def chosen(self) -> str | None:
        return self.codec


class PrivacyConfig(Section):
    """Noise on rows in every silo (`unit`), and the budget and source of all noise."""

    doubles: ClassVar = ("delta",)

    unit: str | None = Field(
        default=None,
        min_length=1,
        description="whom noise protects from the coordinator and the other silos: each `row`, or each value of the "
        "column of this name, such as `patient`. If unset, rows have no noise.",
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="ε of the whole run. With `unit` the noise is chosen for it; else the run stops before exceeding "
        "it.",
    )
    delta: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="δ of the whole run; if unset 1e-5, with `unit` at most 0.1 / units of the largest silo.",
    )
    more_noise: bool = Field(
        default=False,
        description="with `unit`, let a silo whose budget is nearly spent add more noise than the run asks for; "
        "without, it refuses the run.",
    )
    clip: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="with `unit`, the largest L2 norm of a unit's gradient in a step."
    )
    rows_per_unit: int = Field(
        default=4,
        ge=1,
        description="with a column as `unit`, the most rows of a unit in a step; its gradient is their mean.",
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="with `unit`, the probability with which a step draws a unit, one for all silos; unset: "
        "`train.batch_size` divided by a silo's units.",
    )
    units: int | None = Field(default=None, ge=2, description="the units that a silo has, about, for `plan`.")
    plan: Literal["auto"] | None = Field(
        default=None,
        description="`auto`: `rate` is the least one whose noise is near that of larger ones (`silotune privacy`).",
    )
    secret: ConfigPath | None = Field(
        default=None,
        min_length=1,
        description="a file of at least 16 random bytes from which noise is derived. Without it noise is derived from "
        "the seed, which everyone who knows the configuration can repeat.",
    )

    parts: Literal["leaving", "all"] = Field(
        default="leaving",
        description="with `unit`, what has noise: `leaving`, every part on which what a silo sends depends; or `all`, "
        "also the silo's own parts and final phases, so that ε covers the silo's model, too.",
    )
    shares: bool = Field(
        default=False,
        description="with `unit` under `aggregation.secure`, every silo adds only its share of the noise, so that the "
        "sum of the silos has that of one mechanism (`docs/shares.md`).",
    )

    @model_validator(mode="after")
    def _target(self) -> PrivacyConfig:
        if self.unit is not None and self.epsilon is None:
            raise ValueError(
                "epsilon: noise on rows (privacy.unit) needs what the run may cost; e.g. privacy.epsilon=8"
            )
        if self.unit is None and (self.rate is not None or self.plan is not None):
            raise ValueError("rate and plan are about noise on rows; give privacy.unit, e.g. privacy.unit=row")
        if self.plan is not None and self.units is None:
            raise ValueError("plan: auto follows from the units of a silo; give privacy.units, e.g. privacy.units=1000")
        return self

    @property
    def most_noise(self) -> float:
        """The largest factor on a run's noise that it accepts of a silo's budget; a shared noise is one for all."""
        return 1.0 if self.shares else inf if self.more_noise else NOTICEABLE

    @property
    def unit_column(self) -> str | None:
        """The column whose values are the units; None where every row is one, or nothing has noise."""
        return None if self.unit in (None, "row") else self.unit


class AuditConfig(Section):
    """Canaries in every silo, for `silotune release`."""

    canaries: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="rows of random words that every silo adds to its training rows, each present or empty by a fair "
        "coin; `silotune release` guesses the coins. A silo on its own machine adds at most its file's `canaries`.",
    )
