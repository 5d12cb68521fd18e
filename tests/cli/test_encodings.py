"""A console whose encoding lacks a character: the command ends as ever, and JSON is what it is elsewhere."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from silotune.cli.main import main
from tests.support.command_line import reviews, write_csv, write_federation

LABELS = ("плохо 坏 \U0001f641", "gut – ü")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, backbone_folder) -> Path:
    """A folder with a federation whose labels no old encoding has, and a run of it."""
    folder = tmp_path_factory.mktemp("Köln")
    path = write_federation(folder, backbone_folder("bert"))
    write_csv(folder / "north.csv", ["review", "opinion"], reviews(labels=LABELS))
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(keys | {"silos": keys["silos"][:1], "method": "local"}), encoding="utf-8")
    return folder


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *words: object) -> str:
    """Run a command whose standard output has an encoding; return what it prints."""
    content = io.BytesIO()
    with monkeypatch.context() as patched, io.TextIOWrapper(content, encoding=encoding) as console:
        patched.setattr(sys, "stdout", console)
        patched.setattr(sys, "argv", ["silotune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        console.flush()
        return content.getvalue().decode("utf-8" if encoding == "ascii" else encoding)  # click writes UTF-8 there


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
def test_a_command_ends_whatever_the_console_can_show(finished, monkeypatch, encoding):
    monkeypatch.chdir(finished)
    run = Path("Łódź")
    if not run.exists():  # one encoding trains; all read the run and write of it
        assert "north" in printed(monkeypatch, encoding, "run", "federation.yaml", "--out", run)
        words = ("compare", "federation.yaml", "methods=local", "--out", f"{run}-all")
        assert "local" in printed(monkeypatch, encoding, *words)
    for words in (["report", run], ["data", "federation.yaml"]):
        printed(monkeypatch, encoding, *words)
    answers = printed(monkeypatch, encoding, "predict", run, "--silo", "north", "--text", "wie schön – 好")
    (answer,) = map(json.loads, answers.splitlines())
    assert answer["text"] == "wie schön – 好"
    assert {*answer["probabilities"]} == {*LABELS}
    described = printed(monkeypatch, encoding, "data", "federation.yaml", "--json")
    assert LABELS[0] in json.dumps(json.loads(described), ensure_ascii=False)
