"""Convert data sets from the folders that their authors distribute to folders of `data.path` (docs/data.md)."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import make_folder
from silotune.data.readers import Record
from silotune.data.targets import read_number
from silotune.errors import InputError


@dataclass(frozen=True)
class PublishedTask:
    """A task as it was published: its folder's name, its splits and its `meta.json`, empty where it needs none.

    `left_out` counts rows that lack columns, as a few of QQP's.
    """

    name: str
    splits: Mapping[str, Sequence[Record]]
    meta: Mapping[str, Any]
    left_out: int = 0


def _labeled(name: str, labels: Sequence[str], **splits: Sequence[Record]) -> list[PublishedTask]:
    """Return the only task of a data set whose rows have labels."""
    return [PublishedTask(name, splits, {"label_names": list(labels)})]


def read_feddpa(source: Path) -> list[PublishedTask]:
    """Read the authors' `data/dataset1` and `dataset2`, or one of them: eight silos' files and a test file each."""
    tests = sorted(source.rglob("flan_test_200_selected_nstrict_1.jsonl"))
    if not tests:
        raise InputError(
            f"{source}: no flan_test_200_selected_nstrict_1.jsonl in it or below, as Lydia-yang/FedDPA has"
        )
    tasks: list[PublishedTask] = []
    for test in tests:
        files = sorted((test.parent / "8").glob("local_training_*.json"))
        if not files:
            raise InputError(f"{test.parent / '8'}: no local_training_*.json")
        tested = _by_task(test, [_parsed(test, line) for line in _text(test).split("\n") if line.strip()])
        for file in files:
            for name, rows in _by_task(file, _parsed(file, _text(file))).items():
                if name not in tested:
                    raise InputError(f"{test}: no row of task {name!r}, which {file.name} trains")
                tasks.append(PublishedTask(name, {"train": rows, "test": tested[name]}, {}))
    return tasks


def _by_task(path: Path, rows: Any) -> dict[str, list[Record]]:
    keys = ("instruction", "output", "task")
    tasks: dict[str, list[Record]] = {}
    for number, row in enumerate(rows if isinstance(rows, list) else [None], start=1):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
            raise InputError(f"{path}: row {number}: needs the texts {', '.join(keys)}")
        if not is_name(row["task"]):
            raise InputError(f"{path}: row {number}: task {row['task']!r} cannot be a name; allowed: {NAME_RULE}")
        tasks.setdefault(row["task"], []).append(
            {"instruction": row["instruction"], "input": "", "output": row["output"]}
        )
    return tasks


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from error


@dataclass(frozen=True)
class _Glue:
    """Columns of a task's TSV files, and its labels as the files have them and as silotune names them, by index.

    Without labels the column holds numbers. `whole` is false where lines that lack columns are left out.
    """

    texts: tuple[str, ...]
    label: str
    written: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    validation: str = "dev.tsv"
    header: tuple[str, ...] | None = None
    whole: bool = True


_NUMBERED = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_GLUE = {
    "SST-2": _Glue(("sentence",), "label", _NUMBERED, ("negative", "positive")),
    "CoLA": _Glue(
        ("sentence",), "label", _NUMBERED, ("unacceptable", "acceptable"),
        header=("source", "label", "star", "sentence"),
    ),
    "MRPC": _Glue(("#1 String", "#2 String"), "Quality", _NUMBERED, ("not_equivalent", "equivalent")),
    "RTE": _Glue(("sentence1", "sentence2"), "label", _ENTAILMENT, _ENTAILMENT),
    "QNLI": _Glue(("question", "sentence"), "label", _ENTAILMENT, _ENTAILMENT),
    "QQP": _Glue(("question1", "question2"), "is_duplicate", _NUMBERED, ("not_duplicate", "duplicate"), whole=False),
    "STS-B": _Glue(("sentence1", "sentence2"), "score"),
    "MNLI": _Glue(
        ("sentence1", "sentence2"), "gold_label", *(("entailment", "neutral", "contradiction"),) * 2,
        validation="dev_matched.tsv",
    ),
}  # fmt: skip
"""GLUE's folder → its files. A few lines of QQP lack columns; its usual readers leave them out, too."""


