"""Centralized training: one model is trained on the rows of all silos; federated methods are compared with it."""

from __future__ import annotations

from silotune.methods.local import Local


class Centralized(Local):
    """One training silo holds all rows: one adapter, a head for each task, and scores for each silo."""

    name = "centralised"
    paper = "upper baseline: all data in one place"
    centralized = True
