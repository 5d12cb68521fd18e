"""Anchors: names that a mix may hold beside the parts' own. Each stands for a part without gradient."""

from __future__ import annotations

ANCHORS = ("received", "previous", "frozen")


def received(part: str) -> str:
    """The part as this round's message brought it."""
    return f"received:{part}"


def previous(part: str) -> str:
    """The silo's own part at the end of its last participation."""
    return f"previous:{part}"


def frozen(part: str) -> str:
    """The part as it is now, as a constant: the view sees it, its gradient stops there."""
    return f"frozen:{part}"


def parsed(name: str) -> tuple[str, str]:
    """A name in a mix as (anchor, part); the anchor is empty for a part itself."""
    anchor, _, part = name.rpartition(":")
    return anchor, part
