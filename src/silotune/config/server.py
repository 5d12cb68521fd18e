"""Section `server`: the server optimizer, and the labeled rows that the coordinator has of its own (FedFAME)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from silotune.config.section import Section


class ServerConfig(Section):
    """The server optimizer, and the coordinator's labeled rows.

    Attributes:
        optimizer: `none` adopts the mean; `nesterov` is DiLoCo's; the others are those of Hsu et al. 2019 and Reddi et
            al. 2021.
        lr: the server's learning rate.
        beta1: momentum.
        beta2: decay of the second moment.
        tau: added to the root of the second moment; larger is less adaptive (Reddi et al. 2021).
        labels_per_class: number of labeled rows per label that the coordinator has (FedFAME).
        labelled_rows: their total number, instead of `labels_per_class`; spread evenly over the labels.
    """

    chooser: ClassVar = "optimizer"
    owners: ClassVar = {
        "beta1": ("avgm", "nesterov", "adam", "yogi", "adagrad"),
        "beta2": ("adam", "yogi"),
        "tau": ("adam", "yogi", "adagrad"),
    }

    optimizer: Literal["none", "avgm", "nesterov", "adam", "yogi", "adagrad"] = "none"
    lr: float = Field(1.0, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)
    labels_per_class: int | None = Field(None, ge=1)
    labelled_rows: int | None = Field(None, ge=2)

    @model_validator(mode="after")
    def _one_number_of_labeled_rows(self) -> ServerConfig:
        if self.labels_per_class is not None and self.labelled_rows is not None:
            raise ValueError("labels_per_class and labelled_rows exclude each other; unset one (server.labelled_rows=)")
        return self
