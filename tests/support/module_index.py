"""The section "Every module in one line" of docs/architecture.md, made of the first lines of the modules' docstrings.

In the root of the repository, `python -m tests.support.module_index` writes it anew. tests/docs/test_module_index.py
compares it with the docstrings.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "silotune"
PAGE = ROOT / "docs" / "architecture.md"

HEADING = "## Every module in one line\n"
INTRODUCTION = """
The first lines of the modules' docstrings, written here by `python -m tests.support.module_index`.
A name in several rooms (partition, evaluation, coordinator) is about the same subject at each of these levels.
"""


def first_line(file: Path) -> str:
    """The first line of a module's docstring; the module is parsed, not imported."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def section() -> str:
    """The section's text: per room, in the table's order of layers, its packages and modules."""
    page = PAGE.read_text(encoding="utf-8")
    rooms = sorted(
        (path.parent for path in PACKAGE.glob("*/__init__.py")), key=lambda room: page.find(f"| `{room.name}/")
    )
    groups = [("the package", sorted(PACKAGE.glob("*.py")))]
    groups += [(room.name, sorted(room.rglob("*.py"), key=lambda file: (file.parent, file.stem))) for room in rooms]
    lines = [HEADING, INTRODUCTION]
    for title, files in groups:
        lines.append(f"\n### {title}\n\n")
        lines += [f"- `{file.relative_to(PACKAGE).as_posix()}`: {first_line(file)}\n" for file in files]
    return "".join(lines)


def main() -> None:
    """Replace the page's last section by the current one, or append it."""
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
    PAGE.write_text(f"{before}\n\n{section()}", encoding="utf-8")


if __name__ == "__main__":
    main()
