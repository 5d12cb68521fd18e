"""The options `--engine`, `--workers` and `--address` of commands that train, and the `Workers` that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from silotune.errors import InputError, unknown_name_error

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


def workers_of(
    engine: str, workers: int | None, address: str | None, engines: tuple[str, ...] = (IN_PROCESS, RAY)
) -> Workers:
    """Return where a command's work is done."""
    from silotune.core.workers import Workers

    if engine not in engines:
        raise unknown_name_error("engine", engine, engines)
    if engine == FLOWER and workers is not None and workers > 1:
        raise InputError(f"--workers: of the engines inprocess and ray; {engine} has a process for each silo")
    if engine == RAY:
        from silotune.core.ray_pool import LOCAL

        return Workers(workers or 0, address or LOCAL)
    if address is not None:
        raise InputError(f"--address: of --engine ray (got --engine {engine})")
    return Workers(workers or 1)
