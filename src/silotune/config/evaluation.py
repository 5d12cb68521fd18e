"""Sections `evaluation` and `compare`: how models are scored, and the entries of a comparison."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from silotune.config.section import Section
from silotune.config.validators import ConfigPath, KeyGroup, RowsAtOnce, Words, distinct, listed


class EvaluationConfig(Section):
    """How models are judged: validation, test-time personalization (FedDPA, section 3.1), and silos left out."""

    validation: Literal["metric", "loss"] | None = Field(
        None,
        description="the validation score, which chooses the best round: `metric`, or `loss` (generates no answers). "
        "Unset: `loss` for generation, else `metric`.",
    )
    test_time: bool = Field(False, description="score every silo's model on the test rows of every task.")
    per_round: bool = Field(
        False,
        description="compute test scores, and those of `test_time`, after every round (FedDPA, Figure 3).",
    )
    finish_per_round: bool = Field(
        False,
        description="score methods with phases after the last round (FedLoRA, FedDPA-F) after every round: the phases "
        "run, and the silos are then restored.",
    )
    unseen: Words = Field(
        [],
        description="tasks (or entries of `silos`) without training; all models are scored on them (FedDPA, Table 14).",
    )
    new_silos: Words = Field(
        [],
        description="silos that join after the last round, with the private part of the most similar silo (appendix "
        "C.1).",
    )
    rows_at_once: RowsAtOnce = Field(64, description="rows per batch when rows are classified or embedded.")
    bootstrap: int = Field(
        1000,
        ge=0,
        le=100_000,
        description="bootstrap resamples of the test rows for 95 % intervals; 0: no intervals.",
    )
    baselines: bool = Field(
        True,
        description="also score the most frequent label and a bag of words, learned from each silo's training rows, "
        "and for language models the untouched backbone.",
    )
    shots: int = Field(0, ge=0, le=100, description="also score the untouched backbone after this many training rows.")
    predictions: bool = Field(True, description="write `predictions.parquet`, the prediction for every test row.")

    @model_validator(mode="after")
    def _check_names_and_per_round(self) -> EvaluationConfig:
        names = self.absent
        for position, name in enumerate(names):
            if name in names[:position]:
                raise ValueError(f"{name!r} appears twice in unseen and new_silos")
        if self.per_round and not self.test_time:
            raise ValueError("per_round is about test_time; give evaluation.test_time=true too")
        return self

    @property
    def absent(self) -> list[str]:
        """The tasks and silos that are left out of the rounds."""
        return [*self.unseen, *self.new_silos]


def _listed_seeds(given: object) -> object:
    """Return one seed or text as a list; pydantic alone would take `true` for 1."""
    seeds = [given] if type(given) is int else listed(given)
    if isinstance(seeds, list) and any(isinstance(seed, bool) for seed in seeds):
        raise ValueError(f"must be whole numbers with commas between (got {given!r})")
    return seeds


Seeds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]],
    BeforeValidator(_listed_seeds),
    AfterValidator(distinct),
]
"""Different seeds: one, a list, or text with commas between."""


class StdConfig(Section):
    """The standard deviation over n seeds: its divisor is n − `ddof`."""

    ddof: Literal[0, 1] = 1


class CompareConfig(Section):
    """Entries and seeds of a comparison.

    Keys for one method alone are in the top-level `per_method`, which `silotune run` reads, too.
    """

    methods: Words = Field([], description="the methods; if empty, the configuration's own method.")
    seeds: Seeds = Field([], description="the seeds; if empty, the configuration's own seed.")
    ablation: bool = Field(False, description="add the ablations of each method's paper.")
    variants: dict[str, KeyGroup] = Field(
        {},
        description="variant → keys that it changes; every method gets an entry per variant. The key `preset` replaces "
        "the preset of the source.",
    )
    grid: dict[str, dict[str, KeyGroup]] = Field(
        {},
        description="groups of variants; every method gets an entry for each combination of one variant per group, and "
        "none without.",
    )
    best: Annotated[list[ConfigPath], BeforeValidator(listed), AfterValidator(distinct)] = Field(
        [], description="folders of `silotune sweep`, for each method's best values."
    )
    std: StdConfig = Field(StdConfig(), description="the standard deviation over seeds.")
