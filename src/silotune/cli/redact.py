"""The command `silotune redact`: names and other spans of a file are replaced by their labels."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.app import RESULTS, app
from silotune.cli.console import PrecisionOption, say_aside
from silotune.cli.predict import RunArgument, SiloOption
from silotune.errors import InputError, file_errors


@app.command(rich_help_panel=RESULTS)
def redact(
    run: RunArgument,
    silo: SiloOption,
    file: Annotated[Path, typer.Argument(help="A text file, a table (.csv, .tsv) or JSON lines (.jsonl).")],
    column: Annotated[
        str | None, typer.Option(help="The column with the text; default: that of the silo's own data.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new file for the redacted text; default: stdout.")] = None,
    precision: PrecisionOption = None,
) -> None:
    """Replace the spans that one silo's model finds in a file by their labels, such as [PER].

    The first line, on stderr, says what share of the true spans of its test rows the model finds: what it does not
    find stays readable. Files are read in portions and may be of any length.
    """
    from silotune.runs.personal_model import load_model
    from silotune.runs.redaction import recall_text
    from silotune.runs.redaction import redact as write_redacted

    if out is not None and out.exists():
        raise InputError(f"--out {out}: already there; choose another file")
    model = load_model(run, silo, precision=precision)
    say_aside(recall_text(run, silo))
    with ExitStack() as stack:
        with file_errors(f"{file}: cannot be read"):
            opened = stack.enter_context(file.open("rb"))
        if out is None:
            number, counts = write_redacted(model, file, opened, sys.stdout, column)
        else:
            temporary = out.with_name(f".{out.name}.{os.getpid()}")
            stack.callback(temporary.unlink, missing_ok=True)
            with file_errors(f"--out {out}: cannot be written"):
                target = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
            number, counts = write_redacted(model, file, opened, target, column)
            with file_errors(f"--out {out}: cannot be written"):
                target.close()
                temporary.replace(out)
    listing = ", ".join(f"{counts[label]:,} {label}" for label in model.task.labels if counts[label]) or "nothing"
    say_aside(f"replaced in {number:,} lines: {listing}")
