"""Run the command line in this process, and compare folders before and after a command."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from silotune.cli.main import main
from silotune.models.backbone.fingerprint import CACHE_FILE

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "zeroed tail": lambda content: content[:-8] + b"\0" * 8,
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "cut off": lambda content: content[:-1],
    "empty": lambda _: b"",
}
"""What happens to a file on a disk or on its way."""

WORDS = {"good": ("bright", "kind", "lovely", "warm"), "bad": ("awful", "cold", "dull", "rude")}
NOUNS = ("garden", "teacher", "river", "soup", "letter")


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def refusal(self, *names: str) -> str:
        """Return the one line with which a command was refused; it has these names."""
        assert self.code == 2, self.err
        (line,) = self.err.splitlines()
        assert all(name in line for name in names), line
        return line


Silotune = Callable[..., Outcome]
_made: dict[object, click.Command] = {}


def get_command(app: typer.Typer, of_typer: Callable[[typer.Typer], click.Command] = typer.main.get_command) -> Any:
    """Return an application's command, made once for the commands that it has: typer reads each signature anew."""
    key = (
        app,
        *(info.callback for info in app.registered_commands),
        *(info.typer_instance for info in app.registered_groups),
    )
    return _made.get(key) or _made.setdefault(key, of_typer(app))


Refused = Callable[..., str]


@pytest.fixture(name="silotune")
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Silotune:
    """`silotune("run", …)` → `Outcome`. Output is captured at the file descriptors, libraries' warnings included."""

    monkeypatch.setattr(typer.main, "get_command", get_command)

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["silotune", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    """Map each path below a folder to its content; folders map to None. The cached digest of a backbone is left out.

    It is written once its weights are two seconds old, so whether a command writes it depends on the machine's speed.
    """
    paths = [path for path in folder.rglob("*") if path.name != CACHE_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def reviews(count: int = 20, labels: Sequence[object] = ("bad", "good")) -> list[tuple[str, object]]:
    """Return `count` different one-sentence reviews; labels go round."""
    kinds = ("bad", "good")
    return [
        (f"the {NOUNS[i // 8 % 5]} was {WORDS[kinds[i % 2]][i // 2 % 4]} {i // 40}".strip(), labels[i % len(labels)])
        for i in range(count)
    ]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def write_federation(folder: Path, backbone: Path, **changes: object) -> Path:
    """Write a small federation of two CSV silos as a YAML file; `changes` replaces top-level keys."""
    write_csv(folder / "north.csv", ["review", "opinion"], reviews())
    pairs = [(text, f"and {text}", label) for text, label in reviews(20, ("other", "same"))]
    write_csv(folder / "south.csv", ["first", "second", "relation"], pairs)
    keys: dict[str, object] = {
        "method": "fedmcp",
        "backbone": str(backbone),
        "tuner": {"name": "bottleneck", "r": 4},
        "head": {"name": "mlp", "pooling": "mean"},
        "rounds": 1,
        "threads": 1,
        "precision": "fp32",
        "train": {"lr": 1e-3, "batch_size": 8, "max_length": 32},
        "silos": [
            {"name": "north", "path": "north.csv", "text": "review", "label": "opinion"},
            {"name": "south", "path": "south.csv", "text": ["first", "second"], "label": "relation"},
        ],
    }
    path = folder / "federation.yaml"
    path.write_text(yaml.safe_dump(keys | changes, sort_keys=False), encoding="utf-8")
    return path


def change_silo(folder: Path, number: int = 0, **changes: object) -> Path:
    """Change the entry of one silo of a folder's `federation.yaml`, and return its path."""
    path = folder / "federation.yaml"
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    keys["silos"][number] |= changes
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone_folder: Callable[[str], Path]) -> Path:
    """A working folder with `federation.yaml`, `north.csv` (review, opinion), `south.csv` (first, second, relation)."""
    folder = tmp_path / "place"
    folder.mkdir()
    write_federation(folder, backbone_folder("bert"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(silotune: Silotune, place: Path) -> Refused:
    """`refused(*words, names=[…])` → the one line of a command that must end with 2 and leave every file as it was."""

    def check(*words: object, names: list[str]) -> str:
        before = tree(place)
        outcome = silotune(*words)
        line = outcome.refusal(*names)
        assert line.startswith("silotune: ")
        assert "Traceback" not in outcome.out
        assert tree(place) == before
        return line

    return check
