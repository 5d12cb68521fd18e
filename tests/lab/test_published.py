"""Data sets in the layouts that their authors distribute, made here in small, and what is wrong with such folders."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from silotune.data.own_silos import read_folder
from silotune.data.rows import known_text
from silotune.lab import published
from tests.support.command_line import Silotune

TEST_FILE = "flan_test_200_selected_nstrict_1.jsonl"


def written(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))


def instructions(task: str, count: int) -> list[dict[str, str]]:
    return [
        {"instruction": f"{task}\u2028say {n}", "output": str(n), "task": task, "category": "say"} for n in range(count)
    ]


def feddpa(folder: Path) -> None:
    for number, tasks in ((1, ("snli", "cola")), (2, ("qnli",))):
        place = folder / "data" / f"dataset{number}"
        for silo, task in enumerate(tasks):
            written(place / "8" / f"local_training_{silo}.json", json.dumps(instructions(task, 3)))
        rows = [row for task in tasks for row in instructions(task, 2)]
        written(place / TEST_FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def lingspam(folder: Path) -> None:
    for part in range(1, 11):
        written(folder / "lingspam_public" / "bare" / f"part{part}" / "3-1msg1.txt", f"ham {part}")
        written(folder / "lingspam_public" / "bare" / f"part{part}" / "spmsga1.txt", f"spam\0{part}")


MAKERS: dict[str, Callable[[Path], None]] = {maker.__name__: maker for maker in (feddpa, lingspam)}
EXPECTED = {
    "snli": {"train": [(("snli\u2028say 0", ""), "0"), (("snli\u2028say 1", ""), "1"), (("snli\u2028say 2", ""), "2")]},
    "cola": {"test": [(("cola\u2028say 0", ""), "0"), (("cola\u2028say 1", ""), "1")]},
    "qnli": {"test": [(("qnli\u2028say 0", ""), "0"), (("qnli\u2028say 1", ""), "1")]},
    "lingspam": {"test": [((f"{kind} {part}",), kind) for part in (9, 10) for kind in ("ham", "spam")]},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_rows_and_labels_are_those_of_the_files(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / "source")
    outcome = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    assert (outcome.code, outcome.err) == (0, "")
    tasks = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert len(tasks) == {"feddpa": 3, "lingspam": 1}[kind]
    for task in tasks:
        found = read_folder(tmp_path / "data", task)
        for split, rows in EXPECTED.get(task, {}).items():
            assert [(row.texts, known_text(found.task, row)) for row in getattr(found.splits, split)] == rows
    again = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    again.refusal("already; choose another folder")


def test_a_task_whose_name_is_a_path_is_refused(silotune: Silotune, tmp_path: Path) -> None:
    MAKERS["feddpa"](tmp_path / "source")
    written(tmp_path / "source/data/dataset2/8/local_training_0.json", json.dumps(instructions("../c", 1)))
    outcome = silotune("import-data", "feddpa", tmp_path / "source", "--to", tmp_path / "data")
    outcome.refusal("'../c' cannot be a name")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", MAKERS)
def test_an_empty_folder_is_refused(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent"):
        outcome = silotune("import-data", kind, source, "--to", tmp_path / "data")
        outcome.refusal()
    assert "unknown kind of data 'gleu'" in silotune("import-data", "gleu", tmp_path, "--to", tmp_path / "data").err


def tarred(path: Path, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def zipped(path: Path, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text.encode("latin-1"))


def clones(folder: Path) -> None:
    """The sources of mixed6 and sentiment5 with two rows a task, in the layouts of their authors."""
    tweets = ",count,hate_speech,offensive_language,neither,class,tweet\n0,3,0,0,3,2,fine\n1,3,0,3,0,1,rude\n"
    written(folder / "hate-speech-and-offensive-language" / "data" / "labeled_data.csv", tweets)
    written(folder / "OLID" / "olid-training-v1.0.tsv", 'id\ttweet\tsubtask_a\n1\t"rude\tOFF\n')
    written(folder / "OLID" / "testset-levela.tsv", "id\ttweet\n7\tfine\n")
    written(folder / "OLID" / "labels-levela.csv", "7,NOT\n")
    corpora = folder / "nltk_data" / "packages" / "corpora"
    zipped(corpora / "qc.zip", {"qc/train.txt": "NUM:count How many ?\n", "qc/test.txt": "LOC:city Wh\xe8re ?\n"})
    sentences = {"subjectivity/plot.tok.gt9.5000": "he goes . \n", "subjectivity/quote.tok.gt9.5000": "it drags . \n"}
    zipped(corpora / "subjectivity.zip", sentences)
    for split, text in (("train", "good\t1\n"), ("dev", "bad\t0\n")):
        written(folder / "pytorch-sentiment-classification" / "data" / "SST2" / f"{split}.tsv", text)
    mails = folder / "CCS5600_LingSpam_NaiveBayes_Repository" / "data" / "lingspam_public" / "bare"
    written(mails / "part1" / "3-1msg1.txt", " ham\xe9", "latin-1")
    written(mails / "part10" / "spmsga1.txt", "s" * 2000)
    for name, label in (("neg/0_2.txt", "dull<br />film"), ("pos/1_9.txt", "p" * 2000)):
        written(folder / "AMLM" / "data" / "aclImdb" / "train" / name, label)
    rated = "1\t-0.5\tmeh\n2\t1.25\tgreat \n"
    kinds = ("amazonReviewSnippets", "movieReviewSnippets", "nytEditorialSnippets", "tweets")
    files = {f"hutto_ICWSM_2014/{kind}_GroundTruth.txt": rated for kind in kinds}
    tarred(folder / "vaderSentiment" / "additional_resources" / "hutto_ICWSM_2014.tar.gz", files)


RATED = [("great", 1), ("meh", 0)]
CHOSEN = {
    "hate": [("rude", 1), ("fine", 2)],
    "offensive": [("fine", 0), ('"rude', 1)],
    "question_type": [("Wh\xe8re ?", 4), ("How many ?", 5)],
    "sentiment": [("bad", 0), ("good", 1)],
    "spam": [("s" * 1500, 1), ("ham\xe9", 0)],
    "subjectivity": [("it drags .", 1), ("he goes .", 0)],
    "imdb": [("p" * 1500, 1), ("dull film", 0)],
    **dict.fromkeys(("amazon", "movie_snippets", "nyt_editorials", "tweets"), RATED),
}


@pytest.mark.parametrize("kind", published.SOURCES)
def test_chosen_rows_come_in_their_order_from_cloned_sources(kind, silotune: Silotune, tmp_path, monkeypatch) -> None:
    clones(tmp_path / "source")
    wanted = {task: [published.row_hash(*row) for row in rows] for task, rows in CHOSEN.items()}
    monkeypatch.setattr(published, "wanted_rows", lambda _, task: {"train": wanted[task]})
    outcome = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    assert (outcome.code, outcome.err) == (0, "")
    for task, source in published.SOURCES[kind].items():
        read = read_folder(tmp_path / "data", task)
        assert [(*row.texts, row.label) for row in read.splits.train] == CHOSEN[task]
        card = json.loads((tmp_path / "data" / task / "meta.json").read_text())
        assert (card["commit"], card["license"]) == (source.commit, source.license)
    monkeypatch.undo()
    assert silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "more").code == 2  # other rows


def test_a_source_that_is_not_there_is_named(silotune: Silotune, tmp_path) -> None:
    outcome = silotune("import-data", "sentiment5", tmp_path, "--to", tmp_path / "data")
    assert outcome.code == 2
    assert "git clone https://github.com/cjhutto/vaderSentiment (commit 44fc044c" in " ".join(outcome.err.split())


def test_lists_of_hashes_are_small_and_of_all_tasks() -> None:
    for kind, tasks in published.SOURCES.items():
        for task in tasks:
            assert min(map(len, published.wanted_rows(kind, task).values())) >= 500
