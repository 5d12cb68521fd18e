"""The module src/silotune/config/keys.py: a TypedDict for every section, made of the schema.

In the root of the repository, `python -m scripts.config_keys` writes it anew. tests/docs/test_pages.py
compares it with the schema.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from silotune.config.data import SiloConfig
from silotune.config.schema import Config, StdConfig
from silotune.config.section import Choice, Section
from silotune.config.trees import NAMED
from silotune.config.validators import PathKind

MODULE = Path(__file__).parents[1] / "src" / "silotune" / "config" / "keys.py"

HEAD = '''"""Types of the keys of `run`, `compare` and others in Python, for editors and type checkers: `Keys`.

Made of the schema by `python -m scripts.config_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypedDict

from silotune.config.tables import Table
'''


def keys_name(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Config") + "Keys"


def type_source(annotation: Any, key: str) -> str:
    """A type as Python writes it; what the schema reads of shorter forms is allowed, too."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return "str | PurePath" if PathKind() in arguments and key else type_source(arguments[0], key)
    if kind is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if kind in (Union, UnionType):
        return " | ".join(dict.fromkeys(type_source(one, key) for one in arguments))
    if annotation is NoneType:
        return "None"
    if kind is list and arguments[0] is SiloConfig:
        return "Sequence[SiloKeys] | Mapping[str, Table]"
    if kind is list and key in ("text", "labels"):
        return "Sequence[str]" if key == "text" else "Sequence[str | int]"
    if kind in (list, tuple):
        item = get_args(arguments[0])[0] if get_origin(arguments[0]) is Annotated else arguments[0]
        words = "str | " if kind is list and item in (str, int) else ""
        return f"{words}Sequence[{type_source(arguments[0], '')}]"
    if kind is dict:
        return f"Mapping[str, {type_source(arguments[1], '')}]"
    if annotation is Choice:
        return "str | Mapping[str, Any]"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        if key == "uplink":
            return f"str | Sequence[str] | {keys_name(annotation)}"
        return f"str | {keys_name(annotation)}" if key in NAMED else keys_name(annotation)
    return {Any: "Any"}.get(annotation) or annotation.__name__


def typed_dict(section: type[BaseModel], skipped: str = "", name: str = "", base: str = "TypedDict") -> list[str]:
    lines = [f"\n\nclass {name or keys_name(section)}({base}, total=False):"]
    what = f"The section `{section.__name__.removesuffix('Config').lower()}`."
    if section is SiloConfig:
        what = "An entry of `silos`; `rows` is a table instead of `path`."
    lines.append(f'    """{what if not name else "The keys of a run without a backbone."}"""\n')
    lines += [
        f"    {key}: {type_source(Annotated[field.annotation, None, *field.metadata], key)}"
        for key, field in section.model_fields.items()
        if key != skipped
    ]
    if section is SiloConfig:
        lines.append("    rows: Table")
    return lines


def module() -> str:
    """The module's text, formatted."""
    sections = [field.annotation for field in Config.model_fields.values()]
    kinds = [kind for kind in sections if isinstance(kind, type) and issubclass(kind, Section)]
    lines = [HEAD]
    for kind in (StdConfig, SiloConfig, *kinds):
        lines += typed_dict(kind)
    lines += typed_dict(Config, skipped="backbone", name="RunKeys")
    lines += [
        "\n\nclass Keys(RunKeys, total=False):",
        '    """All keys of a run."""\n',
        "    backbone: str | BackboneKeys",
    ]
    formatter = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(MODULE), "-"]
    return subprocess.run(formatter, input="\n".join(lines) + "\n", text=True, capture_output=True, check=True).stdout


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
