"""Baselines without a federation: each silo alone, all rows in one place, the coordinator's labeled rows alone."""

from __future__ import annotations

from silotune.methods import PRIVATE, Scope, Supervised


class Local(Supervised):
    """No federation: adapters and head stay in the silo."""

    name = "local"
    paper = "baseline without communication"
    scope = Scope.PRIVATE
    head_scope = Scope.PRIVATE
    adapter_name = PRIVATE


class Centralized(Local):
    """One training silo holds all rows: one adapter, a head for each task, and scores for each silo."""

    name = "centralised"
    paper = "upper baseline: all data in one place"
    centralized = True


class ServerOnly(Centralized):
    """One adapter and a head, trained on the coordinator's labeled rows; every silo is scored with them.

    What FedFAME scores above it, the silos' unlabeled texts have brought.
    """

    name = "server-only"
    paper = "lower baseline of FedFAME: the coordinator's labeled rows alone, no silo trains"
    labeled_only = True
