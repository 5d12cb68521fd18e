"""The page docs/configuration.md: every key with type, default and meaning, made of the schema and its docstrings.

In the root of the repository, `python -m tests.support.configuration_page` writes it anew.
tests/docs/test_configuration_page.py compares it with the schema.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from silotune.config.extensible import ExtensibleSection
from silotune.config.meanings import attributes, option_meanings
from silotune.config.schema import Config
from silotune.config.section import Choice, Section
from silotune.methods import METHODS
from silotune.models.tuners import TUNERS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

Every key of a run, with its type, its default and its meaning. Keys are given as words (`train.lr=1e-3`), in a YAML
file, or by a preset (`silotune presets`); later ones win. `section=value` sets the key `name` of a section
(`head=linear`); the other keys of that section are then given beside it (`head=linear head.scope=shared`). A run's
`config.yaml` holds all keys as they were resolved. Unknown keys, and keys without effect under the given choices, are
refused. Methods and presets change some of these defaults: `fedprompt`, for example, has `tuner=prompt` and
`head=verbalizer`. Plug-ins have keys of their own; see [CONTRIBUTING.md](../CONTRIBUTING.md).

This page is written by `python -m tests.support.configuration_page`.
"""

_NAMES = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", dict: "mapping", NoneType: "none"}


def type_text(annotation: Any) -> str:
    """A type as readers of the page know it."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return type_text(arguments[0])
    if kind is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if kind in (Union, UnionType):
        return " or ".join(type_text(one) for one in arguments if one is not NoneType)
    if kind in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if kind is dict:
        return "mapping"
    return _NAMES.get(annotation, "mapping")


def default_text(field: FieldInfo) -> str:
    """A field's default as a word of the command line."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", [], (), {}):
        return "–"
    if isinstance(value, BaseModel):
        return f"`{value.model_dump(exclude_defaults=True) or 'its defaults'}`".replace(
            "`its defaults`", "its defaults"
        )
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{','.join(map(str, value)) if isinstance(value, list | tuple) else value}`"


def table(section: str, model: type[BaseModel], meanings: dict[str, str]) -> list[str]:
    """A table with one row per key of a model."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        kind = type_text(field.annotation)
        if key == "name" and issubclass(model, ExtensibleSection):
            named = ", ".join(f"`{name}`" for name in model.registry.reserved)
            kind = f"list of steps: `clip`, noise, {named}" if section == "uplink" else f"{named}, or a plug-in's"
        cells = (f"`{section}.{key}`" if section else f"`{key}`", kind, default_text(field), meanings.get(key, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a key of `Config` holds, alone or in a list; None for plain keys."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if inspect.isclass(kind) and issubclass(kind, Section):
            return kind
    return None


def choices(section: str, registry: Any) -> list[str]:
    """Tables of the options of all built-in methods or tuners; those with the same options share one."""
    owners: dict[type[BaseModel], list[str]] = {}
    for name, made in registry.items():
        if made.__module__.startswith("silotune."):
            owners.setdefault(made.Options, []).append(name)
    lines = []
    for options, names in owners.items():
        if options.model_fields:
            given = ", ".join(f"`{section}={name}`" for name in names)
            lines += [f"\n{given}:\n", *table(section, options, option_meanings(options))]
    return lines


def page() -> str:
    """The page's text."""
    fields, meanings = Config.model_fields, attributes(Config)
    plain = {key: field for key, field in fields.items() if section_of(field) is None}
    lines = [INTRODUCTION, "## Keys without a section\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in plain.items():
        chooses = field.annotation is Choice
        default = f"`{field.default.name}`" if chooses else default_text(field)
        kind = f"name of a {key}, with its options" if chooses else type_text(field.annotation)
        lines.append(f"| `{key}` | {kind} | {default} | {meanings[key]} |")
    for key, registry in (("method", METHODS), ("tuner", TUNERS)):
        lines += [f"\n## `{key}`", *choices(key, registry)]
    for key, field in fields.items():
        model = section_of(field)
        if model is not None:
            summary = (inspect.getdoc(model) or "").partition("\n")[0]
            lines += [f"\n## `{key}`\n", f"{summary}\n"]
            lines += table("" if key == "silos" else key, model, attributes(model))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
