"""The page docs/configuration.md: every key with type, default and meaning, made of the schema and its docstrings.

In the root of the repository, `python -m scripts.configuration_page` writes it anew.
tests/docs/test_pages.py compares it with the schema.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import silotune.methods
import silotune.models.tuners  # noqa: F401 (both fill the registries)
from silotune.config.reference import Key, keys_of, sections

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

Every key of a run, with its type, its default and its meaning. Keys are given as words (`train.lr=1e-3`), in a YAML
file, or by a preset (`silotune presets`); later ones win. `section=value` sets the key `name` of a section
(`head=linear`); the other keys of that section are then given beside it (`head=linear head.scope=shared`). A run's
`config.yaml` holds all keys as they were resolved. Unknown keys, and keys without effect under the given choices, are
refused. `silotune config KEY` says the same on the command line, and editors complete and check a file with a line
`# yaml-language-server: $schema=FILE` at its top; `silotune config --json-schema > FILE` writes the schema into one.
Methods and presets change some of these defaults: `fedprompt`, for example, has `tuner=prompt` and `head=verbalizer`.
Plug-ins have keys of their own; see [CONTRIBUTING.md](../CONTRIBUTING.md).

This page is written by `python -m scripts.configuration_page`.
"""


def table(keys: list[Key], owners: bool = False) -> list[str]:
    """A table with one row per key; with `owners`, a last column names the methods or tuners that have it."""
    head = ["key", "type", "default", "meaning", *(["of"] if owners else [])]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key in keys:
        cells = [f"`{key.name}`", key.type, key.default, key.meaning]
        cells += [", ".join(owner.partition("=")[2] for owner in key.owners)] if owners else []
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def page() -> str:
    """The page's text."""
    lines = [INTRODUCTION, "## Keys without a section\n", *table(keys_of(""))]
    for section in ("method", "tuner"):
        lines += [f"\n## `{section}`\n", *table(keys_of(section)[1:], owners=True)]
    for section, summary in sections().items():
        if section not in ("", "method", "tuner"):
            keys = [replace(key, name=key.name.removeprefix("silos.NAME.")) for key in keys_of(section)]
            lines += [f"\n## `{section}`\n", f"{summary}\n", *table(keys)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
