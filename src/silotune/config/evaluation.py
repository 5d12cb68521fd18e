"""Section `evaluation`: validation by metric or loss, scores on all tasks, tasks and silos left out of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import RowsAtOnce, listed


class EvaluationConfig(Section):
    """What validation is judged by, test-time personalization (FedDPA, section 3.1), and what training does not see.

    Attributes:
        validation: what validation rows are judged by, and so the best round: `metric`, or `loss` (mean loss, lower is
            better, writes no answers). Unset: `loss` for generation tasks, else `metric`.
        test_time: whether every silo's model is scored on the test rows of every task.
        per_round: whether these scores, and those on the silos' own rows, are measured after every round (FedDPA,
            Figure 3).
        finish_per_round: whether methods that finish after the last round (FedLoRA, FedDPA-F) are judged after every
            round, too: their last phases run as if the round was the last, and all silos are set back.
        unseen: tasks (or entries of `silos`) that no silo trains on; all models are scored on them (FedDPA, Table
            14).
        new_silos: silos that join after the last round, with the private part of the most similar silo (appendix C.1).
        rows_at_once: rows of one batch without gradient, where rows are classified or embedded.
        bootstrap: resamples of the test rows from which 95 % intervals of scores come; 0 makes none.
        baselines: whether a silo's scores are put beside those of the most frequent label and of a bag of words, both
            learned from its training rows.
        predictions: whether the run folder gets `predictions.parquet`, the prediction for every test row.
    """

    validation: Literal["metric", "loss"] | None = None
    test_time: bool = False
    per_round: bool = False
    finish_per_round: bool = False
    unseen: list[str] = []
    new_silos: list[str] = []
    rows_at_once: RowsAtOnce = 64
    bootstrap: int = Field(1000, ge=0, le=100_000)
    baselines: bool = True
    predictions: bool = True

    _words = field_validator("unseen", "new_silos", mode="before")(listed)

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
