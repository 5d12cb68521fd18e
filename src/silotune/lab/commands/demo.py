"""The command `silotune demo`: three methods over small tasks that come with the package, and their report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from silotune.cli.console import LogFile, Quiet, Verbose, WholeTable, console, say
from silotune.errors import OR_RESUME, InputError, require_known, require_unused

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.runs.run_result import Run

CLASSIFY, UNLIKE, CHAT, ENTITIES = "classify", "unlike", "chat", "entities"


@dataclass(frozen=True)
class _Demo:
    """A preset, the methods to run, and keys of the runs beside the preset's; `together` silos share a forward."""

    preset: str
    methods: tuple[str, ...]
    words: tuple[str, ...] = ()
    together: int = 1


_UNLIKE_WORDS = ("rounds=4", "train.batch_size=8", "train.lr=2e-3", "train.schedule=linear", "train.schedule_over=run")
"""Four rounds of small batches at a falling rate, where the preset has six at a constant one."""

_DEMOS = {
    CLASSIFY: _Demo("demo-one-task", ("local", "fedavg", "ditto"), together=4),
    UNLIKE: _Demo("demo", ("local", "fedavg", "fedmcp"), _UNLIKE_WORDS, together=3),
    CHAT: _Demo("demo-chat", ("local", "fedit", "feddpa-t")),
    ENTITIES: _Demo("demo-entities", ("local", "fedavg", "ditto"), together=2),
}


def demo(
    task: Annotated[
        str,
        typer.Option(
            help="classify: silos of one task with few labels each; unlike: six tasks, a silo each; chat: three tasks "
            "with answers, for a language model; entities: four hospitals that mark names."
        ),
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
    require_known("--task", task, _DEMOS)
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    plan = _DEMOS[task]
    if not quiet:
        say(f"{len(plan.methods)} runs: {', '.join(plan.methods)}; loading PyTorch and the model …")
    from silotune.cli.progress import show_progress
    from silotune.cli.result_table import result_table
    from silotune.lab.report.entries import read_entries
    from silotune.lab.report.frame import Results
    from silotune.lab.report.html_page import write_report
    from silotune.lab.report.significance import headline
    from silotune.runs.run import run

    configs = [demo_config(task, method, model) for method in plan.methods]
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
                workers=_processes(config, plan.together),
            )
            runs.append(finished)
    console.print(result_table([finished.summary for finished in runs]))
    results = Results(read_entries([finished.folder for finished in runs]))
    page = write_report(results, out / "report.html", "The demo")
    if sentence := headline(results):
        say(sentence)
    say(f"run folders: {', '.join(str(finished.folder) for finished in runs)}")
    if task == CHAT:
        console.print(_answers(configs[0], runs))
        say(f"ask a silo's model: silotune chat {runs[1].folder} --silo polite")
    if task == ENTITIES:
        console.print(_marked(configs[0], runs))
        say(f"redact a file: silotune redact {runs[1].folder} --silo north FILE")
    say(f"scores per round and silo, and what was sent: {page}")


def _answers(config: Config, runs: Sequence[Run]) -> WholeTable:
    """Return one test instruction of each silo, answered by the untouched model and by the silo's of each run."""
    from silotune.data.loading import load_silos
    from silotune.runs.personal_model import PersonalModel

    table = WholeTable("silo", "instruction", "untouched", *(run.folder.name for run in runs), show_lines=True)
    for data in load_silos(config):
        models = [PersonalModel.open(run.folder / "models" / data.name, run.federation.backbone) for run in runs]
        instruction = data.splits.test[0].texts[0]
        answers = [models[0].untouched([instruction])[0], *(model.write([instruction])[0] for model in models)]
        table.add_row(*map(escape, [data.name, instruction, *answers]))
    return table


def _marked(config: Config, runs: Sequence[Run]) -> WholeTable:
    """Return the first test sentence of each silo with its own spans, and those that the silo's models mark."""
    from silotune.data.loading import load_silos
    from silotune.runs.personal_model import PersonalModel

    table = WholeTable("silo", "sentence", "true", *(run.folder.name for run in runs), show_lines=True)
    for data in load_silos(config):
        row = data.splits.test[0]
        models = [PersonalModel.open(run.folder / "models" / data.name, run.federation.backbone) for run in runs]
        spans = [model.predict(row.texts)[0].spans or () for model in models]
        marked = [", ".join(f"{span.text} [{span.label}]" for span in own) or "nothing" for own in spans]
        table.add_row(*map(escape, [data.name, row.texts[0], data.task.rules.text(data.task, row), *marked]))
    return table


def demo_config(task: str, method: str, model: str | None = None) -> Config:
    """Return the configuration of one of the demo's runs; `model` is the backbone of `chat`."""
    if model is not None and task != CHAT:
        raise InputError("--model: of --task chat; the other tasks train over the backbone that comes with silotune")
    from silotune.runs.build.resolve import read_config

    plan, words = _DEMOS[task], [f"backbone={model or 'smollm2'}"]
    if plan.together > 1:  # every process has one core, so that the bits do not depend on their number
        words = [*plan.words, f"cohort={plan.together}", "threads=1"]
    return read_config(plan.preset, [f"method={method}", *words])


def _processes(config: Config, together: int) -> int:
    """Return how many processes train silos: one a core, at most one for each forward of several silos."""
    if together == 1:
        return 1
    silos = len(config.data.tasks) if config.partition.name == "none" else config.partition.silos
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(-(-silos // together), cores)
