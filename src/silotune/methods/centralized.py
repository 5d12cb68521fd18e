"""Centralised training: all rows in one place, the bound that federation is measured against."""

from __future__ import annotations

from silotune.methods.local import Local


class Centralized(Local):
    """One training silo holds every silo's rows; one adapter for all, heads per task; evaluated per silo."""

    name = "centralised"
    paper = "upper baseline: all data in one place"
    centralized = True
