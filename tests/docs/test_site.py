"""The documentation's site: `make` installs what it builds with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"myst_parser": "myst-parser"}
"""Where a Sphinx extension's module is named unlike its distribution."""


def extras() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_make_installs_extras_that_exist():
    named = re.findall(r'-e "\.\[([\w,-]+)\]"', (ROOT / "Makefile").read_text())
    assert named
    assert {extra for names in named for extra in names.split(",")} <= set(extras())


def test_the_extra_docs_has_the_theme_and_the_extensions_of_the_site():
    configuration = (ROOT / "docs" / "conf.py").read_text()
    (line,) = re.findall(r"^extensions = \[(.*)\]$", configuration, re.MULTILINE)
    (theme,) = re.findall(r'^html_theme = "(.*)"$', configuration, re.MULTILINE)
    wanted = [name for name in re.findall(r'"([\w.]+)"', line) if not name.startswith("sphinx.ext.")]
    packages = {PACKAGES.get(name, name.replace("_", "-")) for name in wanted} | {theme, "sphinx"}
    assert {re.split(r"[><=]", entry)[0] for entry in extras()["docs"]} == packages
