"""`silotune redact`: labels stand in place of spans, everything else stays, and the first line says the recall."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from silotune.data.kinds import Prediction, Span
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.runs.redaction import _LONGEST, recall_text, redact


class Marks:
    """Marks every name `Anna` or `Anna Lee`, as a model would."""

    task = Task("ner", ("LOC", "PER"), "span_f1", "entities")

    def __init__(self, task: Task | None = None) -> None:
        self.task = task or self.task
        self.about = {"columns": {"text": ["text"]}, "silo": "a"}
        self.longest = 0

    def predict(self, texts: list[str]) -> list[Prediction]:
        self.longest = max(self.longest, *map(len, texts))
        return [Prediction("", spans=tuple(self._spans(text))) for text in texts]

    def _spans(self, text: str):
        for match in re.finditer("Anna( Lee)?", text):
            yield Span(*match.span(), "PER", match.group(), 1.0)


def redacted(name: str, content: str, tmp_path: Path, model: Marks | None = None, column: str | None = None):
    path, out = tmp_path / name, io.StringIO(newline="")
    path.write_bytes(content.encode())
    with path.open("rb") as opened:
        number, counts = redact(model or Marks(), path, opened, out, column)
    return out.getvalue(), number, dict(counts)


def test_text_keeps_its_line_ends(tmp_path: Path) -> None:
    text = "Anna, e\u0301\r\nsaw Anna\n\n  none\rAnna"
    assert redacted("f.txt", text, tmp_path) == ("[PER], e\u0301\r\nsaw [PER]\n\n  none\r[PER]", 4, {"PER": 3})


def test_long_lines_are_read_in_pieces(tmp_path: Path) -> None:
    line = "so Anna Lee said " * 20_000
    assert line[:_LONGEST].endswith("so Anna ")  # the first cut is inside a name
    for text in (line, line + "\nAnna Lee\n", "Anna" * 20_000):
        model = Marks()
        written, number, counts = redacted("f.txt", text, tmp_path, model)
        assert (written, number) == (re.sub("Anna( Lee)?", "[PER]", text), text.count("\n"))
        assert counts == {"PER": text.count("Anna")}
        assert model.longest <= 2 * _LONGEST


def test_one_column_of_a_table_and_of_json_lines(tmp_path: Path) -> None:
    written, number, _ = redacted("f.csv", 'text,by\n"Anna, Bo",Anna\n,Anna\n', tmp_path)
    assert [*csv.reader(io.StringIO(written))] == [["text", "by"], ["[PER], Bo", "Anna"], ["", "Anna"]]
    assert number == 2
    lines = [{"note": "Anna", "n": 1}, {"note": None, "n": 2}]
    written, *_ = redacted("f.jsonl", "\n".join(map(json.dumps, lines)), tmp_path, column="note")
    assert [*map(json.loads, written.splitlines())] == [{"note": "[PER]", "n": 1}, {"note": None, "n": 2}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("f.csv", "a\nx\n", "row 1: no column 'text'; there: a"),
        ("f.jsonl", '{"text": 3}', "row 1: 'text' is no text"),
        ("f.parquet", "x", "allowed are text, .csv, .tsv and .jsonl"),
    ],
)
def test_what_is_refused(name: str, content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        redacted(name, content, tmp_path)
    with pytest.raises(InputError, match="holds texts with labels; allowed: kind=entities"):
        redacted("f.txt", "x", tmp_path, Marks(Task("t", ("a", "b"))))


def test_the_first_line_says_what_share_is_found(tmp_path: Path) -> None:
    details = {"rows": 300, "metrics": {"span_recall": 81.26}, "intervals": {"span_recall": [77.0, 85.0]}}
    (tmp_path / "scores.json").write_text(json.dumps({"silos": {"a": details}}), encoding="utf-8")
    assert recall_text(tmp_path, "a") == (
        "recall on 300 test rows: 81.3 % of spans are marked as a whole (95 % interval 77.0 to 85.0); "
        "the others stay readable"
    )
    assert "not known" in recall_text(tmp_path, "b")
    details = {"rows": 19, "metrics": {"span_recall": 100.0}, "intervals": {"span_recall": [100.0, 100.0]}}
    (tmp_path / "scores.json").write_text(json.dumps({"silos": {"a": details}}), encoding="utf-8")
    assert "(95 % interval 82.4 to 100.0)" in recall_text(tmp_path, "a")  # 0.025 ** (1 / 19)
    details |= {"rows": 1000, "per_class": {"PER": {"rows": 3}, "LOC": {"rows": 2}}}  # nearly all rows have no span
    (tmp_path / "scores.json").write_text(json.dumps({"silos": {"a": details}}), encoding="utf-8")
    assert "(95 % interval 47.8 to 100.0)" in recall_text(tmp_path, "a")  # 0.025 ** (1 / 5)
