"""The table of packages in docs/architecture.md names every package, and its picture has the contracts' layers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "silotune"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

ROW = re.compile(r"^\| `([a-z_/]+)/` \| [^|]+ \|$", re.MULTILINE)


def test_the_table_names_every_package() -> None:
    packages = [str(file.parent.relative_to(PACKAGE)) for file in PACKAGE.rglob("*/__init__.py")]
    assert sorted(ROW.findall(PAGE)) == sorted(packages)


def test_the_picture_shows_every_room_and_layer() -> None:
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    shown = set(re.findall(r"\w+", picture))
    for contract in CONTRACTS:
        if contract["type"] == "layers" and contract["id"] != "lab":
            names = {name.strip() for layer in contract["layers"] for name in re.split(r"[|:]", layer)}
            assert names - {"__main__", "errors", "version", "initializers", "summary", "personal_model"} <= shown
