"""The commands before any training: `silotune partition` and `import-data`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from silotune.cli.console import JsonOption, Overrides, Source, console, new_table, say
from silotune.core.files import make_folder
from silotune.errors import InputError, file_errors, require_known
from silotune.lab.published import SOURCES, chosen_rows

Record = dict[str, Any]
"""A row: column → cell."""


@dataclass(frozen=True)
class PublishedTask:
    """A task as it was published: its folder's name, its splits, its label names, if rows have labels, and its card."""

    name: str
    splits: Mapping[str, Sequence[Record]]
    labels: Sequence[str] = ()
    card: Mapping[str, Any] = field(default_factory=dict)


def read_feddpa(source: Path) -> list[PublishedTask]:
    """Read the authors' `data/dataset1` and `dataset2`, or one of them: eight silos' files and a test file each."""
    import pandas

    from silotune.config.validators import NAME_RULE, is_name

    tests = sorted(source.rglob("flan_test_200_selected_nstrict_1.jsonl"))
    if not tests:
        raise InputError(
            f"{source}: no flan_test_200_selected_nstrict_1.jsonl in it or below, as Lydia-yang/FedDPA has"
        )
    tasks: list[PublishedTask] = []
    for test in tests:
        tested = pandas.read_json(test, lines=True, dtype=False, convert_dates=False)
        for file in sorted((test.parent / "8").glob("local_training_*.json")):
            for name, trained in pandas.read_json(file, dtype=False, convert_dates=False).groupby("task"):
                if not is_name(str(name)):
                    raise InputError(f"{file}: task {name!r} cannot be a name; allowed: {NAME_RULE}")
                splits = {"train": trained, "test": tested[tested["task"] == name]}
                records = {
                    split: rows.assign(input="")[["instruction", "input", "output"]].to_dict("records")
                    for split, rows in splits.items()
                }
                tasks.append(PublishedTask(str(name), records))
    return tasks


def read_lingspam(source: Path) -> list[PublishedTask]:
    """Read `lingspam_public/bare` (or the folder with `part1` to `part10`): parts 9 and 10 are tested.

    Files whose names begin with spmsg are spam; the names of the others begin with numbers.
    """
    places = (source, source / "bare", source / "lingspam_public" / "bare")
    place = next((path for path in places if (path / "part1").is_dir()), None)
    if place is None:
        raise InputError(f"{source}: no part1 in it, in bare or in lingspam_public/bare")

    def rows(parts: Iterable[int]) -> list[Record]:
        files = [(label, file) for part in parts for label in (0, 1) for file in _mails(place / f"part{part}", label)]
        texts = [(label, file.read_text(encoding="latin-1").replace("\0", " ")) for label, file in files]
        return [{"sentence1": text, "label": label} for label, text in texts if text.strip()]

    return [PublishedTask("lingspam", {"train": rows(range(1, 9)), "test": rows((9, 10))}, ("ham", "spam"))]


def _mails(folder: Path, label: int) -> list[Path]:
    files = sorted(folder.glob(("[!s]*.txt", "spmsg*.txt")[label]))
    if not files:
        raise InputError(f"{folder}: no {('ham', 'spam')[label]} there")
    return files


def read_chosen(kind: str, source: Path) -> list[PublishedTask]:
    """Read the rows of mixed6 or sentiment5 from the folder in which their sources were cloned."""
    return [
        PublishedTask(name, dict(chosen_rows(kind, name, source)), of_task.labels, of_task.card)
        for name, of_task in SOURCES[kind].items()
    ]


PUBLISHED: dict[str, Callable[[Path], list[PublishedTask]]] = {
    "feddpa": read_feddpa,
    "lingspam": read_lingspam,
    **{kind: partial(read_chosen, kind) for kind in SOURCES},
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
        with file_errors(f"--to {folder}: cannot be written"):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if task.labels:
                meta = json.dumps({"label_names": list(task.labels), **task.card})
                (unfinished / "meta.json").write_text(meta + "\n", encoding="utf-8")
            for split, rows in task.splits.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (unfinished / f"{split}.jsonl").write_text(lines, encoding="utf-8")
            unfinished.replace(folder / task.name)


def partition(
    source: Source,
    overrides: Overrides = None,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Write a heatmap of silo × label as PNG.", metavar="PNG")] = None,
) -> None:
    """Show how a setting's data set is divided among silos."""
    from silotune.lab.partition import checked_picture
    from silotune.lab.partition import partition as divide

    picture = None if out is None else checked_picture(out)
    divided = divide(source, *(overrides or []))
    if picture is not None:
        divided.plot(picture)
    if as_json:
        typer.echo(json.dumps(divided.as_json(), indent=1))
        return
    table = new_table(divided.title, ["silo"], (*divided.labels, "rows"))
    for cells in divided.texts():
        table.add_row(*cells)
    table.add_section()
    totals = [sum(column) for column in zip(*divided.counts.values(), strict=True)]
    table.add_row("all", *(f"{number:,}" for number in (*totals, divided.rows)))
    console.print(table)
    say(f"for all silos together: {divided.validation:,} validation and {divided.test:,} test rows")
    if picture is not None:
        say(f"heatmap: {picture}")


def import_data(
    kind: Annotated[str, typer.Argument(help="feddpa, lingspam, mixed6 or sentiment5.", metavar="KIND")],
    source: Annotated[Path, typer.Argument(help="The folder as it was downloaded and unpacked.", metavar="SOURCE")],
    to: Annotated[Path, typer.Option("--to", help="The folder for data.path; other tasks in it stay.")],
) -> None:
    """Convert a data set that the hub lacks, as its authors distribute it, into folders of tasks for data.path."""
    require_known("kind of data", kind, PUBLISHED)
    tasks = PUBLISHED[kind](source)
    write_tasks(tasks, to)
    for task in tasks:
        rows = ", ".join(f"{len(records):,} {split}" for split, records in task.splits.items())
        say(f"{to / task.name}: {rows}")
    say(f"use it with data.path={to}")
