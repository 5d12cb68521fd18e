"""Runs the cells of a table that are not finished yet: one after another over one backbone, or in processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.config import Config, dump
from silotune.core.process_pool import worker_pool
from silotune.errors import Diverged, InputError
from silotune.experiments.comparison import Cell
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.resolve import BackboneRequirements, make_method, on_this_machine
from silotune.runs.engines.base import Progress
from silotune.runs.run import run
from silotune.runs.storage.run_folder import difference

Summary = dict[str, Any]

_Found = Summary | Diverged

Bars = Callable[[str, int], Progress]
"""(title, rounds) → where one run's progress goes."""

Done = Callable[[Cell, Summary], None]

Announce = Callable[[str], None]
"""Is told what the noise of a cell promises, before its first round; processes need it by name."""

Work = Callable[[Config, Path, Progress | None, Backbone | None, Announce | None], tuple[Summary, Backbone]]
"""(configuration, folder, progress, a backbone that fits, announce) → what was found, the backbone for the next."""


@dataclass(frozen=True)
class CellKind:
    """What is done in a cell, and the file it leaves last. `work` goes on where it was interrupted."""

    work: Work
    file: str

    def read(self, folder: Path) -> Summary:
        """What a finished cell found.

        Raises:
            InputError: it is not finished, or damaged.
        """
        try:
            return dict(json.loads((folder / self.file).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}/{self.file}: missing or damaged") from error


def _whole_run(
    config: Config, folder: Path, progress: Progress | None, backbone: Backbone | None, announce: Announce | None
) -> tuple[Summary, Backbone]:
    def of_cell(line: str) -> None:
        if announce is not None:
            announce(f"{folder.name}: {line}")

    finished = run(config, out=folder, resume=True, progress=progress, backbone=backbone, announce=of_cell)
    return finished.summary, finished.federation.backbone


RUN = CellKind(_whole_run, "summary.json")


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    kind: CellKind = RUN,
    workers: int = 1,
    bars: Bars | None = None,
    done: Done | None = None,
    announce: Announce | None = None,
) -> dict[str, Summary]:
    """Run what is left, and return every cell's summary by folder name.

    A cell is finished once its last file is there; it is then never run again. One that was interrupted goes on
    from its last checkpoint.

    Args:
        cells: of one comparison.
        out: where the run folders are.
        kind: whole runs, or something else.
        workers: processes; each loads the backbone once.
        bars: progress of each run (only with one worker).
        done: called after every cell that was run now.
        announce: told what the noise of a cell promises, before its first round.

    Raises:
        InputError: a run folder was made with another configuration, or a configuration cannot work.
        Diverged: naming the cells whose training diverged, once all others are finished.
    """
    left = [cell for cell in cells if not _finished(cell, out, kind)]
    done = done or (lambda *_: None)
    processes = min(workers, len(left))
    outcomes = (
        _in_processes(left, out, kind, processes, announce) if processes > 1 else _here(left, out, kind, bars, announce)
    )
    diverged = {}
    for cell, found in outcomes:
        if isinstance(found, Diverged):
            diverged[cell.folder] = found
        else:
            done(cell, found)
    if diverged:
        told = "; ".join(f"{out / cell.folder}: {diverged[cell.folder]}" for cell in left if cell.folder in diverged)
        raise Diverged(f"{len(diverged)} of {len(cells)} cells diverged, the others are finished: {told}")
    return {cell.folder: kind.read(out / cell.folder) for cell in cells}


def _finished(cell: Cell, out: Path, kind: CellKind) -> bool:
    folder = out / cell.folder
    if not (folder / "config.yaml").is_file():
        return False
    config = on_this_machine(cell.config)  # as a run writes it
    before, now = (folder / "config.yaml").read_text(encoding="utf-8"), dump(config)
    if before != now:
        where = difference(before, now)
        raise InputError(f"{folder}: was made with another configuration ({where}); choose another --out")
    return (folder / kind.file).exists()


def _here(
    cells: Sequence[Cell], out: Path, kind: CellKind, bars: Bars | None, announce: Announce | None
) -> Iterator[tuple[Cell, _Found]]:
    backbones = _Backbones()
    for cell in cells:
        progress = bars(cell.folder, cell.config.rounds) if bars else None
        yield cell, backbones.run(kind, cell.config, out / cell.folder, progress, announce)


class _Backbones:
    """Keeps the backbone of the last run for the next, where it fits."""

    def __init__(self) -> None:
        self._needs: BackboneRequirements | None = None
        self._backbone: Backbone | None = None

    def run(
        self, kind: CellKind, config: Config, folder: Path, progress: Progress | None, announce: Announce | None
    ) -> _Found:
        """One cell."""
        needs = BackboneRequirements.of(config, make_method(config))
        if needs != self._needs:
            self._backbone = None  # before another is loaded
        try:
            summary, backbone = kind.work(config, folder, progress, self._backbone, announce)
        except Diverged as error:
            return Diverged(str(error))  # without its traceback, which keeps the run in memory
        self._needs, self._backbone = needs, backbone
        return summary


_OWN = _Backbones()  # of a worker process


def _in_processes(
    cells: Sequence[Cell], out: Path, kind: CellKind, workers: int, announce: Announce | None
) -> Iterator[tuple[Cell, _Found]]:
    with worker_pool(workers) as pool:
        waiting = {pool.submit(_work, kind, cell.config, out / cell.folder, announce): cell for cell in cells}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _work(kind: CellKind, config: Config, folder: Path, announce: Announce | None) -> _Found:
    return _OWN.run(kind, config, folder, None, announce)
