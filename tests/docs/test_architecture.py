"""docs/architecture.md names every room, and its picture has all of them; one room alone may import Flower."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "silotune"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

ROW = re.compile(r"^\| `([a-z_]+)/` \| [^|]+ \|$", re.MULTILINE)


def test_the_table_names_every_room() -> None:
    rooms = [file.parent.name for file in PACKAGE.glob("*/__init__.py")]
    assert sorted(ROW.findall(PAGE)) == sorted(rooms)


def test_the_picture_shows_every_room() -> None:
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (rooms,) = (contract["layers"] for contract in CONTRACTS if contract["id"] == "rooms")
    names = {name.strip() for layer in rooms for name in re.split(r"[|:]", layer)}
    assert names - {"__main__", "errors", "version"} <= set(re.findall(r"\w+", picture))


def test_every_room_but_one_may_not_import_flower() -> None:
    by_id = {contract["id"]: contract for contract in CONTRACTS}
    modules = {name.strip() for layer in by_id["rooms"]["layers"] for name in layer.split("|")}
    assert modules - {"version", "distributed"} == {
        module.removeprefix("silotune.") for module in by_id["flower"]["source_modules"]
    }


def test_the_page_can_be_read_at_one_sitting() -> None:
    assert len(PAGE.encode()) <= 10_240