def read_glue(source: Path) -> list[PublishedTask]:
    """Read the tasks that a folder of GLUE's download holds: seven of classification, and STS-B."""
    found = {name: about for name, about in _GLUE.items() if (source / name / "train.tsv").is_file()}
    if not found:
        raise InputError(f"{source}: no train.tsv in any of its folders {', '.join(_GLUE)}")
    tasks = []
    for name, about in found.items():
        splits: dict[str, list[Record]] = {}
        left_out = 0
        for split, file in {"train": "train.tsv", "validation": about.validation}.items():
            path = source / name / file
            lines, short = _table(path, (*about.texts, about.label), about.header, about.whole)
            splits[split] = [_glue_row(path, number, row, about) for number, row in lines]
            left_out += short
        meta = {"label_names": about.labels} if about.labels else {"kind": "regression"}
        tasks.append(PublishedTask(name, splits, meta, left_out))
    return tasks


def _glue_row(path: Path, line: int, row: Mapping[str, str], about: _Glue) -> Record:
    label = row[about.label]
    known = (
        _index(path, line, label, about.written)
        if about.labels
        else read_number(label, f"{path}: line {line}: {about.label!r}")
    )
    return {f"sentence{n}": row[column] for n, column in enumerate(about.texts, start=1)} | {"label": known}


def _table(
    path: Path, columns: Sequence[str], header: Sequence[str] | None = None, whole: bool = True
) -> tuple[list[tuple[int, dict[str, str]]], int]:
    """Return the rows of a TSV file with their line numbers, and the number of lines left out as they lack columns.

    Quotation marks mean nothing in these files. Unless lines may be left out, one that lacks columns is an error.
    """
    lines = [line.split("\t") for line in _text(path).split("\n") if line]
    names = list(header or (lines.pop(0) if lines else []))
    missing = [column for column in columns if column not in names]
    if missing:
        raise InputError(f"{path}: no column {missing[0]!r}; there: {', '.join(names)}")
    rows = [(number, cells) for number, cells in enumerate(lines, start=1 if header else 2)]
    short = [(number, len(cells)) for number, cells in rows if len(cells) != len(names)]
    if short and whole:
        raise InputError(f"{path}: line {short[0][0]}: {short[0][1]} columns instead of {len(names)}")
    complete = [(number, dict(zip(names, cells, strict=True))) for number, cells in rows if len(cells) == len(names)]
    return complete, len(short)


def _index(path: Path, line: int, label: str, known: tuple[str, ...]) -> int:
    if label not in known:
        raise InputError(f"{path}: line {line}: label {label!r}; allowed: {', '.join(known)}")
    return known.index(label)


def read_imdb(source: Path) -> list[PublishedTask]:
    """Read `aclImdb`: a file a review in `{train,test}/{neg,pos}`."""
    train, test = (
        [row | {"sentence1": row["sentence1"].replace("<br />", " ")} for row in _mails(source / split, ("neg", "pos"))]
        for split in ("train", "test")
    )
    return _labeled("imdb", ("negative", "positive"), train=train, test=test)


def read_offenseval(source: Path) -> list[PublishedTask]:
    """Read OLID's level A: `olid-training-v1.0.tsv`, `testset-levela.tsv` and `labels-levela.csv`."""
    labels = ("NOT", "OFF")
    path, test, gold = (source / name for name in ("olid-training-v1.0.tsv", "testset-levela.tsv", "labels-levela.csv"))
    train = [
        {"sentence1": row["tweet"], "label": _index(path, number, row["subtask_a"], labels)}
        for number, row in _table(path, ("tweet", "subtask_a"))[0]
    ]
    answers = dict(cells for cells in csv.reader(io.StringIO(_text(gold))) if len(cells) == 2)
    tested = []
    for number, row in _table(test, ("id", "tweet"))[0]:
        if row["id"] not in answers:
            raise InputError(f"{gold}: no label of id {row['id']!r}, which {test.name} has")
        tested.append({"sentence1": row["tweet"], "label": _index(gold, number, answers[row["id"]], labels)})
    return _labeled("offenseval", labels, train=train, test=tested)


