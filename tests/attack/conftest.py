"""The command line, and a small federation of own files."""

from commandline import command, place

__all__ = ["command", "place"]
