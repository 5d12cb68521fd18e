"""The commands `silotune serve` and `silotune serve-key`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silotune.cli.predict import WithoutGuarantee
from silotune.cli.termination import until_interrupted
from silotune.errors import InputError, file_errors, needs

if TYPE_CHECKING:
    import socket

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line; each imports torch and other slow libraries inside it only."""
    from silotune.cli.app import RESULTS

    app.command(rich_help_panel=RESULTS)(serve)
    app.command("serve-key", rich_help_panel=RESULTS)(serve_key)


def serve(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, or of one model (models/NAME).", metavar="FOLDER…")
    ],
    silo: Annotated[list[str] | None, typer.Option(help="Serve this silo alone; repeatable.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen at; another than the loopback needs --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8080,
    keys: Annotated[Path | None, typer.Option(help="The file of `silotune serve-key`; default: anybody asks.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Take over a model whose files are replaced.")] = False,
    loaded: Annotated[int, typer.Option(min=1, help="Models that stay open; the least used are closed.")] = 256,
    without_guarantee: WithoutGuarantee = False,
) -> None:
    """Answer over HTTP with all silos' models of finished runs, from one backbone in memory.

    Clients of OpenAI's API work: base URL http://HOST:PORT/v1, model RUN/SILO. Classifiers answer at /classify.
    """
    with needs("serve: needs the packages fastapi and uvicorn", "serve"):
        import uvicorn

        from silotune.serve.web import make_app
    from silotune.cli.console import say
    from silotune.runs.model_file import require_guarantee
    from silotune.serve.engine import ServingEngine
    from silotune.serve.keys import ClientKeys
    from silotune.serve.models import Models

    if host not in _LOOPBACK and keys is None:
        raise InputError(f"--host {host}: others can reach it; give --keys FILE (made by `silotune serve-key`)")
    clients, models = ClientKeys(keys), Models(folders, silo or (), loaded, watch)
    for name in models.names() if host not in _LOOPBACK else ():
        require_guarantee(models.about(name)[0], without_guarantee)
    listening = _listen(host, port)
    models.open_first()
    engine = ServingEngine(models)
    # "[" is what starlette's check of hosts makes of [::1]:PORT
    app = make_app(engine, clients, ("127.0.0.1", "localhost", "[") if host in _LOOPBACK else ("*",))
    # no logs: a fault's traceback could quote a text
    config = uvicorn.Config(app, log_config=None, log_level="critical", access_log=False, timeout_graceful_shutdown=5)
    engine.start()
    url_host = f"[{host}]" if ":" in host else host
    address = f"http://{url_host}:{listening.getsockname()[1]}/"
    say(f"{len(models.names())} models at {address} (/v1/models lists them); Ctrl-C ends")
    try:
        with until_interrupted():
            uvicorn.Server(config).run(sockets=[listening])
    finally:
        engine.stop()


def serve_key(
    file: Annotated[Path, typer.Argument(help="The file of keys, made if it is not there.", metavar="FILE")],
    name: Annotated[str, typer.Option(help="Whose key it is; a key of this name is replaced.")],
    silo: Annotated[list[str] | None, typer.Option(help="A silo that it may ask; repeatable; default: all.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="It may read /v1/explain and /metrics, too.")] = False,
    per_minute: Annotated[int | None, typer.Option(min=1, help="The most requests in a minute.")] = None,
) -> None:
    """Make an API key for `silotune serve --keys FILE` and print it; the file holds its hash alone."""
    from silotune.serve.keys import add_key

    typer.echo(add_key(file, name, silo or (), operator, per_minute))


def _listen(host: str, port: int) -> socket.socket:
    import socket

    with file_errors(f"--port {port}: cannot listen at {host}"):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
