"""The demo's data: well formed, balanced, and not to be solved by counting words."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from silotune.data.loading import demo_folder

TASKS = ("sentiment", "paraphrase", "entailment", "answer_match", "duplicate_question", "inference")
PAIRS = TASKS[1:]


def rows_of(task: str) -> list[dict]:
    lines = (demo_folder() / task / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_well_formed_balanced_and_distinct(task: str) -> None:
    rows = rows_of(task)
    names = json.loads((demo_folder() / task / "meta.json").read_text(encoding="utf-8"))["label_names"]
    columns = {"sentence1", "label"} | ({"sentence2"} if task in PAIRS else set())
    assert all(row.keys() == columns for row in rows)
    assert all(row[column].strip() for row in rows for column in columns - {"label"})
    assert len(rows) == 320
    counts = Counter(row["label"] for row in rows)
    assert set(counts) == set(range(len(names)))
    assert max(counts.values()) - min(counts.values()) <= 2
    texts = [(row["sentence1"], row.get("sentence2")) for row in rows]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("task", PAIRS)
def test_counting_words_does_not_solve_the_pair_tasks(task: str) -> None:
    """Five-fold accuracy of logistic regression on unigram counts stays within 12 points of chance."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline

    rows = rows_of(task)
    texts = [f"{row['sentence1']} {row['sentence2']}" for row in rows]
    labels = [row["label"] for row in rows]
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    model = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000))
    accuracy = cross_val_score(model, texts, labels, cv=folds).mean()
    assert accuracy <= 1 / len(set(labels)) + 0.12


@pytest.mark.parametrize("task", ["polite", "explain", "advice"])
def test_prompts_have_an_answer_each(task: str) -> None:
    rows = rows_of(task)
    assert len(rows) == len({row["prompt"] for row in rows}) == len({row["response"] for row in rows}) == 30
    assert all(row.keys() == {"prompt", "response"} and row["response"].strip() for row in rows)


def test_neither_names_nor_sentences_of_hospitals_tests_are_in_training_rows():
    names, frames = {}, {}
    for split in ("train", "test"):
        words, sentences = set(), set()
        for silo in ("north", "south", "east", "west"):
            lines = (demo_folder() / silo / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            for row in map(json.loads, lines):
                frame = row["text"]
                for span in reversed(row["spans"]):
                    words |= {*frame[span["start"] : span["end"]].split()}
                    frame = f"{frame[: span['start']]}[{span['label']}]{frame[span['end'] :]}"
                sentences.add(frame)
        names[split], frames[split] = {word for word in words if word[0].isupper()}, sentences
    assert not names["train"] & names["test"]
    assert not frames["train"] & frames["test"]
