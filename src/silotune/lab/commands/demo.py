"""The command `silotune demo`: three methods over small tasks that come with the package, and their report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from silotune.cli.console import LogFile, Quiet, Verbose, console, say
from silotune.errors import OR_RESUME, InputError, require_unused, unknown_name_error

if TYPE_CHECKING:
    from rich.table import Table

    from silotune.config import Config
    from silotune.runs.run_result import Run

CLASSIFY, CHAT = "classify", "chat"

_METHODS = {CLASSIFY: ("local", "fedavg", "fedmcp"), CHAT: ("local", "fedit", "feddpa-t")}

_PRESETS = {CLASSIFY: "demo", CHAT: "demo-chat"}

_TOGETHER = 3
"""Silos in one forward (`cohort`)."""

_CLASSIFY_WORDS = (
    *("rounds=4", "train.batch_size=8", "train.lr=2e-3", "train.schedule=linear", "train.schedule_over=run"),
    *(f"cohort={_TOGETHER}", "threads=1"),
)
"""Keys of the runs beside the preset's: four rounds of small batches at a falling rate, where the preset has six at a
constant one. Three silos share a forward, which takes the small batches' padding and calls away. Every process has one
core, so that the bits do not depend on their number."""


def demo(
    task: Annotated[
        str, typer.Option(help="classify: six tasks with labels; chat: three with answers, for a language model.")
    ] = CLASSIFY,
    model: Annotated[
        str | None,
        typer.Option(help="The causal language model of --task chat: smollm2 (the default), a folder, or a hub id."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the run folders and the report go.")] = Path("runs/demo"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted demo.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Federate small tasks by three methods, side by side: each silo alone, averaging, and a personalized method."""
    from silotune.cli.progress import show_progress
    from silotune.cli.result_table import result_table
    from silotune.lab.report.entries import read_entries
    from silotune.lab.report.frame import Results
    from silotune.lab.report.html_page import write_report
    from silotune.runs.run import run

    configs = [demo_config(task, method, model) for method in _METHODS.get(task, _METHODS[CLASSIFY])]
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    runs: list[Run] = []
    with show_progress(quiet, verbose, log_file) as followers:
        for config in configs:
            method = config.method.name
            callbacks = followers(method, config.rounds)
            finished = run(
                config,
                out=out / method,
                resume=resume,
                progress=False,
                backbone=runs[-1].federation.backbone if runs else None,
                callbacks=callbacks,
                workers=_processes(len(config.data.tasks)) if task == CLASSIFY else 1,
            )
            runs.append(finished)
    console.print(result_table([finished.summary for finished in runs]))
    results = Results(read_entries([finished.folder for finished in runs]))
    page = write_report(results, out / "report.html", "The demo")
    say(f"run folders: {', '.join(str(finished.folder) for finished in runs)}")
    if task == CHAT:
        console.print(_answers(configs[0], runs))
        say(f"ask a silo's model: silotune chat {runs[1].folder} --silo polite")
    say(f"scores per round and silo, and what was sent: {page}")


def _answers(config: Config, runs: Sequence[Run]) -> Table:
    """Return one test instruction of each silo, answered by the untouched model and by the silo's of each run."""
    from rich.table import Table

    from silotune.data.loading import load_silos
    from silotune.runs.personal_model import PersonalModel

    table = Table("silo", "instruction", "untouched", *(made.folder.name for made in runs), show_lines=True)
    for data in load_silos(config):
        models = [PersonalModel.open(made.folder / "models" / data.name, made.federation.backbone) for made in runs]
        instruction = data.splits.test[0].texts[0]
        answers = [models[0].untouched([instruction])[0], *(model.write([instruction])[0] for model in models)]
        table.add_row(*map(escape, [data.name, instruction, *answers]))
    return table


def demo_config(task: str, method: str, model: str | None = None) -> Config:
    """Return the configuration of one of the demo's runs; `model` is the backbone of `chat`."""
    if task not in _PRESETS:
        raise unknown_name_error("--task", task, _PRESETS)
    if task == CLASSIFY and model is not None:
        raise InputError("--model: of --task chat; the other task trains over the backbone that comes with silotune")
    from silotune.runs.build.resolve import read_config

    words = _CLASSIFY_WORDS if task == CLASSIFY else (f"backbone={model or 'smollm2'}",)
    return read_config(_PRESETS[task], [f"method={method}", *words])


def _processes(silos: int) -> int:
    """Return how many processes train silos: one a core, at most one for each forward of several silos."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(-(-silos // _TOGETHER), cores)
