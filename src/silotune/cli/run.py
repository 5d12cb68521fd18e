"""The commands `silotune run`, which trains and prints the result table, and `watch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silotune.cli.app import RESULTS, TRAIN, app
from silotune.cli.console import JsonOption, LogFile, Overrides, Quiet, Source, Verbose, console, say, say_aside
from silotune.cli.workers import FLOWER, IN_PROCESS, RAY, AddressOption, WorkersOption, workers_of

if TYPE_CHECKING:
    from silotune.config import Config


@app.command("run", rich_help_panel=TRAIN)
def run_command(
    source: Source,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run; with more rounds, too.")] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="What runs the silos: inprocess, flower-local (a process for each, over Flower), or ray (a cluster)."
        ),
    ] = IN_PROCESS,
    workers: WorkersOption = None,
    address: AddressOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check everything, say what would be trained, and stop.")
    ] = False,
    track: Annotated[
        list[str] | None, typer.Option(help="Also write the numbers to csv, tensorboard, wandb or mlflow; repeatable.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: JsonOption = False,
) -> None:
    """Run one method over one setting."""
    where = workers_of(engine, workers, address, (IN_PROCESS, FLOWER, RAY))
    from silotune.cli.preview import preview_run
    from silotune.cli.progress import show_progress
    from silotune.cli.result_table import result_table
    from silotune.runs.build.resolve import read_config
    from silotune.runs.callbacks.base import EventFeed
    from silotune.runs.callbacks.trackers import make_tracker
    from silotune.runs.run import default_folder, run

    config = read_config(source, overrides or [])
    if dry_run:
        preview_run(config)
        return
    folder = out or default_folder(source, config)
    trackers = [make_tracker(name) for name in dict.fromkeys(track or [])]
    tell = say_aside if as_json else say
    with show_progress(quiet, verbose, log_file, write=tell) as followers:
        callbacks = [*trackers, *followers(config.method.name, config.rounds)]
        if engine == FLOWER:
            from silotune.distributed.local.run_local import run_local

            with EventFeed(folder, config.rounds, callbacks) as feed:
                summary, privacy = run_local(config, folder, resume=resume, progress=feed, announce=tell)
                feed.end(summary)
        else:
            finished = run(
                config,
                out=folder,
                resume=resume,
                progress=False,
                announce=tell,
                workers=where,
                callbacks=callbacks,
                warn=lambda line: tell(f"warning: {line}"),
            )
            summary, privacy = finished.summary, finished.federation.privacy
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)} | summary, indent=1))
        return
    console.print(result_table([summary]))
    say(_describe_uploads(config, summary))
    if privacy is not None and privacy.stops:
        say(privacy.stops)
    say(f"run folder: {folder}")


@app.command(rich_help_panel=RESULTS)
def watch(
    run: Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")],
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    verbose: Verbose = False,
) -> None:
    """Show a running run live, until it ends."""
    from silotune.cli.live_view import watch_run

    watch_run(run, once=once, every=every, silos=verbose)


def _describe_uploads(config: Config, summary: dict[str, Any]) -> str:
    from silotune.runs.build.resolve import make_method

    method = make_method(config)
    if method.collects_rows:
        return "all rows were in one place"
    leaving = method.sends()
    if not leaving:
        return "nothing left a silo"
    upload = summary["bytes_up"]
    return f"what left the silos: {', '.join(leaving)} ({upload / 2**20:.2f} MiB in all); everything else stayed"
