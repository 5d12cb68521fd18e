"""The section `evaluation`: test-time personalization, and tasks and silos that are left out of training."""

from __future__ import annotations

from pydantic import field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import listed


class EvaluationConfig(Section):
    """Test-time personalization (FedDPA, section 3.1), and tasks and silos that training does not see.

    `test_time`: every silo's model on the test rows of every task, as many scores as silos times tasks. `per_round`:
    these, and those on own rows, after every round too (Figure 3). `unseen`: tasks (or own silos) that are left out of
    training, on which all models are judged (Table 14). `new_silos`: such that join after the last round, from the most
    similar silo's local part (appendix C.1).
    """

    test_time: bool = False
    per_round: bool = False
    unseen: list[str] = []
    new_silos: list[str] = []

    _words = field_validator("unseen", "new_silos", mode="before")(listed)

    @model_validator(mode="after")
    def _once(self) -> EvaluationConfig:
        names = self.absent
        for position, name in enumerate(names):
            if name in names[:position]:
                raise ValueError(f"{name!r} appears twice in unseen and new_silos")
        if self.per_round and not self.test_time:
            raise ValueError("per_round is about test_time; give evaluation.test_time=true too")
        return self

    @property
    def absent(self) -> list[str]:
        """What no silo trains on in the rounds."""
        return [*self.unseen, *self.new_silos]
