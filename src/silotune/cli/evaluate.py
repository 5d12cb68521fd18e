"""The command `silotune evaluate`: a silo's model of a finished run on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.app import app
from silotune.cli.catalog import JsonOption
from silotune.cli.console import say
from silotune.cli.export_predict import RunArgument, SiloOption
from silotune.errors import InputError


@app.command()
def evaluate(
    run: RunArgument,
    silo: SiloOption,
    lm_eval: Annotated[str, typer.Option("--lm-eval", help="Tasks of lm-evaluation-harness, separated by commas.")],
    tasks_folder: Annotated[Path | None, typer.Option(help="A folder with task definitions of your own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows per task; default: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate one silo's language model on tasks of lm-evaluation-harness."""
    from silotune.runs.load import load_model

    try:
        from silotune.interop.lm_eval_harness import evaluate_on
    except ImportError as error:
        raise InputError("--lm-eval: needs the package lm-eval; pip install 'silotune[lm-eval]'") from error
    if tasks_folder is not None and not tasks_folder.is_dir():
        raise InputError(f"--tasks-folder {tasks_folder}: no such folder")
    results = evaluate_on(load_model(run, silo), [name.strip() for name in lm_eval.split(",")], tasks_folder, limit)
    if as_json:
        typer.echo(json.dumps({"silo": silo, "results": results}, indent=1, default=str))
        return
    for task, values in results.items():
        numbers = (
            f"{name.partition(',')[0]} {value:.4f}" for name, value in values.items() if isinstance(value, float)
        )
        say(f"{task}: {', '.join(numbers)}")
