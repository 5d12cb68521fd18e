"""`silotune predict --query` ranks the passages of a file, or of the silo's rows, by the cosine of their vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support.small_runs import SINGLE

PASSAGES = ["a river", "the soup was cold", "the garden was kind"]


def test_the_best_passages_come_first(silotune: Any, runs: Any, tmp_path: Path) -> None:
    run = runs.retrieval("bert", "lora")
    (tmp_path / "p.txt").write_text("\n".join([*PASSAGES, ""]), encoding="utf-8")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"passage": one}) + "\n" for one in PASSAGES))
    asked = ("predict", run.folder, "--silo", "beta", "--precision", "fp32", "--query", "kind", "--query", "soup")
    model = run.model("beta")
    cosines = model.embed(["kind", "soup"]) @ model.embed(PASSAGES).T
    for file in ("p.txt", "p.jsonl"):
        outcome = silotune(*asked, "--file", tmp_path / file, "--top", "2")
        found = [json.loads(line) for line in outcome.out.splitlines()]
        for number, query in enumerate(("kind", "soup")):
            own = sorted(zip(cosines[number].tolist(), PASSAGES, strict=True), reverse=True)[:2]
            said = [(each["rank"], each["score"], each["passage"]) for each in found if each["text"] == query]
            assert [text for *_, text in said] == [text for _, text in own]
            assert [score for _, score, _ in said] == pytest.approx([score for score, _ in own], abs=1e-5)
            assert [rank for rank, *_ in said] == [1, 2]
    of_rows = [json.loads(line) for line in silotune(*asked).out.splitlines()]
    assert {each["passage"] for each in of_rows} == {*SINGLE}
    assert silotune(*asked, "--out", tmp_path / "out.parquet").code == 0
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist() == of_rows


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--query", "a", "--text", "b"), "--query takes --file"),
        (("--query", " "), "--query: is empty"),
        (("--text", "a"), "use embed"),
    ],
)
def test_what_does_not_fit_is_a_line(silotune: Any, runs: Any, words: tuple[str, ...], line: str) -> None:
    outcome = silotune("predict", runs.retrieval("bert", "lora").folder, "--silo", "beta", *words)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert line in outcome.err
