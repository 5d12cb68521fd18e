"""Commands of the documentation exist with their options; the tutorials' commands run, one after the other."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from silotune.cli.app import add_commands, app
from silotune.data.loading import demo_folder
from tests.support.chats import chat_model, write_lines
from tests.support.command_line import Silotune, get_command
from tests.support.tiny import save_backbone

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)

NETWORK = "--lm-eval"
"""An option of commands that fetch tasks of the hub."""

QUICK = {"run": ("rounds=1", "train.steps=1"), "sweep": ("rounds=1", "train.steps=1", "data.rows_per_silo=30")}
QUICK |= {"compare": QUICK["sweep"]}


def blocks(page: Path, kind: str) -> list[str]:
    """The page's blocks of code in a language."""
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == kind]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `silotune` command that begins a line of the page's blocks."""
    for block in blocks(page, "bash"):
        lines = block.replace("\\\n", " ").splitlines()
        for number, line in enumerate(lines):
            if line.split()[:1] in (["silotune"], [".venv/bin/silotune"]):
                yield from separate(words_of(lines[number:]))


def separate(words: list[str]) -> Iterator[list[str]]:
    """Cut a line at its semicolons; each command without its name."""
    rest = [part for word in words for part in ([word.removesuffix(";"), ";"] if word.endswith(";") else [word])]
    while rest:
        end = rest.index(";") if ";" in rest else len(rest)
        yield rest[1:end]
        rest = rest[end + 1 :]


def words_of(lines: list[str]) -> list[str]:
    """The words of a command; quotes may end on a later line."""
    for end in range(1, len(lines) + 1):
        try:
            return shlex.split("\n".join(lines[:end]), comments=True)
        except ValueError:
            continue
    raise AssertionError(f"unbalanced quotes: {lines[0]}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path) -> None:
    add_commands()
    root = get_command(app)
    for words in commands(page):
        known: click.Command = root
        rest = list(words)
        while isinstance(known, click.Group) and rest and not rest[0].startswith("-"):
            assert rest[0] in known.commands, f"{page.name}: silotune {shlex.join(words)}"
            known = known.commands[rest.pop(0)]
        options = {name for parameter in known.params for name in parameter.opts} | {"--help", "-h"}
        for word in rest:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"{page.name}: silotune {shlex.join(words)}"


def quick(words: list[str], backbone: str) -> list[str]:
    """The command with less to do, over a tiny backbone."""
    if words[0] not in QUICK:
        return words
    return [*words, *QUICK[words[0]], f"backbone={backbone}"]


def done(silotune: Silotune, words: list[str]) -> str:
    """Run a command that has to succeed, and return what it prints."""
    outcome = silotune(*words)
    assert outcome.code == 0, f"silotune {shlex.join(words)}: {outcome.err}"
    return outcome.out


@pytest.mark.long
def test_own_files(silotune: Silotune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = str(save_backbone("bert", tmp_path / "tiny"))
    for words in commands(ROOT / "docs/tutorial-own-files.md"):
        named = ["my-federation/reviews.csv" if word == "LABELED.csv" else word for word in words]
        done(silotune, quick(named, backbone))
    for path in ("labels.svg", "runs/mine/summary.json", "adapter/export.json"):
        assert (tmp_path / path).is_file()


@pytest.mark.long
def test_compare_methods(silotune: Silotune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = str(save_backbone("bert", tmp_path / "tiny"))
    page = ROOT / "docs/tutorial-compare.md"
    for words in commands(page):
        done(silotune, quick(words, backbone))
    assert (tmp_path / "runs/compared/report.html").is_file()
    (text,) = blocks(page, "yaml")
    Path("one.yaml").write_text(text, encoding="utf-8")
    done(silotune, quick(["compare", "one.yaml", "--out", "runs/one", "seeds=1"], backbone))
    runs = {path.parent.name for path in (tmp_path / "runs/one").glob("*/summary.json")}
    assert runs == {f"{name}-1" for name in ("local", "local-slow", "moon", "moon-slow", "fedmcp", "fedmcp-slow")}


@pytest.mark.long
def test_entities(silotune: Silotune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = str(save_backbone("bert", tmp_path / "tiny"))
    page = ROOT / "docs/entities.md"
    (text,) = blocks(page, "yaml")
    Path("hospitals.yaml").write_text(text, encoding="utf-8")
    for silo in ("north", "south", "east", "west"):
        shutil.copy(demo_folder() / silo / "train.jsonl", f"{silo}.jsonl")
    Path("reports.txt").write_text("Ann Lee left.\n", encoding="utf-8")
    Path("reports.csv").write_text("note\nAnn Lee left.\n", encoding="utf-8")
    done(silotune, quick(["run", "demo-entities", "--out", "runs/hospitals/fedavg"], backbone))  # in the demo's place
    for words in commands(page):
        if words[0] != "demo":
            done(silotune, quick(words, backbone))
    assert Path("redacted.txt").is_file()
    assert Path("redacted.csv").is_file()


@pytest.mark.long
def test_a_language_model(silotune: Silotune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    backbone = str(chat_model(tmp_path / "model"))
    page = ROOT / "docs/tutorial-language-model.md"
    (text,) = blocks(page, "yaml")
    Path("federation.yaml").write_text(text.replace("smollm2", backbone), encoding="utf-8")
    for name in ("north", "south"):
        write_lines(Path(f"{name}.jsonl"), [{"instruction": f"say {n}", "output": f"now {n}"} for n in range(30)])
    done(silotune, ["run", "federation.yaml", "--out", "RUN", "rounds=1", "train.steps=1"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a silo?\n"))  # of `silotune chat`
    for words in commands(page):
        named = [backbone if word == "smollm2" else word for word in words]
        if NETWORK not in named:
            done(silotune, [*named, "--model", backbone] if named[0] == "demo" else named)
    assert (tmp_path / "adapter/adapter_config.json").is_file()
