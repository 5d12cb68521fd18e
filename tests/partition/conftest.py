"""The command line."""

from __future__ import annotations

from commandline import command

__all__ = ["command"]
