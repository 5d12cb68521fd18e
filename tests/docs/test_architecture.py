"""The table of packages in docs/architecture.md names every module, and its picture has the layers of the contracts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "silotune"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

ROW = re.compile(r"^\| `([a-z_/]+)/` \| [^|]+ \|([^|]*)\|$", re.MULTILINE)
NAME = re.compile(r"`([a-z_0-9]+)`")

ONE_EACH = {"methods"}
"""Packages with a module per paper, which the table need not name."""


def modules_of(package: Path) -> set[str]:
    return {file.stem for file in package.glob("*.py")} - {"__init__"}


def test_the_table_names_every_package_and_module() -> None:
    table = {package: set(NAME.findall(modules)) for package, modules in ROW.findall(PAGE)}
    packages = {
        str(file.parent.relative_to(PACKAGE)): modules_of(file.parent) for file in PACKAGE.rglob("*/__init__.py")
    }
    assert sorted(table) == sorted(packages)
    for package, modules in packages.items():
        missing = set() if package in ONE_EACH else modules - table[package]
        assert not missing, f"{package}: {sorted(missing)} not named"
        assert table[package] <= modules, f"{package}: {sorted(table[package] - modules)} named but not there"


def test_the_picture_shows_every_room_and_layer() -> None:
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    shown = set(re.findall(r"\w+", picture))
    for contract in CONTRACTS:
        if contract["type"] == "layers" and contract["id"] != "experiments":
            names = {name.strip() for layer in contract["layers"] for name in re.split(r"[|:]", layer)}
            assert names - {"__main__", "errors", "version", "initializers", "summary", "personal_model"} <= shown
