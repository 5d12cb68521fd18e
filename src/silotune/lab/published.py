"""`read_published` reads data sets as their authors distribute them as `PublishedTask`s (`PUBLISHED`: their kinds)."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import make_folder
from silotune.data.readers import Record
from silotune.data.targets import read_number
from silotune.errors import InputError


@dataclass(frozen=True)
class PublishedTask:
    """A task as it was published, in the columns of `data.path` (docs/data.md).

    Args:
        name: name of its folder.
        splits: train, validation or test → records.
        labels: label names by index; empty for instructions and numbers.
        left_out: rows that are not there whole, as a few of QQP's.
        numbers: whether `label` holds numbers to be predicted.
    """

    name: str
    splits: Mapping[str, Sequence[Record]]
    labels: tuple[str, ...] = ()
    left_out: int = field(default=0)
    numbers: bool = False

    @property
    def meta(self) -> dict[str, Any]:
        """The content of its `meta.json`; empty where it needs none."""
        if self.numbers:
            return {"kind": "regression"}
        return {"label_names": self.labels} if self.labels else {}


Reader = Callable[[Path], list[PublishedTask]]


def read_published(kind: str, source: Path) -> list[PublishedTask]:
    """Read a published data set.

    Args:
        kind: key of `PUBLISHED`.
        source: the folder as it was downloaded and unpacked.
    """
    if not source.is_dir():
        raise InputError(f"{source}: is not a folder; give the one that was unpacked")
    return PUBLISHED[kind](source)


# -- FedDPA ------------------------------------------------------------------------------------------------------------


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
                tasks.append(PublishedTask(name, {"train": rows, "test": tested[name]}))
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


# -- GLUE --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Glue:
    """Columns of a task's TSV files, and its labels as the files have them and as silotune names them, by index.

    Without labels the column holds numbers.
    """

    texts: tuple[str, ...]
    label: str
    written: tuple[str, ...]
    labels: tuple[str, ...]
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
    "STS-B": _Glue(("sentence1", "sentence2"), "score", (), ()),
    "MNLI": _Glue(
        ("sentence1", "sentence2"), "gold_label", *(("entailment", "neutral", "contradiction"),) * 2,
        validation="dev_matched.tsv",
    ),
}  # fmt: skip
"""GLUE's folder → its files. A few lines of QQP lack columns; its usual readers leave them out, too."""


def read_glue(source: Path) -> list[PublishedTask]:
    """Read the tasks that a folder of GLUE's download holds, of its seven of classification and STS-B."""
    found = {name: about for name, about in _GLUE.items() if (source / name / "train.tsv").is_file()}
    if not found:
        raise InputError(f"{source}: no train.tsv in any of its folders {', '.join(_GLUE)}")
    tasks = []
    for name, about in found.items():
        files = {"train": source / name / "train.tsv", "validation": source / name / about.validation}
        splits = {split: _glue_rows(file, about) for split, file in files.items()}
        rows = {split: kept for split, (kept, _) in splits.items()}
        left_out = sum(short for _, short in splits.values())
        tasks.append(PublishedTask(name, rows, about.labels, left_out, numbers=not about.labels))
    return tasks


def _glue_rows(path: Path, about: _Glue) -> tuple[list[Record], int]:
    """Return the rows of a TSV file, whose quotation marks mean nothing, and the number of rows that lack columns."""
    lines = [line.split("\t") for line in _text(path).split("\n") if line]
    header = list(about.header) if about.header else lines.pop(0) if lines else []
    missing = [column for column in (*about.texts, about.label) if column not in header]
    if missing:
        raise InputError(f"{path}: no column {missing[0]!r}; there: {', '.join(header)}")
    places = [header.index(column) for column in about.texts]
    label = header.index(about.label)
    rows, short = [], 0
    for number, cells in enumerate(lines, start=1 if about.header else 2):
        if len(cells) != len(header):
            if about.whole:
                raise InputError(f"{path}: line {number}: {len(cells)} columns instead of {len(header)}")
            short += 1
            continue
        texts = {f"sentence{n}": cells[place] for n, place in enumerate(places, start=1)}
        where = f"{path}: line {number}: {about.label!r}"
        known = _index(path, number, cells[label], about.written) if about.labels else read_number(cells[label], where)
        rows.append(texts | {"label": known})
    return rows, short


def _index(path: Path, line: int, label: str, known: tuple[str, ...]) -> int:
    if label not in known:
        raise InputError(f"{path}: line {line}: label {label!r}; allowed: {', '.join(known)}")
    return known.index(label)


# -- FedPrompt's sets --------------------------------------------------------------------------------------------------


