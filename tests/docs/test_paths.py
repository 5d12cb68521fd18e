"""Files, modules and names that the documentation mentions exist, and its links lead to headings that exist."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from silotune.config import registries
from silotune.config.registries import Registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "silotune"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("*.md")])
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which also names what was

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PATH = re.compile(
    r"(?<![\w./{<*-])(?:\./)?((?:[\w*.-]+/)*[\w*-]+\.py|(?:src|tests|docs|deploy|benchmarks|presets)/[\w./*-]*[\w*/])"
)
MODULE = re.compile(r"\bsilotune(?:\.[a-z_]+)+\b")
NAMED = re.compile(r"`(?:src/silotune/)?([\w/]+\.py)`((?:,? (?:and )?`(?![\w/]+\.py`)[A-Za-z_][\w.]*`)+)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")

EXAMPLES = {"methods/fedrod.py", "silotune.methods.fedrod"}
"""Files and modules that a page has its reader write."""

GROUPS = {value.group for value in vars(registries).values() if isinstance(value, Registry)} | {"silotune.commands"}
"""Groups of entry points are named like modules."""

OUTSIDE = {"standalone.py"}
"""Files of an export."""


def exists(path: str) -> bool:
    """Whether a path, or something that its `*` stands for, is in the repository, the package or the tests."""
    return any(any(folder.glob(path.rstrip("/"))) for folder in (ROOT, PACKAGE, ROOT / "tests"))


@cache
def known_name(module: str) -> bool:
    """Whether a dotted name is a module or what a module has."""
    try:
        if find_spec(module) is not None:
            return True
    except ModuleNotFoundError:
        pass
    parent, _, name = module.rpartition(".")
    try:
        spec = find_spec(parent)
    except ModuleNotFoundError:
        return False
    files = [Path(spec.origin).with_suffix(end) for end in (".py", ".pyi")] if spec and spec.origin else []
    return any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in files if file.exists())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    spans = [*FENCE.findall(text), *CODE.findall(FENCE.sub("", text))]
    paths = {path for span in spans for path in PATH.findall(span)} - EXAMPLES - OUTSIDE
    assert not sorted(path for path in paths if not exists(path))
    modules = {module for span in spans for module in MODULE.findall(span)} - EXAMPLES - GROUPS
    assert not sorted(module for module in modules if not known_name(module))
    missing = [
        f"{path}: {name}"
        for path, names in NAMED.findall(text)
        for name in re.findall(r"`([^`]+)`", names)
        if path not in EXAMPLES | OUTSIDE
        and not re.search(rf"\b{name.rpartition('.')[2]}\b", (PACKAGE / path).read_text(encoding="utf-8"))
    ]
    assert not missing, "names after a file are in it"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
