"""`read_papers`: every table and figure of the papers with the commands that make it (`presets/papers.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from silotune.core.yaml_text import load_yaml


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Args:
        name: its number in the paper.
        shows: what it compares or measures.
        commands: what makes it, one after another.
    """

    name: str
    shows: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Paper:
    """A paper and its items, in the paper's order."""

    title: str
    items: tuple[Item, ...]


def read_papers() -> dict[str, Paper]:
    """Return the papers by the names of their folders of presets."""
    text = (resources.files("silotune") / "presets" / "papers.yaml").read_text(encoding="utf-8")
    return {
        name: Paper(
            entry["title"],
            tuple(Item(item, about["shows"], tuple(about["commands"])) for item, about in entry["items"].items()),
        )
        for name, entry in load_yaml(text).items()
    }
