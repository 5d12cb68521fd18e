"""FedProx (Li et al. 2020): FedAvg with a proximal term that holds local training near the received parts."""

from __future__ import annotations

from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from silotune.methods import Step, SupervisedOptions, mean_over_rows, proximal
from silotune.methods.fedavg import FedAvg


class FedProxOptions(SupervisedOptions):
    """The options of FedProx."""

    mu: float = Field(default=0.01, ge=0, description="the weight of the proximal term")


class FedProx(FedAvg):
    """Loss: `CE + (mu / 2)·‖w − w_received‖²` over the shared adapters (Li et al. 2020, eq. 2)."""

    name = "fedprox"
    paper = "Li et al. 2020, Federated Optimization in Heterogeneous Networks"
    Options = FedProxOptions

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy plus the proximal term."""
        flat = [proximal(step.state[part], step.received[part]) for part in self.adapters]
        distance = torch.stack(flat or [torch.zeros(())]).sum()
        cross_entropy = step.cross_entropy("full")
        step.log(cross_entropy=cross_entropy, distance=distance)
        return cross_entropy + step.without_rows(cast(FedProxOptions, self.options).mu / 2 * distance)
