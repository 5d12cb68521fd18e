"""The command `silotune evaluate`: a silo's model on a labeled file, or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from silotune.cli.app import RESULTS, app
from silotune.cli.console import JsonOption, Overrides, complete_run, console, new_table, say
from silotune.errors import InputError, needs

if TYPE_CHECKING:
    from silotune.runs.evaluation import Evaluation


@app.command(rich_help_panel=RESULTS)
def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of a finished run; with --data a backbone, as the key backbone.",
            metavar="RUN_OR_BACKBONE",
            autocompletion=complete_run,
        ),
    ],
    overrides: Overrides = None,
    silo: Annotated[str | None, typer.Option(help="The silo whose model is used.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Score the untouched backbone on these test rows: a preset, a YAML file or a file of rows.",
            metavar="PRESET_OR_FILE",
        ),
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="Answered rows before each question, with --data.")] = 0,
    file: Annotated[
        Path | None, typer.Option(help="Score on the rows of this file (.csv, .tsv, .jsonl or .parquet).")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The file's text column, or two separated by a comma; default: the silo's.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The file's label column; default: the silo's.")] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Also write every row's prediction, as Parquet.", metavar="PARQUET")
    ] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", help="Tasks of lm-evaluation-harness, separated by commas.")
    ] = None,
    tasks_folder: Annotated[Path | None, typer.Option(help="A folder with harness tasks of your own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows per harness task; default: all.")] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option("--apply-chat-template", help="Ask the harness's texts as turns in the run's chat template."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Score one silo's model of a finished run on a labeled file, or on tasks of lm-evaluation-harness.

    With --data, score a backbone as it is, without any training, on the test rows of a setting or the rows of a file.
    """
    columns = [name.strip() for name in text.split(",")] if text else []
    if data is not None:
        if silo is not None or file is not None or lm_eval is not None or predictions is not None:
            raise InputError("--silo, --file, --lm-eval, --predictions: belong to a run, not to --data")
        _untouched(str(run), data, [*(overrides or []), f"evaluation.shots={shots}"], columns, label, as_json)
        return
    if overrides or shots:
        raise InputError(f"{overrides[0] if overrides else '--shots'}: belongs to --data, not to a finished run")
    if silo is None:
        raise InputError("--silo: is missing; allowed: --silo NAME of a run, or --data for an untouched backbone")
    if (file is None) == (lm_eval is None):
        raise InputError("evaluate: give either --file or --lm-eval")
    if file is not None:
        if tasks_folder is not None or limit is not None or apply_chat_template:
            raise InputError("--tasks-folder, --limit, --apply-chat-template: belong to --lm-eval, not to --file")
        _on_file(run, silo, file, columns, label, predictions, as_json)
        return
    if text is not None or label is not None or predictions is not None:
        raise InputError("--text, --label, --predictions: belong to --file, not to --lm-eval")
    _on_harness(run, silo, str(lm_eval), tasks_folder, limit, apply_chat_template, as_json)


def _on_file(
    run: Path, silo: str, file: Path, text: list[str], label: str | None, predictions: Path | None, as_json: bool
) -> None:
    from silotune.runs.evaluation import evaluate as score

    if predictions is not None and not predictions.parent.is_dir():
        raise InputError(f"--predictions {predictions}: its folder does not exist")
    scores = score(run, silo, file, text=text, label=label or "", predictions=predictions)
    if as_json:
        typer.echo(json.dumps(dict(scores), indent=1, ensure_ascii=False))
        return
    for table in _tables(scores):
        console.print(table)
    if predictions is not None:
        say(f"predictions: {predictions}")


def _untouched(backbone: str, data: str, words: list[str], text: list[str], label: str | None, as_json: bool) -> None:
    from silotune.runs.backbone_scores import backbone_setting, evaluate_backbone
    from silotune.runs.build.resolve import chosen_defaults

    setting, silos = backbone_setting(backbone, data, words, text, label or "")
    config, results = evaluate_backbone(setting, silos)
    if as_json:
        typer.echo(json.dumps({name: dict(scores) for name, scores in results.items()}, indent=1, ensure_ascii=False))
        return
    for line in chosen_defaults(setting, config):
        say(line)
    shots = config.evaluation.shots
    title = escape(f"{backbone} untouched{f', after {shots} rows' if shots else ''}")
    table = new_table(title, ("silo", "metric"), ("score", "95 % interval", "rows"))
    for name, scores in results.items():
        number = [*scores["metrics"]].index(scores["metric"])
        table.add_row(*map(escape, [name, *scores.metric_rows()[number], f"{scores['rows']:,}"]))
    console.print(table)


def _tables(scores: Evaluation) -> list[Table]:
    from silotune.data.tasks import metric_title

    table = new_table(escape(scores.title), ["metric"], ("score", f"{scores['level']} % interval"))
    for name, cells in zip(scores["metrics"], scores.metric_rows(), strict=True):
        table.add_row(*map(escape, cells), style="bold" if name == scores["metric"] else None)
    if "per_class" not in scores:
        return [table]
    classes = new_table("per class (%)", ["label"], map(metric_title, ("precision", "recall", "f1", "rows")))
    for name, of_class in scores["per_class"].items():
        values = (f"{of_class[key]:.2f}" for key in ("precision", "recall", "f1"))
        classes.add_row(escape(name), *values, f"{of_class['rows']:,}")
    return [table, classes]


def _on_harness(
    run: Path, silo: str, tasks: str, folder: Path | None, limit: int | None, chat: bool, as_json: bool
) -> None:
    from silotune.runs.personal_model import load_model

    with needs("--lm-eval: needs the package lm-eval", "lm-eval"):
        from silotune.interop.lm_eval_harness import evaluate_on
    if folder is not None and not folder.is_dir():
        raise InputError(f"--tasks-folder {folder}: no such folder")
    names = [name.strip() for name in tasks.split(",")]
    model = load_model(run, silo)
    if getattr(model.context.head, "chat", False) and not chat:
        note = "the run was trained on its chat template, and these texts come without it (--apply-chat-template)"
        typer.echo(f"note: {note}", err=True)
    results = evaluate_on(model, names, folder, limit, chat=chat)
    if as_json:
        typer.echo(json.dumps({"silo": silo, "results": results}, indent=1, default=str))
        return
    for task, values in results.items():
        numbers = (
            f"{name.partition(',')[0]} {value:.4f}" for name, value in values.items() if isinstance(value, float)
        )
        say(f"{task}: {', '.join(numbers)}")
