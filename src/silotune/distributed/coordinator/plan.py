"""A coordinator's plan: several runs that silos check and approve as one, and that then follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

from silotune.core.locking import folder_lock
from silotune.core.records import Records
from silotune.distributed.coordinator.coordinate import FailureLog, Load, RunStart, greet, run_job
from silotune.distributed.coordinator.job import Job
from silotune.distributed.coordinator.run_registry import RunRegistry
from silotune.distributed.coordinator.run_status import RunStatus
from silotune.distributed.flower.link import ConnectionLost, Link
from silotune.distributed.protocol.frames import Frame
from silotune.distributed.protocol.handshake import Hello
from silotune.errors import InputError, SilotuneError
from silotune.runs.build.model import BackboneRequirements


def run_plan(job: Job, link: Link, record: Records, status: RunStatus) -> None:
    """Have all runs of a plan checked and approved, and run those that are not finished.

    Raises:
        SilotuneError: some runs failed; the others are finished.
    """
    load = lru_cache(maxsize=1)(partial(BackboneRequirements.load, on_use=True))  # most runs need the same
    _approve(job, link, record, status, load)
    failed: dict[str, str] = {}
    for name in job.cells:
        cell = job.cell(name)
        if (Path(cell.out) / "summary.json").exists():
            continue
        try:
            with folder_lock(Path(cell.out)):
                run_job(cell, link, record, status, load)
        except ConnectionLost:
            raise
        except SilotuneError as error:
            failed[name] = str(error)
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise SilotuneError(f"{len(failed)} of {len(job.cells)} runs failed, the others are finished: {reasons}")


def _approve(job: Job, link: Link, record: Records, status: RunStatus, load: Load) -> None:
    """Ask all silos for one approval of all runs; then build every run from their answers, before the first trains."""
    starts: dict[str, RunStart] = {}
    for name in job.cells:
        with _named(name):
            starts[name] = RunStart.of(job.cell(name), record, load)
    first, cells = starts[job.cells[0]], [{"name": name, **start.request} for name, start in starts.items()]

    def admit(frame: Frame) -> None:
        hellos = frame.fields.get("hellos")
        kinds = [type(said) for said in hellos] if isinstance(hellos, list) else []
        if frame.kind != "planned" or kinds != [dict] * len(starts):
            Hello.read(Frame("refused", frame.fields))  # raises the silo's own reason
        for (name, start), said in zip(starts.items(), hellos or [], strict=True):
            with _named(name):
                start.admission(Frame("hello", {**said, "silo": frame.fields.get("silo")}))

    greeting = Frame("plan", {"run": RunRegistry.open(Path(job.out)).run, "cells": cells})
    greet(first, link, greeting, admit, FailureLog(status.report), status, record)
    for name, start in starts.items():
        with _named(name):
            start.federation()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix refusals raised inside the block with the run's name."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{name}: {error}") from error
