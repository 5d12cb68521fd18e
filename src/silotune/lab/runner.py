"""Run the unfinished cells of a comparison or sweep, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from silotune.config import Config, dump
from silotune.core.determinism import numerics
from silotune.core.files import damage_named, read_json
from silotune.core.workers import Workers, end_unguarded_worker
from silotune.errors import Diverged, InputError, SilotuneError
from silotune.lab.comparison import Cell
from silotune.lab.shared_training import take_rounds, trained_by_others
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method, resolve
from silotune.runs.callbacks import Callback
from silotune.runs.callbacks.display import default_display
from silotune.runs.engines.multi_process import IMPORTS
from silotune.runs.run import run
from silotune.runs.storage.run_folder import RunFolder, continued
from silotune.training.federation import Federation

Summary = dict[str, Any]

_Outcome = Summary | Diverged

CallbackFactory = Callable[[str, int], Sequence[Callback]]
"""Makes the callbacks of one run from its title and its number of rounds."""

Announce = Callable[[str], None]
"""Called with the privacy guarantee of a cell before its first round, on a cluster after its last; must be importable
by name for processes."""


@dataclass(frozen=True)
class Listener:
    """What is called while many runs are done.

    Args:
        callbacks: makes the callbacks of a run; with one worker only.
        begin: called with the number of unfinished runs, before the first of them.
        done: called after every run, with its cell and summary.
        announce: called with every line about a run's privacy guarantee.
    """

    callbacks: CallbackFactory | None = None
    begin: Callable[[int], None] = lambda _: None
    done: Callable[[Cell, Summary], None] = lambda *_: None
    announce: Announce | None = None


def listener_of(progress: bool | Listener | None) -> Listener:
    """Return what is called while runs are done: as given, or a display as `run` shows it."""
    return progress if isinstance(progress, Listener) else Listener(partial(default_display, progress))


Elsewhere = Callable[[Mapping[str, Config], Callable[[], None]], None]
"""Has runs done elsewhere to their end, given folder → configuration; calls the second once they are taken."""

CellFunction = Callable[[Config, Path, Sequence[Callback], Backbone | None, Announce | None], tuple[Summary, Backbone]]
"""Runs one cell, given its configuration, folder, callbacks, a backbone that fits (or None) and `Announce`; returns the
summary, and the backbone for the next cell."""


@dataclass(frozen=True)
class CellKind:
    """The work of a cell, a whole run or a trial of a sweep, and the file that it writes last."""

    work: CellFunction
    file: str

    def read(self, folder: Path) -> Summary:
        """Read the summary of a finished cell."""
        with damage_named(folder / self.file):
            return read_json(folder / self.file)


def _whole_run(
    config: Config,
    folder: Path,
    callbacks: Sequence[Callback],
    backbone: Backbone | None,
    announce: Announce | None,
) -> tuple[Summary, Backbone]:
    def announce_cell(line: str) -> None:
        if announce is not None:
            announce(f"{folder.name}: {line}")

    finished = run(
        config,
        out=folder,
        resume=True,
        progress=False,
        backbone=backbone,
        announce=announce_cell,
        callbacks=callbacks,
    )
    return finished.summary, finished.federation.backbone


RUN = CellKind(_whole_run, "summary.json")


def built_entries(cells: Sequence[Cell], on_use: bool = False) -> Iterator[tuple[Cell, Federation]]:
    """Build the first cell of every entry as a run would, and yield both; a cell that cannot run is named.

    With `on_use`, the backbone's weights are loaded only if building needs them.
    """
    needs: BackboneRequirements | None = None
    backbone: Backbone | None = None
    load = partial(BackboneRequirements.load, on_use=on_use)
    firsts: dict[str, Cell] = {}
    for cell in cells:
        firsts.setdefault(cell.entry, cell)
    for cell in firsts.values():
        precision = cell.config.precision
        try:
            required = BackboneRequirements.of(cell.config, make_method(cell.config))
            with numerics(precision.deterministic, precision.tf32):
                federation = build(cell.config, backbone if required == needs else None, load=load)
            if federation.privacy is not None:
                federation.privacy.require_a_round()
        except InputError as error:
            raise InputError(f"{cell.folder}: {error}") from error
        needs, backbone = required, federation.backbone
        yield cell, federation


def check_cells(cells: Sequence[Cell], out: Path, workers: Workers) -> None:
    """Refuse a plan of which a cell cannot run, before the first of them trains.

    A single entry is left to its run, which checks it before it trains; so are cells that have begun, and those of a
    cluster, whose machines have the rows.
    """
    new = [cell for cell in cells if not (out / cell.folder / "config.yaml").exists()]
    if workers.cluster is None and len({cell.entry for cell in cells}) > 1:
        for _ in built_entries(new, on_use=True):
            pass


def run_elsewhere(
    cells: Sequence[Cell], out: Path, elsewhere: Elsewhere, begun: Callable[[], None]
) -> tuple[dict[str, Summary], SilotuneError | None]:
    """Run all cells of a command elsewhere as one plan, which includes finished ones.

    Returns the summary of every finished cell by folder, and the error that names the others; None without others.
    """
    failure = None
    try:
        elsewhere({cell.folder: cell.config for cell in cells}, begun)
    except InputError:
        raise
    except SilotuneError as error:
        failure = error
    finished = [cell for cell in cells if failure is None or (out / cell.folder / RUN.file).exists()]
    if failure is not None and not finished:
        raise failure
    return {cell.folder: RUN.read(out / cell.folder) for cell in finished}, failure


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    kind: CellKind = RUN,
    workers: int | Workers = 1,
    listener: Listener = Listener(),
) -> dict[str, Summary]:
    """Run the unfinished cells below the folder `out`, in this process or in several.

    A cell is finished once its last file exists; it is then never run again. An interrupted cell continues from its
    last checkpoint. Cells that differ only in how their models predict come last, and take the rounds of one that is
    trained alike. Where training diverged in some cells, `Diverged` is raised after all others are finished. Returns
    the summary of every cell, by folder name.
    """
    end_unguarded_worker()
    unfinished = [cell for cell in cells if not _finished(cell, out, kind)]
    listener.begin(len(unfinished))
    spread = Workers.of(workers)
    spread = replace(spread, number=min(spread.number, len(unfinished) or 1))
    later = trained_by_others(cells) if kind is RUN else {}
    diverged = {}
    for waited in (False, True):
        now = [cell for cell in unfinished if (cell.folder in later) is waited]
        for cell in now if waited else ():
            take_rounds(out / later[cell.folder].folder, out / cell.folder, cell.config)
        outcomes = (
            _run_here(now, out, kind, listener)
            if spread.here or not now
            else _run_in_processes(now, out, kind, spread, listener.announce)
        )
        for cell, outcome in outcomes:
            if isinstance(outcome, Diverged):
                diverged[cell.folder] = outcome
            else:
                listener.done(cell, outcome)
    if diverged:
        details = "; ".join(
            f"{out / cell.folder}: {diverged[cell.folder]}" for cell in unfinished if cell.folder in diverged
        )
        raise Diverged(f"{len(diverged)} of {len(cells)} cells diverged, the others are finished: {details}")
    return {cell.folder: kind.read(out / cell.folder) for cell in cells}


def _finished(cell: Cell, out: Path, kind: CellKind) -> bool:
    folder = out / cell.folder
    if not (folder / "config.yaml").is_file():
        return False
    RunFolder.check(folder, dump(resolve(continued(cell.config, folder)).config), resume=True)
    return (folder / kind.file).exists()


def _run_here(cells: Sequence[Cell], out: Path, kind: CellKind, listener: Listener) -> Iterator[tuple[Cell, _Outcome]]:
    backbones = _Backbones()
    for cell in cells:
        followers = listener.callbacks(cell.folder, cell.config.rounds) if listener.callbacks else ()
        yield cell, backbones.run(kind, cell.config, out / cell.folder, followers, listener.announce)


class _Backbones:
    """Keeps the backbone of the last run for the next one, if it fits."""

    def __init__(self) -> None:
        self._needs: BackboneRequirements | None = None
        self._backbone: Backbone | None = None

    def run(
        self, kind: CellKind, config: Config, folder: Path, callbacks: Sequence[Callback], announce: Announce | None
    ) -> _Outcome:
        """Run one cell."""
        requirements = BackboneRequirements.of(config, make_method(config))
        if requirements != self._needs:
            self._backbone = None  # free its memory before another is loaded
        try:
            summary, backbone = kind.work(config, folder, callbacks, self._backbone, announce)
        except Diverged as error:
            return Diverged(str(error))  # drops the traceback, which would keep the run in memory
        self._needs, self._backbone = requirements, backbone
        return summary


_WORKER_BACKBONES = _Backbones()  # used in worker processes


def _run_in_processes(
    cells: Sequence[Cell], out: Path, kind: CellKind, workers: Workers, announce: Announce | None
) -> Iterator[tuple[Cell, _Outcome]]:
    out = out.absolute()  # the workers of a cluster have other working directories
    there = announce if workers.cluster is None else None  # what a process of a cluster writes is read by nobody
    with workers.pool(IMPORTS, max(cell.config.threads or 0 for cell in cells) or None) as (pool, _):
        waiting = {pool.submit(_run_in_worker, kind, cell.config, out / cell.folder, there): cell for cell in cells}
        for future in as_completed(waiting):
            outcome, untold = future.result()
            if announce is not None:
                for line in untold:
                    announce(line)
            yield waiting[future], outcome


def _run_in_worker(
    kind: CellKind, config: Config, folder: Path, announce: Announce | None
) -> tuple[_Outcome, list[str]]:
    """Run a cell without `announce`; return its outcome, and the lines to announce."""
    untold: list[str] = []
    outcome = _WORKER_BACKBONES.run(kind, config, folder, (), announce or untold.append)
    return outcome, untold
