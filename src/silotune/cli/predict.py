"""The command `silotune predict`: texts or files of any length in, answers out, in constant memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import typer

from silotune.cli.app import RESULTS, app
from silotune.cli.console import PrecisionOption, complete_run, say
from silotune.core.files import decode_text, text_lines
from silotune.errors import InputError, file_errors

if TYPE_CHECKING:
    from silotune.data.kinds import Prediction
    from silotune.runs.personal_model import PersonalModel, Text


RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a finished run.", metavar="RUN", autocompletion=complete_run)
]

SiloOption = Annotated[str, typer.Option(help="The silo whose model is used.")]

WithoutGuarantee = Annotated[
    bool,
    typer.Option("--without-guarantee", help="Also if no ε bounds what a model of a run with noise on rows tells."),
]

_BATCH_SIZE = 256
"""Texts answered together, so that a pipe receives its answers in portions."""


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
    out: Annotated[
        Path | None, typer.Option(help="A new file for the answers (.csv, .tsv, .jsonl, .parquet); default: stdout.")
    ] = None,
    query: Annotated[
        list[str] | None,
        typer.Option(help="Of a model for retrieval: rank --file's passages (default: the silo's rows'); repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="The most passages for a query.")] = 10,
    precision: PrecisionOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also say which parts answer, how weighted.")] = False,
) -> None:
    """Answer texts with one silo's model of a finished run: one JSON line each, with label and probabilities.

    Files are read and answered in portions, so they may be of any length.

    For a regression task, a line has a value instead; for several labels, all labels with a probability above one half;
    for entities, spans with their places in the text.
    A table's text columns are those that the silo trained on, unless --columns names others.
    Instructions (with an optional input after a tab) and conversations ({"messages": [{"role": …, "content": …}, …]})
    get a generated answer instead.
    --query ranks passages: each query's best ones, a line each, with their cosine as score.
    --explain adds the weight of each part, and for FedDPA the text's alpha and the similarities that it is the mean of.
    """
    from silotune.data.readers import file_format
    from silotune.runs.evaluation import table_texts
    from silotune.runs.personal_model import load_model

    if text and file is not None:
        raise InputError("predict: --text and --file exclude each other; give one of them")
    if query:
        if text or columns is not None or explain:
            raise InputError("predict: --query takes --file, --top, --out and --precision alone")
        with _written(out) as write:
            write(_ranked(load_model(run, silo, precision=precision), run, silo, query, file, top))
        return
    is_table = file is not None and file_format(file)[0] not in ("", ".jsonl")  # lines of JSON are texts
    if columns is not None and not is_table:
        raise InputError("--columns: belongs to a --file that is a table (.csv, .tsv, .parquet)")
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(file, out is not None))
        lines = None if is_table else _lines(text or [], file, opened)
        write = stack.enter_context(_written(out))
        model = load_model(run, silo, precision=precision)
        generates = not model.task.labeled
        rows: Iterator[Text]
        if lines is None:
            assert file is not None, "a table is a file"
            names = [name.strip() for name in columns.split(",")] if columns else []
            rows = table_texts(model, file, names, opened)
        else:
            texts = (1, 2) if generates else (model.texts_per_row,)
            where = "--text" if text else str(file or "stdin")
            rows = read_lines(lines, where, texts, conversations=generates)
        answered = 0
        while batch := list(islice(rows, _BATCH_SIZE)):
            write(_answers(model, batch, explain))
            answered += len(batch)
        if not answered:
            raise InputError(f"{f'--file {file}' if file else 'stdin'}: holds no text")
    if out is not None:
        say(f"wrote {out}: answers to {answered:,} texts")


def _answers(model: PersonalModel, texts: list[Text], explain: bool) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]]
    if not model.task.labeled:
        answers = [{"answer": answer} for answer in model.write(texts)]
    else:
        answers = [_fields(prediction) for prediction in model.predict(texts)]
    if explain:
        for answer, explanation in zip(answers, model.explain(texts), strict=True):
            answer |= {key: value for key, value in asdict(explanation).items() if value is not None}
    return [{"text": text, **answer} for text, answer in zip(texts, answers, strict=True)]


def _ranked(
    model: PersonalModel, run: Path, silo: str, queries: list[str], file: Path | None, top: int
) -> list[dict[str, Any]]:
    """Return the best passages for each query, of a file or of the rows that the silo was trained and tested on."""
    from silotune.data.kinds.retrieval import read_passages
    from silotune.data.readers import file_format
    from silotune.runs.evaluation import own_passages

    if any(not one.strip() for one in queries):
        raise InputError("--query: is empty")
    vectors = model.embed(queries)
    if file is None:
        passages = own_passages(run, silo)
    elif file_format(file)[0]:
        passages = [*read_passages(file)]
    else:
        with _opened(file, True) as opened:
            passages = [str(line) for line in read_lines(_lines([], file, opened), str(file), (1,))]
    best = (vectors @ model.embed(passages).T).topk(min(top, len(passages)))
    return [
        {"text": text, "rank": rank, "score": score, "passage": passages[place]}
        for text, scores, places in zip(queries, best.values.tolist(), best.indices.tolist(), strict=True)
        for rank, (score, place) in enumerate(zip(scores, places, strict=True), 1)
    ]


def _fields(prediction: Prediction) -> dict[str, object]:
    if prediction.spans is not None:
        return {"spans": [asdict(span) for span in prediction.spans]}
    if prediction.value is not None:
        return {"value": prediction.value}
    label = {"label": prediction.label} if prediction.label else {"labels": prediction.labels}
    return {**label, "probabilities": prediction.probabilities}


@contextmanager
def _opened(file: Path | None, quiet: bool) -> Iterator[BinaryIO | None]:
    """Open a file, with a bar of what is read of it where the answers do not go to the same terminal."""
    if file is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    shown = sys.stderr.isatty() and (quiet or not sys.stdout.isatty())
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True, disable=not shown))
        with file_errors(f"--file {file}: cannot be read"):
            opened = stack.enter_context(BufferedReader(cast(Any, bar.open(file, "rb", description=file.name))))
        yield opened


def _lines(texts: list[str], file: Path | None, opened: BinaryIO | None) -> Iterable[str]:
    if texts:
        if not all(text.strip() for text in texts):
            raise InputError("--text: is empty")
        return [text.replace("\n", " ").replace("\r", " ") for text in texts]
    if file is None or opened is None:
        return (_decoded(line, f"stdin line {number}") for number, line in enumerate(sys.stdin.buffer, 1))
    return _lines_of(file, opened)


def _lines_of(file: Path, opened: BinaryIO) -> Iterator[str]:
    try:
        yield from text_lines(opened, "\n")
    except UnicodeDecodeError as error:
        _decoded(file.read_bytes(), f"--file {file}")  # says where
        raise InputError(f"--file {file}: not UTF-8") from error


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Yield a function that writes answers: as JSON lines to stdout, or to a file that appears once it is complete."""
    if path is None:
        yield lambda rows: typer.echo("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
        return
    from silotune.data.readers import FORMATS, file_format
    from silotune.runs.redaction import text_writer

    kind, compression = file_format(path)
    if kind not in FORMATS or compression:
        raise InputError(f"--out {path}: unknown format {path.suffix!r}; allowed: {', '.join(FORMATS)}")
    if path.exists():
        raise InputError(f"--out {path}: already there; choose another file")
    temporary, fault = path.with_name(f".{path.name}.{os.getpid()}"), f"--out {path}: cannot be written"
    try:
        with ExitStack() as stack:
            with file_errors(fault):
                if kind == ".parquet":
                    write = _parquet(temporary, stack)
                else:
                    write = text_writer(kind, stack.enter_context(temporary.open("w", encoding="utf-8", newline="")))
            yield file_errors(fault)(write)
            with file_errors(fault):
                stack.close()
                temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _parquet(path: Path, stack: ExitStack) -> Callable[[list[dict[str, Any]]], None]:
    """Return a function that writes rows to a Parquet file: one row group per call, with the first call's types."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    from silotune.runs.redaction import cell

    writer: Any = None

    def write(rows: list[dict[str, Any]]) -> None:
        nonlocal writer
        rows = [row | {"text": cell(row["text"])} for row in rows]
        if writer is None:
            schema = pyarrow.Table.from_pylist(rows).schema
            if "labels" in schema.names:  # which may be empty in the first rows
                labels = pyarrow.field("labels", pyarrow.list_(pyarrow.string()))
                schema = schema.set(schema.get_field_index("labels"), labels)
            writer = stack.enter_context(ParquetWriter(path, schema))
        writer.write_table(pyarrow.Table.from_pylist(rows, writer.schema))

    return write


def _decoded(content: bytes, where: str) -> str:
    try:
        return decode_text(content)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start})") from error


def read_lines(lines: Iterable[str], where: str, texts: tuple[int, ...], conversations: bool = False) -> Iterator[Text]:
    """Yield the texts of lines, of which a row may have so many; empty lines are skipped.

    A line is a text, a pair separated by a tab, or JSON: a string, a list, or an object whose values (except `label`)
    are the texts, or a conversation. If a row has a single text, tabs belong to it.
    """
    from silotune.data.generation_rows import asked_row
    from silotune.data.rows import text_fault

    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        value = _parsed(line)
        if conversations and (turns := _turns(value)) is not None:
            asked_row(turns, f"{where} line {number}")
            yield turns
            continue
        if isinstance(value, dict):
            row_texts = [text for key, text in value.items() if key != "label"]
        elif value is not None:
            row_texts = value if isinstance(value, list) else [value]
        else:
            row_texts = line.split("\t") if max(texts) > 1 else [line]
        if len(row_texts) not in texts or not all(isinstance(text, str) for text in row_texts):
            form = " or ".join("one text" if count == 1 else "two texts, with a tab between" for count in texts)
            raise InputError(f"{where} line {number}: needs {form}, or JSON (got {line[:60]!r})")
        required = row_texts[: min(texts)] + [text for text in row_texts[min(texts) :] if text]  # inputs may be empty
        if fault := next(filter(None, map(text_fault, required)), ""):
            raise InputError(f"{where} line {number}: a text {fault}")
        yield row_texts[0] if len(row_texts) == 1 else (row_texts[0], row_texts[1])


def _parsed(line: str) -> Any:
    """Parse a line of JSON; None if the line is plain text."""
    if line.lstrip()[:1] not in ("[", "{", '"'):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _turns(value: Any) -> list[dict[str, Any]] | dict[str, Any] | None:
    """Return the turns of a conversation, with tools as it is; None if a line holds none."""
    from silotune.data.generation_rows import CONVERSATIONS, MESSAGES, TOOLS

    matches = (column for column in (MESSAGES, CONVERSATIONS) if isinstance(value, dict) and column in value)
    if (column := next(matches, None)) is None:
        return None
    return {MESSAGES: value[column], TOOLS: value[TOOLS]} if value.get(TOOLS) else value[column]
