"""FedPer (Arivazhagan et al. 2019): a shared body under a personal head, trained together."""

from __future__ import annotations

from silotune.methods import Part, private
from silotune.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """FedAvg whose head never leaves the silo, whatever the setting's head scope."""

    name = "fedper"
    paper = "Arivazhagan et al. 2019, Federated Learning with Personalization Layers"

    def head(self) -> Part:
        """The personal layer."""
        return private(self.setting.head)
