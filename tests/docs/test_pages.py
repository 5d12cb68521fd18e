"""What pages and project files say of the code, of each other and of formulas holds."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from scripts import config_keys, configuration_page

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
EXTRAS = PROJECT["project"]["optional-dependencies"]

ROW = re.compile(r"^\| `([a-z_]+)/` \| [^|]+ \|$", re.MULTILINE)

SAFE = {"certifi": "2026.10.19"}  # the first that no longer trusts the authorities of eMudhra, which were compromised

PACKAGES = {"myst_parser": "myst-parser"}
"""Where a Sphinx extension's module is named unlike its distribution."""


def test_the_page_of_keys_is_what_the_schema_says() -> None:
    text = configuration_page.page()
    assert configuration_page.PAGE.read_text(encoding="utf-8") == text, "run `python -m scripts.configuration_page`"
    incomplete = [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not incomplete, "keys without a meaning"


def test_the_types_of_keys_are_those_of_the_schema() -> None:
    assert config_keys.MODULE.read_text(encoding="utf-8") == config_keys.module(), "run `python -m scripts.config_keys`"


def test_the_table_and_the_picture_of_the_architecture_have_every_room() -> None:
    assert sorted(ROW.findall(ARCHITECTURE)) == sorted(
        file.parent.name for file in (ROOT / "src" / "silotune").glob("*/__init__.py")
    )
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    names = {name.strip() for layer in CONTRACTS["rooms"]["layers"] for name in re.split(r"[|:]", layer)}
    assert names - {"__main__", "errors", "version"} <= set(re.findall(r"\w+", picture))


def test_the_architecture_can_be_read_at_one_sitting() -> None:
    assert len(ARCHITECTURE.encode()) <= 10_240


def test_every_room_but_one_may_not_import_flower() -> None:
    modules = {name.strip() for layer in CONTRACTS["rooms"]["layers"] for name in layer.split("|")}
    assert modules - {"version", "distributed"} == {
        module.removeprefix("silotune.") for module in CONTRACTS["flower"]["source_modules"]
    }


def test_how_sure_an_epsilon_lets_somebody_be() -> None:
    """From even odds, the posterior e^ε / (1 + e^ε) is the most that a ratio of probabilities up to e^ε allows."""
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \|$", text, re.MULTILINE)
    assert [epsilon for epsilon, _ in rows] == ["8", "1", "0.1"]
    for epsilon, percent in rows:
        sure = 100 / (1 + math.exp(-float(epsilon)))
        assert f"{sure:.{len(percent.partition('.')[2])}f}" == percent


def test_no_pinned_version_is_known_to_be_unsafe() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {each.name: each for line in lines if line[:1] != "#" for each in [Requirement(line)]}
    for name, first in SAFE.items():
        (specifier,) = pins[name].specifier
        assert specifier.operator == "=="
        assert Version(specifier.version) >= Version(first)


def test_make_installs_extras_that_exist() -> None:
    named = re.findall(r'-e "\.\[([\w,-]+)\]"', (ROOT / "Makefile").read_text())
    assert named
    assert {extra for names in named for extra in names.split(",")} <= set(EXTRAS)


def test_the_extra_docs_has_the_theme_and_the_extensions_of_the_site() -> None:
    configuration = (ROOT / "docs" / "conf.py").read_text()
    (line,) = re.findall(r"^extensions = \[(.*)\]$", configuration, re.MULTILINE)
    (theme,) = re.findall(r'^html_theme = "(.*)"$', configuration, re.MULTILINE)
    wanted = [name for name in re.findall(r'"([\w.]+)"', line) if not name.startswith("sphinx.ext.")]
    packages = {PACKAGES.get(name, name.replace("_", "-")) for name in wanted} | {theme, "sphinx"}
    assert {re.split(r"[><=]", entry)[0] for entry in EXTRAS["docs"]} == packages