def read_enron(source: Path) -> list[PublishedTask]:
    """Read `enron1` to `enron6`, each with `ham` and `spam`, a file a mail.

    They have no test split: a mail is tested if the sha256 of its text is divisible by 5, so that equal mails are on
    one side.
    """
    folders = [folder for folder in sorted(source.glob("enron[1-6]")) if folder.is_dir()]
    if not folders:
        raise InputError(f"{source}: no folder enron1 to enron6")
    sides: tuple[list[Record], list[Record]] = ([], [])
    for row in (row for folder in folders for row in _mails(folder, ("ham", "spam"), encoding="latin-1")):
        tested = int.from_bytes(hashlib.sha256(row["sentence1"].encode()).digest()) % 5 == 0
        sides[tested].append(row)
    return _labeled("enron", ("ham", "spam"), train=sides[0], test=sides[1])


def read_lingspam(source: Path) -> list[PublishedTask]:
    """Read `lingspam_public/bare` (or the folder with `part1` to `part10`): parts 9 and 10 are tested.

    Files whose names begin with spmsg are spam; the names of the others begin with numbers.
    """
    places = (source, source / "bare", source / "lingspam_public" / "bare")
    place = next((path for path in places if (path / "part1").is_dir()), None)
    if place is None:
        raise InputError(f"{source}: no part1 in it, in bare or in lingspam_public/bare")

    def rows(parts: Iterable[int]) -> list[Record]:
        patterns = ("[!s]*.txt", "spmsg*.txt")
        return [row for part in parts for row in _mails(place / f"part{part}", patterns, "", "latin-1")]

    return _labeled("lingspam", ("ham", "spam"), train=rows(range(1, 9)), test=rows((9, 10)))


def _mails(folder: Path, labels: Sequence[str], pattern: str = "/*.txt", encoding: str = "utf-8") -> list[Record]:
    """Return the rows of a folder with a file for each text, label after label, in the order of their names.

    A label's files begin with it and end as `pattern` says. Empty texts are left out; NULs become blanks.
    """
    rows = []
    for number, label in enumerate(labels):
        files = sorted(folder.glob(label + pattern))
        if not files:
            raise InputError(f"{folder}: no {label + pattern} there")
        texts = (_text(file, encoding).replace("\0", " ") for file in files)
        rows += [{"sentence1": text, "label": number} for text in texts if text.strip()]
    return rows


def _text(path: Path, encoding: str = "utf-8-sig") -> str:
    try:
        return path.read_bytes().decode(encoding).replace("\r\n", "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not {error.encoding} (byte {error.start})") from error


PUBLISHED: dict[str, Callable[[Path], list[PublishedTask]]] = {
    "feddpa": read_feddpa,
    "glue": read_glue,
    "imdb": read_imdb,
    "offenseval": read_offenseval,
    "enron": read_enron,
    "lingspam": read_lingspam,
}
"""Kind → reader of the folder that was downloaded and unpacked."""


def write_tasks(tasks: Sequence[PublishedTask], folder: Path) -> None:
    """Write a folder for each task, which is there only if it is whole; other tasks in the folder stay."""
    for task in tasks:
        if (folder / task.name).exists():
            raise InputError(f"--to {folder}: has a {task.name} already; choose another folder")
    make_folder(folder, f"--to {folder}")
    for task in tasks:
        unfinished = folder / f".{task.name}.tmp"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if task.meta:
                (unfinished / "meta.json").write_text(json.dumps(task.meta) + "\n", encoding="utf-8")
            for split, rows in task.splits.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (unfinished / f"{split}.jsonl").write_text(lines, encoding="utf-8")
            unfinished.replace(folder / task.name)
        except OSError as error:
            raise InputError(f"--to {folder}: cannot be written ({error.strerror})") from error
