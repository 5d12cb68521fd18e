"""The commands `silotune export`, `silotune import` (of a LoRA of peft) and `silotune predict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silotune.cli.app import RESULTS, app
from silotune.cli.completion import complete_run
from silotune.cli.console import say
from silotune.core.files import decode_text
from silotune.errors import InputError, require_unused

if TYPE_CHECKING:
    from silotune.runs.personal_model import PersonalModel, Prediction, Text


RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a finished run.", metavar="RUN", autocompletion=complete_run)
]

SiloOption = Annotated[str, typer.Option(help="The silo whose model is used.")]

_BATCH_SIZE = 256
"""Texts answered together, so that a pipe receives its answers in portions."""


@app.command("export", rich_help_panel=RESULTS)
def export_command(
    run: RunArgument,
    silo: SiloOption,
    part: Annotated[
        str, typer.Option(help="global, private, mixed (the silo's whole model as one adapter) or merged.")
    ],
    to: Annotated[Path, typer.Option(help="A new or empty folder.")],
    base: Annotated[str | None, typer.Option(help="The base model's name in the export; the run's by default.")] = None,
    program: Annotated[
        str | None, typer.Option("--for", help="llama.cpp or ollama: a LoRA as a GGUF file. Default: peft and others.")
    ] = None,
) -> None:
    """Write a silo's adapter in the Hugging Face PEFT layout, or its model with adapters folded into the weights."""
    from silotune.interop.export import export
    from silotune.runs.personal_model import load_model

    require_unused(to, "--to")
    exported = export(load_model(run, silo, precision="fp32", device="cpu"), part, to, base, program)
    say(f"wrote {to}: {exported['part']} of silo {silo}, round {exported['best_round']}; README.md says how to load it")
    if exported["private"]:
        say(f"it holds parts that never left the silo while training: {', '.join(exported['private'])}")


@app.command("import", rich_help_panel=RESULTS)
def import_command(
    directory: Annotated[Path, typer.Argument(help="A LoRA as peft saves it, or a run folder.", metavar="DIR")],
    to: Annotated[Path | None, typer.Option(help="A new file for `start=`, of a LoRA.")] = None,
    backbone: Annotated[str | None, typer.Option(help="The base model; the one the LoRA names by default.")] = None,
) -> None:
    """Check a LoRA of peft against its base model and write it as a run's starting point (`start=FILE`).

    Of a finished run that has no folder `models`, make that folder: predict, evaluate and export read it.
    """
    if (directory / "summary.json").is_file():
        from silotune.runs.restore import import_run

        if to is not None or backbone is not None:
            raise InputError("--to, --backbone: belong to a LoRA of peft, not to a run folder")
        say(f"wrote {directory / 'models'}: the models of {', '.join(import_run(directory))}")
        return
    if to is None:
        raise InputError("--to: is missing; a LoRA of peft is written to a new file")
    from silotune.models.backbone.loading import load_backbone
    from silotune.models.tuners.peft_import import HEADS, read_config, read_peft_lora

    if to.exists():
        raise InputError(f"--to {to}: already there; choose another file")
    config = read_config(directory)
    name = backbone or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{directory}/adapter_config.json: names no base model; give it with --backbone")
    adapter = read_peft_lora(directory, load_backbone(name, precision="fp32"))
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(adapter.pack())
    except OSError as error:
        raise InputError(f"--to {to}: cannot be written ({error.strerror})") from error
    say(f"wrote {to}: a LoRA of rank {adapter.r} at {len(adapter.tensors) // 2} modules of {name}")
    if heads := sorted(set(HEADS).intersection(config.get("modules_to_save") or ())):
        say(f"left out: {', '.join(heads)}, as every run trains the heads of its own tasks")
    say(f"begin a run from it with: silotune run … backbone={name} {' '.join(adapter.words)} start={to}")


