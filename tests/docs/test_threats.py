"""Every cell of the threat table of docs/deployment.md names the test behind it, and every such test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8").split("\n## Threats\n", 1)[1].split("\n## ", 1)[0]
)


def table(number: int) -> dict[str, list[str]]:
    """Party → the other cells of its row, of the section's table with this number."""
    blocks = [block for block in re.split(r"\n\n", SECTION) if block.lstrip().startswith("| party")]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in blocks[number].strip().splitlines()[2:]
    ]
    return {
        re.sub(r"\*\*|:.*| on the network| with network access| of these machines", "", row[0]): row[1:] for row in rows
    }


def test_every_cell_names_tests_that_exist() -> None:
    threats, tests = table(0), table(1)
    assert tests.keys() == threats.keys()
    for party, cells in tests.items():
        assert len(cells) == len(threats[party]) == 3
        for cell in cells:
            named = re.findall(r"`(tests/\w+/test_\w+\.py)(?:::(test_\w+))?`", cell)
            assert named, (party, cell)
            for file, name in named:
                path = ROOT / file
                assert path.is_file(), file
                assert not name or f"def {name}(" in path.read_text(encoding="utf-8"), (file, name)
