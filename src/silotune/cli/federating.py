"""`silotune worker` and `silotune federation …`: a federation over real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.main import app

SiloFile = Annotated[Path, typer.Argument(help="The silo's own configuration (YAML).", metavar="SILO_YAML")]


@app.command()
def worker(silo: SiloFile) -> None:
    """Hold a silo's backbone and rows, and do its work for the SuperNode beside it."""
    from silotune.federation.local import read_local
    from silotune.federation.worker import serve

    serve(read_local(silo))
