"""Data sets in the layouts that their authors distribute, made here in small, and what is wrong with such folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from silotune.data.folders import read_folder
from silotune.data.rows import known_text
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


def glue(folder: Path) -> None:
    files = {
        "SST-2": ("sentence\tlabel\n", 'a "bad film \t0\n', "good\t1\n"),
        "CoLA": ("", "gj04\t1\t\tIt is.\n", "gj04\t0\t*\tIs it it.\n"),
        "MRPC": (
            "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n",
            "1\t7\t8\tone\ttwo\r\n",
            "0\t7\t9\tone\tten\r\n",
        ),
        "RTE": ("index\tsentence1\tsentence2\tlabel\n", "0\ta\tb\tnot_entailment\n", "1\tc\td\tentailment\n"),
        "QNLI": ("index\tquestion\tsentence\tlabel\n", "0\twho?\tI\tentailment\n", "1\twho?\tso\tnot_entailment\n"),
        "QQP": (
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n",
            "1\t2\t3\thow?\twhy?\t0\n4\t5\t6\tcut\n",
            "1\t2\t3\thow?\thow\t1\n",
        ),
        "MNLI": (
            "index\tsentence1\tsentence2\tlabel1\tgold_label\n",
            "0\tp\th\tneutral\tcontradiction\n",
            "0\tp\th\tentailment\tneutral\n",
        ),
        "STS-B": ("index\tsource1\tsentence1\tsentence2\tscore\n", "0\tx\ta\tb\t4.250\n", "0\tx\tc\td\t0\n"),
    }
    for name, (header, train, dev) in files.items():
        written(folder / name / "train.tsv", header + train)
        written(folder / name / ("dev_matched.tsv" if name == "MNLI" else "dev.tsv"), header + dev)


def imdb(folder: Path) -> None:
    for split in ("train", "test"):
        written(folder / split / "neg" / "0_1.txt", f"{split} was<br />bad")
        written(folder / split / "pos" / "0_9.txt", f"{split} was good")


def offenseval(folder: Path) -> None:
    head = "id\ttweet\tsubtask_a\tsubtask_b\tsubtask_c\n"
    written(folder / "olid-training-v1.0.tsv", head + "1\tgo home\tOFF\tTIN\tIND\n2\thello\tNOT\tNULL\tNULL\n")
    written(folder / "testset-levela.tsv", "id\ttweet\n8\tbye\n9\tyou\n")
    written(folder / "labels-levela.csv", "9,OFF\n8,NOT\n")


def enron(folder: Path) -> None:
    for n in range(12):
        for name in ("ham", "spam"):
            written(folder / f"enron{n % 2 + 1}" / name / f"{n}.txt", f"{name} für {n // 2}", "latin-1")


def lingspam(folder: Path) -> None:
    for part in range(1, 11):
        written(folder / "lingspam_public" / "bare" / f"part{part}" / "3-1msg1.txt", f"ham {part}")
        written(folder / "lingspam_public" / "bare" / f"part{part}" / "spmsga1.txt", f"spam\0{part}")


MAKERS: dict[str, Callable[[Path], None]] = {
    maker.__name__: maker for maker in (feddpa, glue, imdb, offenseval, enron, lingspam)
}
EXPECTED = {
    "snli": {"train": [(("snli\u2028say 0", ""), "0"), (("snli\u2028say 1", ""), "1"), (("snli\u2028say 2", ""), "2")]},
    "cola": {"test": [(("cola\u2028say 0", ""), "0"), (("cola\u2028say 1", ""), "1")]},
    "qnli": {"test": [(("qnli\u2028say 0", ""), "0"), (("qnli\u2028say 1", ""), "1")]},
    "SST-2": {"train": [(('a "bad film ',), "negative")], "validation": [(("good",), "positive")]},
    "CoLA": {"train": [(("It is.",), "acceptable")], "validation": [(("Is it it.",), "unacceptable")]},
    "MRPC": {"train": [(("one", "two"), "equivalent")], "validation": [(("one", "ten"), "not_equivalent")]},
    "RTE": {"train": [(("a", "b"), "not_entailment")], "validation": [(("c", "d"), "entailment")]},
    "QNLI": {"train": [(("who?", "I"), "entailment")], "validation": [(("who?", "so"), "not_entailment")]},
    "QQP": {"train": [(("how?", "why?"), "not_duplicate")], "validation": [(("how?", "how"), "duplicate")]},
    "MNLI": {"train": [(("p", "h"), "contradiction")], "validation": [(("p", "h"), "neutral")]},
    "STS-B": {"train": [(("a", "b"), "4.25")], "validation": [(("c", "d"), "0")]},
    "imdb": {"test": [(("test was bad",), "negative"), (("test was good",), "positive")]},
    "offenseval": {
        "train": [(("go home",), "OFF"), (("hello",), "NOT")],
        "test": [(("bye",), "NOT"), (("you",), "OFF")],
    },
    "lingspam": {"test": [((f"{kind} {part}",), kind) for part in (9, 10) for kind in ("ham", "spam")]},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_rows_and_labels_are_those_of_the_files(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / "source")
    outcome = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    assert (outcome.code, outcome.err) == (0, "")
    tasks = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert len(tasks) == {"feddpa": 3, "glue": 8}.get(kind, 1)
    for task in tasks:
        found = read_folder(tmp_path / "data", task)
        for split, rows in EXPECTED.get(task, {}).items():
            assert [(row.texts, known_text(found.task, row)) for row in getattr(found.splits, split)] == rows
    assert ("1 lines that lack columns are left out" in outcome.out) == (kind == "glue")
    again = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    assert (again.code, len(again.err.splitlines())) == (2, 1)
    assert "already; choose another folder" in again.err


def test_equal_mails_are_on_one_side(silotune: Silotune, tmp_path: Path) -> None:
    enron(tmp_path / "source")
    assert silotune("import-data", "enron", tmp_path / "source", "--to", tmp_path / "data").code == 0
    found = read_folder(tmp_path / "data", "enron").splits
    train, test = ({row.texts[0] for row in rows} for rows in (found.train, found.test))
    assert "ham für 0" in train | test
    assert train.isdisjoint(test)
    assert (len(found.train) + len(found.test), bool(found.test)) == (24, True)


OTHER_TASK = '{"instruction": "a", "output": "b", "task": "c"}'
PATH_AS_TASK = '[{"instruction": "a", "output": "b", "task": "../c"}]'
RTE = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    ("kind", "file", "text", "said"),
    [
        ("feddpa", f"data/dataset1/{TEST_FILE}", "{", "not JSON"),
        ("feddpa", f"data/dataset1/{TEST_FILE}", '{"instruction": "a"}', "row 1: needs the texts"),
        ("feddpa", f"data/dataset2/{TEST_FILE}", OTHER_TASK, "no row of task 'qnli'"),
        ("feddpa", "data/dataset2/8/local_training_0.json", PATH_AS_TASK, "cannot be a name"),
        ("glue", "RTE/train.tsv", "index\tsentence1\tlabel\n", "no column 'sentence2'"),
        ("glue", "RTE/train.tsv", f"{RTE}0\ta\n", "line 2: 2 columns instead of 4"),
        ("glue", "RTE/dev.tsv", f"{RTE}0\ta\tb\tyes\n", "line 2: label 'yes'; allowed: ent"),
        ("offenseval", "labels-levela.csv", "8,NOT\n", "no label of id '9'"),
        ("imdb", "train/pos/0_9.txt", "caf\udce9", "not utf-8"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    kind: str, file: str, text: str, said: str, silotune: Silotune, tmp_path: Path
) -> None:
    MAKERS[kind](tmp_path / "source")
    (tmp_path / "source" / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    outcome = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert said in outcome.err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", MAKERS)
def test_an_empty_folder_is_refused(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent"):
        outcome = silotune("import-data", kind, source, "--to", tmp_path / "data")
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "unknown kind of data 'gleu'" in silotune("import-data", "gleu", tmp_path, "--to", tmp_path / "data").err
