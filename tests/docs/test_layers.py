"""The contracts of `[tool.importlinter]` in pyproject.toml hold, and each fails when one line breaks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="needs silotune[dev]")

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
CONTRACTS = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's modules."""
    copy = tmp_path / "silotune"
    shutil.copytree(ROOT / "src" / "silotune", copy, ignore=shutil.ignore_patterns("__pycache__", "presets", "demo"))
    return copy


def lint(package: Path) -> tuple[int, str]:
    """The exit code and the output of `lint-imports` over a copy of the package."""
    command = "from importlinter.cli import lint_imports_command as main; main()"
    process = subprocess.run(
        [sys.executable, "-c", command, "--config", str(PYPROJECT), "--no-cache"],
        cwd=package.parent,
        env={"PYTHONPATH": str(package.parent), "COLUMNS": "200", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    return process.returncode, process.stdout + process.stderr


def test_all_contracts_are_kept(package: Path) -> None:
    code, output = lint(package)
    assert code == 0, output
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in output


NAMES = {contract["id"]: contract["name"] for contract in CONTRACTS}

CASES = [  # a module, the line added to it, the contract that it breaks, and how the report names it
    ("core/numeric.py", "import silotune.data.tasks", "rooms", "core.numeric -> silotune.data.tasks"),
    (
        "training/silo.py",
        "def later():\n    from silotune.runs.build import resolve",
        "rooms",
        "training.silo -> silotune.runs.build.resolve",
    ),
    ("loose.py", "import silotune.errors", "rooms", "- silotune.loose"),
    (
        "models/backbone/loading.py",
        "import silotune.models.tuners.lora",
        "models",
        "backbone.loading -> silotune.models.tuners.lora",
    ),
    (
        "models/tuners/lora.py",
        "import silotune.models.forward.views",
        "models",
        "tuners.lora -> silotune.models.forward.views",
    ),
    ("models/loose.py", "import silotune.errors", "models", "- silotune.models.loose"),
    (
        "communication/messages.py",
        "import silotune.communication.privacy.budget",
        "communication",
        "communication.messages -> silotune.communication.privacy.budget",
    ),
    (
        "runs/storage/run_folder.py",
        "import silotune.runs.engines.base",
        "runs",
        "storage.run_folder -> silotune.runs.engines.base",
    ),
    (
        "distributed/protocol/frames.py",
        "import silotune.distributed.silo.session",
        "distributed",
        "protocol.frames -> silotune.distributed.silo.session",
    ),
    (
        "distributed/silo/session.py",
        "import silotune.distributed.coordinator.engine",
        "distributed",
        "silo.session -> silotune.distributed.coordinator.engine",
    ),
    (
        "lab/comparison.py",
        "import silotune.lab.sweep",
        "lab",
        "lab.comparison -> silotune.lab.sweep",
    ),
    ("runs/run.py", "import flwr", "flower", "silotune.runs.run -> flwr"),
    ("data/tasks.py", "import silotune.data.hub", "cycles", "No cycles are allowed in silotune.data."),
    (
        "config/validators.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import silotune.config.parse",
        "cycles",
        "No cycles are allowed in silotune.config.",
    ),
]


def add(package: Path, module: str, line: str) -> None:
    with (package / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")


def test_every_import_against_a_contract_is_reported(package: Path) -> None:
    """All lines at once; alone each breaks its contract, too (below)."""
    for module, line, *_ in CASES:
        add(package, module, line)
    code, output = lint(package)
    assert code == 1, output
    reports = output.partition("Broken contracts")[2]
    for _, _, broken, report in CASES:
        begin = reports.index(f"\n{NAMES[broken]}\n")
        ends = [reports.find(f"\n{name}\n", begin + 1) for name in NAMES.values()]
        assert report in reports[begin : min((end for end in ends if end > 0), default=None)]


@pytest.mark.long
@pytest.mark.parametrize(("module", "line", "broken", "report"), CASES)
def test_one_import_breaks_its_contract(package: Path, module: str, line: str, broken: str, report: str) -> None:
    add(package, module, line)
    code, output = lint(package)
    assert code == 1, output
    assert f"{NAMES[broken]} BROKEN" in output
    assert report in output


def test_every_room_but_one_may_not_import_flower() -> None:
    by_id = {contract["id"]: contract for contract in CONTRACTS}
    modules = {name.strip() for layer in by_id["rooms"]["layers"] for name in layer.split("|")}
    assert modules - {"version", "distributed"} == {
        module.removeprefix("silotune.") for module in by_id["flower"]["source_modules"]
    }
