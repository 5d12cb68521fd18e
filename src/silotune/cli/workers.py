"""The options `--engine`, `--workers`, `--address` and `--federation`: where commands that train do their work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silotune.errors import InputError, require_known

if TYPE_CHECKING:
    from silotune.core.workers import Workers

IN_PROCESS, FLOWER, RAY = "inprocess", "flower-local", "ray"

EngineOption = Annotated[
    str, typer.Option("--engine", help="Where work is done: inprocess (here), or ray (on a Ray cluster).")
]

WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Worker processes; with threads=1 each takes one core. On Ray: as many as there are cores for.",
        show_default="1",
    ),
]

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", help="The Ray cluster: auto, HOST:PORT, ray://HOST:PORT; local (the default) starts one here."
    ),
]

FederationOption = Annotated[
    Path | None,
    typer.Option(
        "--federation",
        help="The coordinator's file: all runs go over the silos of federation.silos, which approve them as one plan.",
        metavar="COORDINATOR_YAML",
    ),
]


def elsewhere_of(
    federation: Path | None, workers: Workers, out: Path, tell: Callable[[str], None]
) -> partial[None] | None:
    """Return a runner of a command's cells over the federation that the command names; None if it names none."""
    if federation is None:
        return None
    if not workers.here:
        raise InputError("--federation: excludes --engine, --workers and --address; silos have machines of their own")
    run_plan = import_module("silotune.deploy.commands").run_plan  # of a room above, as its commands are
    return partial(run_plan, federation, out.resolve(), tell)


def workers_of(
    engine: str, workers: int | None, address: str | None, engines: tuple[str, ...] = (IN_PROCESS, RAY)
) -> Workers:
    """Return where a command's work is done."""
    from silotune.core.workers import ENGINES, Workers, registered_engine

    require_known("engine", engine, [*engines, *sorted(entry_points(group=ENGINES).names - {RAY})])
    if engine == FLOWER and workers is not None and workers > 1:
        raise InputError(f"--workers: of the engines inprocess and ray; {engine} has a process for each silo")
    if engine not in (IN_PROCESS, FLOWER):
        registered_engine(engine)  # before anything is read
        return Workers(workers or 0, address or "local", engine)
    if address is not None:
        raise InputError(f"--address: of --engine ray (got --engine {engine})")
    return Workers(workers or 1)
