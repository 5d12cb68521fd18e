"""The command line over a small sound federation."""

from __future__ import annotations

from commandline import command, place

__all__ = ["command", "place"]