def read_imdb(source: Path) -> list[PublishedTask]:
    """Read `aclImdb`: a file a review in `{train,test}/{neg,pos}`."""
    labels = {"neg": 0, "pos": 1}
    splits = {
        split: [
            {"sentence1": text.replace("<br />", " "), "label": label}
            for folder, label in labels.items()
            for text in _texts(source / split / folder, "*.txt")
        ]
        for split in ("train", "test")
    }
    return [PublishedTask("imdb", splits, ("negative", "positive"))]


def read_offenseval(source: Path) -> list[PublishedTask]:
    """Read OLID's level A: `olid-training-v1.0.tsv`, `testset-levela.tsv` and `labels-levela.csv`."""
    labels = ("NOT", "OFF")
    path = source / "olid-training-v1.0.tsv"
    trained = [
        {"sentence1": row["tweet"], "label": _index(path, number, row["subtask_a"], labels)}
        for number, row in enumerate(_table(path, ("tweet", "subtask_a")), start=2)
    ]
    gold = source / "labels-levela.csv"
    answers = dict(cells for cells in csv.reader(io.StringIO(_text(gold))) if len(cells) == 2)
    path = source / "testset-levela.tsv"
    tested = []
    for number, row in enumerate(_table(path, ("id", "tweet")), start=2):
        if row["id"] not in answers:
            raise InputError(f"{gold}: no label of id {row['id']!r}, which {path.name} has")
        tested.append({"sentence1": row["tweet"], "label": _index(gold, number, answers[row["id"]], labels)})
    return [PublishedTask("offenseval", {"train": trained, "test": tested}, labels)]


def _table(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    lines = (line.split("\t") for line in _text(path).split("\n") if line)
    header = next(lines, [])
    missing = [column for column in columns if column not in header]
    if missing:
        raise InputError(f"{path}: no column {missing[0]!r}; there: {', '.join(header)}")
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(header):
            raise InputError(f"{path}: line {number}: {len(cells)} columns instead of {len(header)}")
        yield dict(zip(header, cells, strict=True))


def read_enron(source: Path) -> list[PublishedTask]:
    """Read `enron1` to `enron6`, each with `ham` and `spam`, a file a mail.

    They have no test split: a mail is tested if the sha256 of its text is divisible by 5, so that equal mails are on
    one side.
    """
    folders = [folder for folder in sorted(source.glob("enron[1-6]")) if folder.is_dir()]
    if not folders:
        raise InputError(f"{source}: no folder enron1 to enron6")
    splits: dict[str, list[Record]] = {"train": [], "test": []}
    for folder in folders:
        for label, name in enumerate(("ham", "spam")):
            for text in _texts(folder / name, "*.txt", "latin-1"):
                tested = int.from_bytes(hashlib.sha256(text.encode()).digest()) % 5 == 0
                splits["test" if tested else "train"].append({"sentence1": text, "label": label})
    return [PublishedTask("enron", splits, ("ham", "spam"))]


def read_lingspam(source: Path) -> list[PublishedTask]:
    """Read `lingspam_public/bare` (or the folder with `part1` to `part10`): parts 9 and 10 are tested.

    Files whose names begin with spmsg are spam.
    """
    folder = next(
        (path for path in (source, source / "bare", source / "lingspam_public" / "bare") if (path / "part1").is_dir()),
        None,
    )
    if folder is None:
        raise InputError(f"{source}: no part1 in it, in bare or in lingspam_public/bare")

    def rows(parts: Iterable[int]) -> list[Record]:
        return [
            {"sentence1": text, "label": label}
            for part in parts
            for label, pattern in enumerate(("[!s]*.txt", "spmsg*.txt"))  # ham's names begin with numbers
            for text in _texts(folder / f"part{part}", pattern, "latin-1")
        ]

    return [PublishedTask("lingspam", {"train": rows(range(1, 9)), "test": rows((9, 10))}, ("ham", "spam"))]


def _texts(folder: Path, pattern: str, encoding: str = "utf-8") -> list[str]:
    """Return the texts of a folder's files in the order of their names, without empty ones; NULs become blanks."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise InputError(f"{folder}: no {pattern} there")
    texts = (_text(file, encoding).replace("\0", " ") for file in files)
    return [text for text in texts if text.strip()]


def _text(path: Path, encoding: str = "utf-8-sig") -> str:
    try:
        return path.read_bytes().decode(encoding).replace("\r\n", "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not {error.encoding} (byte {error.start})") from error


PUBLISHED: dict[str, Reader] = {
    "feddpa": read_feddpa,
    "glue": read_glue,
    "imdb": read_imdb,
    "offenseval": read_offenseval,
    "enron": read_enron,
    "lingspam": read_lingspam,
}
"""Kind → reader."""


def write_tasks(tasks: Sequence[PublishedTask], folder: Path) -> None:
    """Write a folder for each task; none is there unless it is whole.

    Args:
        tasks: the tasks.
        folder: the data folder; other tasks in it stay.
    """
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
