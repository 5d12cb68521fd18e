"""`centralised`: one silo trains on all silos' rows, to compare federated methods with."""

from __future__ import annotations

from silotune.methods.local import Local


class Centralized(Local):
    """One training silo holds all rows: one adapter, a head for each task, and scores for each silo."""

    name = "centralised"
    paper = "upper baseline: all data in one place"
    centralized = True
