"""The command `silotune chat`: ask a silo's language model in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silotune.cli.app import RESULTS, app
from silotune.cli.console import PrecisionOption, complete_run
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.runs.personal_model import PersonalModel

_END, _NEW = "/quit", "/new"


@app.command(rich_help_panel=RESULTS)
def chat(
    run: Annotated[
        Path,
        typer.Argument(
            help="A finished run, or a folder models/NAME of one.", metavar="RUN", autocompletion=complete_run
        ),
    ],
    silo: Annotated[str | None, typer.Option(help="The silo whose model answers.")] = None,
    system: Annotated[str | None, typer.Option(help="A system turn before the conversation.")] = None,
    precision: PrecisionOption = None,
) -> None:
    """Ask one silo's language model: a question a line, answered as it is written.

    With a chat template, questions and answers so far belong to the prompt; /new forgets them. /quit or Ctrl-D ends.
    Through a pipe, every line of input gets one line of output.
    """
    model = _opened(run, silo, precision)
    interactive = sys.stdin.isatty()
    if interactive:
        keeps = "" if _remembers(model) else "; every question stands alone, as the model has no chat template"
        typer.echo(f"silo {model.about['silo']}, {model.context.backbone.name}; {_NEW}, {_END} or Ctrl-D{keeps}")
    lines = _typed() if interactive else (line.rstrip("\r\n") for line in sys.stdin)
    for answer in converse(model, lines, system, partial(typer.echo, nl=False) if interactive else None):
        typer.echo("" if interactive else " ".join(answer.split()))


def _opened(run: Path, silo: str | None, precision: str | None) -> PersonalModel:
    """Open the model of a run's silo, or of a model's own folder."""
    from silotune.runs.model_file import MODEL_FILE
    from silotune.runs.personal_model import PersonalModel, load_model

    if (run / MODEL_FILE).is_file():
        if silo is not None:
            raise InputError(f"--silo: {run} is one silo's model already; leave it out")
        model = PersonalModel.open(run, precision=precision)
    elif silo is None:
        raise InputError("--silo: is missing; allowed: --silo NAME, or a folder models/NAME")
    else:
        model = load_model(run, silo, precision=precision)
    if model.task.labeled:
        raise InputError(f"chat: task {model.task.name!r} is one of {model.task.kind}; use predict")
    return model


def _remembers(model: PersonalModel) -> bool:
    return bool(getattr(model.context.head, "chat", False))


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("you: ")
        except EOFError:
            typer.echo("")
            return


def converse(
    model: PersonalModel, lines: Iterable[str], system: str | None = None, follow: Callable[[str], None] | None = None
) -> Iterator[str]:
    """Yield the answer to every line that is a question, and not empty, `/new` or `/quit`.

    With a chat template, the model reads the conversation so far. `follow` is called with each further piece of an
    answer while it is written.
    """
    if system is not None and not _remembers(model):
        raise InputError("--system: needs a model with a chat template")
    begin: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    turns = list(begin)
    for line in lines:
        question = line.strip()
        if question == _END:
            return
        if question == _NEW:
            turns = list(begin)
            continue
        if not question:
            continue
        written = ""

        def further(text: str) -> None:
            nonlocal written
            if follow is not None and text.startswith(written):
                follow(text[len(written) :])
                written = text

        turns.append({"role": "user", "content": question})
        prompt: Any = turns if _remembers(model) else question
        (answer,) = model.write([prompt], further if follow is not None else None)
        further(answer)
        turns.append({"role": "assistant", "content": answer})
        yield answer
