"""Puts a run together: configuration → backbone, method, silos, coordinator. Nothing here trains."""

from __future__ import annotations
