"""Marked texts: places survive NFC, every way to write spans is read alike, and scores are those of a plain count."""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silotune.data.composed import Composed
from silotune.data.kinds.entities import NO_WORD, Entities, span_counts, span_scores
from silotune.data.readers import read_records
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData, Splits, known_text
from silotune.data.spans import best_tags, spans_of, words_of
from silotune.data.targets import joined_targets, target_rows, target_tensor
from silotune.data.tasks import Task, read_task
from silotune.errors import InputError

TASK = Task("ner", ("LOC", "PER"), "span_f1", "entities")
TRICKY = st.text(
    st.sampled_from("ae\u0301\u0323\u1112\u1161\u11ab\u09c7\u09be\u0f73\u0344\u212b \r\n👩\u200d🔬\u05e9\u05c1東,"),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(TRICKY)
def test_places_of_the_composed_text_lead_back(written: str) -> None:
    composed = Composed(written)
    assert composed.text == unicodedata.normalize("NFC", written)
    places = [composed.origin(at, at + 1) for at in range(len(composed.text))]
    assert all(
        unicodedata.normalize("NFC", written[a:b]).find(c) >= 0 for (a, b), c in zip(places, composed.text, strict=True)
    )
    assert sorted({*itertools.chain(*(range(*place) for place in places))}) == list(range(len(written)))
    for start, end in places:
        assert composed.origin(*composed.place(start, end)) == (start, end)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Dr. José, ok", ["Dr", ".", "José", ",", "ok"]),
        ("a\r\nb\tc", ["a", "b", "c"]),
        ("我在北京 ok", ["我", "在", "北", "京", "ok"]),
        ("שלום, עולם", ["שלום", ",", "עולם"]),
        ("हिन्दी है", ["हिन्दी", "है"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [text[a:b] for a, b in words_of(text)] == words


def read(record: dict[str, object], column: str = "label", task: Task = TASK) -> Row:
    return target_rows(Path("f.jsonl"), [record], ("text",), column, task, by_index=False)[0]


TEXT = "Ann Lee left Rome."
SPANS = [[0, 7, "PER"], [13, 17, "LOC"]]
NAMED = [{"start": a, "end": b, "label": label} for a, b, label in SPANS]
STUDIO = [
    {"value": {"start": a, "end": b, "text": TEXT[a:b], "labels": [label]}, "type": "labels"} for a, b, label in SPANS
]
EXPORTS = {
    "ours": {"text": TEXT, "spans": NAMED},
    "a cell of JSON": {"text": TEXT, "spans": json.dumps(NAMED)},
    "Prodigy": {"text": TEXT, "spans": NAMED, "tokens_are": 1, "answer": "accept"},
    "Doccano": {"id": 3, "text": TEXT, "label": SPANS},
    "Doccano with ids": {
        "text": TEXT,
        "entities": [{"id": 1, "label": c, "start_offset": a, "end_offset": b} for a, b, c in SPANS],
    },
    "Label Studio": {"id": 1, "data": {"text": TEXT}, "annotations": [{"result": STUDIO}]},
    "Label Studio, small": {"text": TEXT, "label": [each["value"] for each in STUDIO]},
    "half a word": {"text": TEXT, "spans": [[1, 6, "PER"], [13, 17, "LOC"]]},
}
TOKENS = ["Ann", "Lee", "left", "Rome", "."]
SCHEMES = {
    "BIO": ["B-PER", "I-PER", "O", "B-LOC", "O"],
    "IOB1": ["I-PER", "I-PER", "O", "I-LOC", "O"],
    "BILOU": ["B-PER", "L-PER", "O", "U-LOC", "O"],
    "BIOES": ["B-PER", "E-PER", "O", "S-LOC", "O"],
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_read_alike(name: str) -> None:
    assert read(EXPORTS[name]) == read({"text": TEXT, "spans": SPANS})
    assert known_text(TASK, read(EXPORTS[name])) == "Ann Lee [PER], Rome [LOC]"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tags_are_read_alike(scheme: str) -> None:
    row = read({"tokens": TOKENS, "tags": SCHEMES[scheme]})
    assert row.texts == ("Ann Lee left Rome .",)
    assert [tag for *_, tag in row.target] == [3, 4, 0, 1, 0]


def test_columns_of_conll(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text("-DOCSTART- -X- O\n\nAnn NNP I-PER\nleft VBD O\n\nRome NNP B-LOC\n", encoding="utf-8")
    assert read_records(path) == [
        {"tokens": ["Ann", "left"], "tags": ["I-PER", "O"]},
        {"tokens": ["Rome"], "tags": ["B-LOC"]},
    ]
    path.write_text("Ann\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1: 'Ann' has no tag"):
        read_records(path)


def test_neighbors_of_one_label_stay_two() -> None:
    assert spans_of([3, 3, 4, 0, 2, 1, 4]) == [(0, 0, 1), (1, 2, 1), (4, 4, 0), (5, 5, 0), (6, 6, 1)]
    row = read({"tokens": ["a", "b"], "tags": ["I-PER", "B-PER"]})
    assert [tag for *_, tag in row.target] == [3, 3]


def test_spans_of_a_text_with_accents_apart() -> None:
    written = unicodedata.normalize("NFD", "é José ç")
    start = written.index("J")
    row = read({"text": written, "spans": [[start, start + 5, "PER"]]})
    assert (row.texts[0], known_text(TASK, row)) == ("é José ç", "José [PER]")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": TEXT, "spans": [[0, 99, "PER"]]}, "row 1: a span from 0 to 99 is not inside the text of 18"),
        ({"text": TEXT, "spans": [[0, 7, "PER"], [4, 9, "LOC"]]}, "row 1: spans .* overlap"),
        ({"text": TEXT, "spans": [[0, 7, "ORG"]]}, "unknown label 'ORG'; allowed: LOC, PER"),
        ({"text": TEXT, "spans": [[0, 7]]}, r"row 1: 'spans': \[0, 7\] is no span; allowed: start, end and label"),
        ({"text": TEXT, "spans": "[1"}, "is no list, nor JSON"),
        ({"text": 3, "spans": []}, "row 1: 'text' is no text"),
        ({"tokens": ["a"], "tags": []}, "1 tokens and 0 tags"),
        ({"tokens": ["a"], "tags": ["PER"]}, "'PER' is no tag"),
        ({"tokens": ["a"]}, "no column 'tags'"),
    ],
)
def test_what_is_refused(record: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(record)


def test_rows_reach_a_silos_process_as_they_are(tmp_path: Path) -> None:
    rows = [read(EXPORTS["ours"]), read({"text": "no name", "spans": []})]
    data = SiloData("a", TASK, Splits(rows, rows[:1], rows[1:]))
    write_rows(tmp_path, data)
    assert read_rows(tmp_path, "a") == data
    assert read_task(TASK.fields()) == TASK


def by_hand(true: list[tuple[int, int, int]], said: list[tuple[int, int, int]]) -> tuple[float, float, float]:
    """Strict hits, partial credit and wholly marked spans, each counted span by span."""
    hits = sum(span in true for span in said)
    credit, taken = 0.0, set()
    for a, b, _ in said:
        if any((a, b) == span[:2] for span in true):
            credit += 1
            taken |= {(a, b)}
    for a, b, _ in said:
        if not any((a, b) == span[:2] for span in true):
            other = [s for s in true if s[:2] not in taken and {*range(s[0], s[1] + 1)} & {*range(a, b + 1)}]
            if other:
                taken.add(min(other)[:2])
                credit += 0.5
    words = {word for a, b, _ in said for word in range(a, b + 1)}
    return hits, credit, sum(all(word in words for word in range(a, b + 1)) for a, b, _ in true)


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_a_count_by_hand(seed: int) -> None:
    draws = np.random.default_rng(seed)
    rows = [[spans_of(draws.choice([0, 0, 1, 2, 3, 4], 8)) for _ in range(50)] for _ in range(2)]
    counts = span_counts(TASK, *rows)
    hits, credit, whole = map(sum, zip(*(by_hand(*pair) for pair in zip(*rows, strict=True)), strict=True))
    true, said = (sum(map(len, own)) for own in rows)
    expected = {
        "span_f1": 200 * hits / (true + said),
        "partial_f1": 200 * credit / (true + said),
        "span_recall": 100 * whole / true,
    }
    assert {name: float(value[0]) for name, value in span_scores(counts).items()} == pytest.approx(expected)
    drawn = draws.multinomial(50, np.full(50, 1 / 50), 3)
    again = [span_scores(np.repeat(counts, one, 0))["span_f1"][0] for one in drawn]
    assert span_scores(counts, drawn)["span_f1"] == pytest.approx(again)


def test_the_best_tags_are_the_best_of_all_valid_ones() -> None:
    for seed in range(20):
        scores = np.random.default_rng(seed).normal(size=(4, 5))
        valid = [
            tags
            for tags in itertools.product(range(5), repeat=4)
            if all(tag in (0, 1, 3) or before in (tag - 1, tag) for before, tag in zip((0, *tags), tags, strict=False))
        ]
        best = max(valid, key=lambda tags: sum(scores[word, tag] for word, tag in enumerate(tags)))
        assert best_tags(scores) == list(best)


def test_words_that_are_not_read_count_as_missed() -> None:
    rows = [read(EXPORTS["ours"])]
    targets = target_tensor(TASK, rows)
    targets[0, 3] = -1 - targets[0, 3]  # Rome, cut
    kind, outputs = Entities(), torch.eye(5)[targets[targets >= 0]]
    assert kind.judge(TASK, "span_recall", outputs, targets) == 50
    columns = kind.written(TASK, outputs, targets)
    assert columns == {"label": ['[[0, 1, "PER"], [3, 3, "LOC"]]'], "predicted": ['[[0, 1, "PER"]]']}
    once = np.ones((1, 1))
    for metric, value in kind.scores(TASK, outputs, targets).items():
        assert kind.resampled(TASK, metric, columns)(once) == pytest.approx(value)


def test_rows_of_other_widths_are_joined() -> None:
    joined = joined_targets(torch.tensor([[1, 2]]), torch.tensor([[3]]))
    assert joined.tolist() == [[1, 2], [3, NO_WORD]]


def test_the_gazetteer_marks_what_training_rows_marked() -> None:
    test = [read({"text": "Rome saw Ann Lee and Ann", "spans": [[0, 4, "LOC"], [9, 16, "PER"], [21, 24, "PER"]]})]
    scores = Entities().own_baselines(TASK, [read(EXPORTS["ours"])], test)
    assert scores == {"outside": 0.0, "gazetteer": pytest.approx(100 * 2 * 2 / 5)}
