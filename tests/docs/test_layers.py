"""The contracts of `[tool.importlinter]` in pyproject.toml hold."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="needs silotune[dev]")

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def test_all_contracts_are_kept() -> None:
    command = "from importlinter.cli import lint_imports_command as main; main()"
    process = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in process.stdout


def test_every_room_but_one_may_not_import_flower() -> None:
    by_id = {contract["id"]: contract for contract in CONTRACTS}
    modules = {name.strip() for layer in by_id["rooms"]["layers"] for name in layer.split("|")}
    assert modules - {"version", "distributed"} == {
        module.removeprefix("silotune.") for module in by_id["flower"]["source_modules"]
    }