@app.command(rich_help_panel=RESULTS)
def predict(
    run: RunArgument,
    silo: SiloOption,
    text: Annotated[
        list[str] | None, typer.Option(help="A text; a pair with a tab between, or as JSON; repeatable.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A table (.csv, .tsv, .parquet), or a file with one text (or pair) a line; default: stdin."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="The table's text column, or two separated by a comma; default: the silo's.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Load the backbone in this precision instead of the run's: fp32, bf16, …")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also say which parts answer, how weighted.")] = False,
) -> None:
    """Answer texts with one silo's model of a finished run: one JSON line each, with label and probabilities.

    For a regression task, a line has a value instead; for several labels, all labels with a probability above one half.
    A table's text columns are those that the silo trained on, unless --columns names others.
    Instructions (with an optional input after a tab) and conversations ({"messages": [{"role": …, "content": …}, …]})
    get a generated answer instead.
    --explain adds the weight of each part, and for FedDPA the text's alpha and the similarities that it is the mean of.
    """
    from silotune.runs.personal_model import load_model

    if text and file is not None:
        raise InputError("predict: --text and --file exclude each other; give one of them")
    is_table = file is not None and _is_table(file)
    if columns is not None and not is_table:
        raise InputError("--columns: belongs to a --file that is a table (.csv, .tsv, .parquet)")
    with _lines(text or [], None if is_table else file) as lines:
        model = load_model(run, silo, precision=precision)
        generates = model.task.kind == "generation"
        rows: Iterator[Text]
        if file is not None and is_table:
            from silotune.runs.evaluation import table_texts

            chosen = [name.strip() for name in columns.split(",")] if columns else []
            rows = iter(table_texts(model, file, chosen))
        else:
            texts = (1, 2) if generates else (model.texts_per_row,)
            where = "--text" if text else str(file or "stdin")
            rows = read_lines(lines, where, texts, conversations=generates)
        answered = 0
        while batch := list(islice(rows, _BATCH_SIZE)):
            for line in _answers(model, batch, explain):
                typer.echo(line)
            answered += len(batch)
        if not answered:
            raise InputError(f"{f'--file {file}' if file else 'stdin'}: holds no text")


def _answers(model: PersonalModel, texts: list[Text], explain: bool) -> Iterator[str]:
    """Yield one JSON line per text."""
    answers: list[dict[str, object]]
    if model.task.kind == "generation":
        answers = [{"answer": answer} for answer in model.write(texts)]
    else:
        answers = [_fields(prediction) for prediction in model.predict(texts)]
    if explain:
        for answer, explanation in zip(answers, model.explain(texts), strict=True):
            answer |= {key: value for key, value in asdict(explanation).items() if value is not None}
    for text, answer in zip(texts, answers, strict=True):
        yield json.dumps({"text": text, **answer}, ensure_ascii=False)


def _fields(prediction: Prediction) -> dict[str, object]:
    """Return a prediction's fields: its number, its labels or its label, and their probabilities."""
    if prediction.value is not None:
        return {"value": prediction.value}
    label = {"label": prediction.label} if prediction.label else {"labels": prediction.labels}
    return {**label, "probabilities": prediction.probabilities}


def _is_table(file: Path) -> bool:
    """Return whether a file's name says that it is a table; lines of JSON are texts."""
    from silotune.data.readers import file_format

    return file_format(file)[0] not in ("", ".jsonl")


@contextmanager
def _lines(texts: list[str], file: Path | None) -> Iterator[Iterable[str]]:
    """Open the source of the texts; an unreadable file is refused before the model is loaded."""
    if texts:
        if not all(text.strip() for text in texts):
            raise InputError("--text: is empty")
        yield [text.replace("\n", " ").replace("\r", " ") for text in texts]
        return
    if file is None:
        yield (_decoded(line, f"stdin line {number}") for number, line in enumerate(sys.stdin.buffer, 1))
        return
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"--file {file}: cannot be read ({error.strerror})") from error
    yield _decoded(content, f"--file {file}").split("\n")


def _decoded(content: bytes, where: str) -> str:
    try:
        return decode_text(content)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start})") from error


def read_lines(lines: Iterable[str], where: str, texts: tuple[int, ...], conversations: bool = False) -> Iterator[Text]:
    """Yield the texts of lines; empty lines are skipped.

    A line is a text, a pair separated by a tab, or JSON: a string, a list, or an object whose values (except `label`)
    are the texts. If a row has a single text, tabs belong to it.

    Args:
        lines: the lines, with or without line ends.
        where: source of the lines, for messages.
        texts: allowed numbers of texts per row.
        conversations: whether a line may be a JSON object with `messages` or `conversations`.
    """
    from silotune.data.generation_rows import asked_row
    from silotune.data.rows import text_fault

    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        if conversations and (turns := _turns(line)) is not None:
            asked_row(turns, f"{where} line {number}")
            yield turns
            continue
        row_texts = _json(line)
        if row_texts is None:
            row_texts = line.split("\t") if max(texts) > 1 else [line]
        if len(row_texts) not in texts or not all(isinstance(text, str) for text in row_texts):
            wanted = " or ".join("one text" if count == 1 else "two texts, with a tab between" for count in texts)
            raise InputError(f"{where} line {number}: needs {wanted}, or JSON (got {line[:60]!r})")
        required = row_texts[: min(texts)] + [text for text in row_texts[min(texts) :] if text]  # inputs may be empty
        if fault := next(filter(None, map(text_fault, required)), ""):
            raise InputError(f"{where} line {number}: a text {fault}")
        yield row_texts[0] if len(row_texts) == 1 else (row_texts[0], row_texts[1])


def _turns(line: str) -> list[dict[str, Any]] | dict[str, Any] | None:
    """Parse a line with a conversation into its turns, or with tools as it is; None if it holds none."""
    from silotune.data.generation_rows import CONVERSATIONS, MESSAGES, TOOLS

    if not line.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    column = next((column for column in (MESSAGES, CONVERSATIONS) if column in value), None)
    if column is None:
        return None
    return {MESSAGES: value[column], TOOLS: value[TOOLS]} if value.get(TOOLS) else value[column]


def _json(line: str) -> list[Any] | None:
    """Parse a line of JSON into its texts; None if the line is plain text."""
    if line.lstrip()[:1] not in ("[", "{", '"'):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return [text for key, text in value.items() if key != "label"]
    return value if isinstance(value, list) else [value]
