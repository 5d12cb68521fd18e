"""FedRep (Collins et al. 2021): each round the head is trained first, then the shared representation."""

from __future__ import annotations

from typing import cast

from pydantic import Field

from silotune.methods import HEAD, Phase, SupervisedOptions
from silotune.methods.fedper import FedPer


class FedRepOptions(SupervisedOptions):
    """The options of FedRep."""

    head_epochs: int = Field(
        1, ge=1, description="passes over the silo's rows for the head, before those for the body (`train.epochs`)"
    )


class FedRep(FedPer):
    """Algorithm 1: the personal head with the body fixed, then the body with the head fixed.

    Loss and prediction are those of every method with one head (`silotune.methods.supervised`).
    """

    name = "fedrep"
    paper = "Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning"
    Options = FedRepOptions

    def phases(self) -> list[Phase]:
        """Head, then body."""
        head_epochs = cast(FedRepOptions, self.options).head_epochs
        return [
            Phase("head", trains=(HEAD,), views={"full": self.mix}, loss=self.loss, epochs=head_epochs),
            Phase("body", trains=tuple(self.adapters), views={"full": self.mix}, loss=self.loss),
        ]
