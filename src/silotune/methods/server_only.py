"""The coordinator's labeled rows alone: without silos; semi-supervised federations are compared with it."""

from __future__ import annotations

from silotune.methods.centralized import Centralized


class ServerOnly(Centralized):
    """One adapter and a head, trained on the coordinator's labeled rows; every silo is scored with them.

    What FedFAME scores above it, the silos' unlabeled texts have brought.
    """

    name = "server-only"
    paper = "lower baseline of FedFAME: the coordinator's labeled rows alone, no silo trains"
    labeled_only = True
