"""The commands `silotune report`, `personalization` and `transfer`, over finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from silotune.cli.console import JsonOption, console, say
from silotune.errors import InputError, require_known, require_unused
from silotune.lab.commands.verdicts import AgainstOption, MarginOption, show_verdicts

if TYPE_CHECKING:
    from silotune.lab.transfer_models import WhoseHead


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of compare.", metavar="RUN…")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    ddof: Annotated[int, typer.Option(min=0, max=1, help="Divisor n − ddof of the standard deviation over seeds.")] = 1,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    against: AgainstOption = "",
    margin: MarginOption = None,
) -> None:
    """Write one self-contained HTML page about finished runs; figures also as PNG and SVG beside it."""
    from silotune.lab.compare import report as write
    from silotune.lab.report.significance import beaten_by_words
    from silotune.lab.report.table_files import as_terminal
    from silotune.lab.report.tables import score_table

    written = write(runs, out, ddof=ddof, title=title, against=against, margin=margin)
    console.print(as_terminal(score_table(written.results)))
    for sentence in beaten_by_words(written.results):
        say(sentence)
    show_verdicts(written.results)
    say(f"wrote {written.path}")


def personalization(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of compare.", metavar="RUN…")],
    out: Annotated[Path, typer.Option(help="A new or empty folder for tables and figures.")],
    ddof: Annotated[int, typer.Option(min=0, max=1, help="Divisor n − ddof of the standard deviation over seeds.")] = 1,
) -> None:
    """Write tables and figures of FedDPA's personalization measures; the runs need evaluation.test_time=true."""
    from silotune.core.files import make_folder, write_text
    from silotune.lab.personalization import measure_tables, rounds_figure, silo_task_heatmap, unseen_table
    from silotune.lab.report.entries import read_entries
    from silotune.lab.report.frame import Results
    from silotune.lab.report.table_files import as_latex, as_markdown, as_terminal

    require_unused(out, "--out")
    results = Results(read_entries(runs), ddof)
    unseen = unseen_table(results)
    result_tables = [*measure_tables(results), *([unseen] if unseen else [])]
    for table in result_tables:
        console.print(as_terminal(table))
    make_folder(out, f"--out {out}")
    write_text(out / "tables.md", "\n".join(f"## {table.title}\n\n{as_markdown(table)}" for table in result_tables))
    write_text(out / "tables.tex", "\n".join(f"% {table.title}\n{as_latex(table)}" for table in result_tables))
    silo_task_heatmap(results.entries, out / "silo-task.png")
    rounds_figure(results.entries, out / "rounds.png")
    say(f"wrote {out}: tables.md, tables.tex and figures")


def release(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run in one process.", metavar="RUN")],
    silo: Annotated[str, typer.Option(help="The silo whose model is to be given away.")],
    as_json: JsonOption = False,
) -> None:
    """Measure how much a silo's model reveals about its training rows, before its release; prints one page."""
    import json

    from silotune.runs.release import measure_release

    measured = measure_release(run, silo)
    if as_json:
        typer.echo(json.dumps(measured.fields(), indent=1))
        return
    for line in measured.lines():
        say(line)


def transfer(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Finished run folders, one per task (and method, tuner, seed); transfer.head=target|source; "
            "transfer.types='{TASK: TYPE}'.",
            metavar="RUN…",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where transfer.csv, .tex and .png go.")],
) -> None:
    """Evaluate each run's tuned parts on every other run's task, without training: absolute and relative matrices.

    transfer.head=target reads the labels with the target run's head; transfer.head=source with the source's, where the
    numbers of labels agree.
    """
    head, types, folders = _parse_words(runs)
    from silotune.lab.report.table_files import as_terminal
    from silotune.lab.transfer import summary_table
    from silotune.lab.transfer import transfer as exchange

    with console.status("opening runs") as status:
        result = exchange(folders, out, head=head, types=types, status=status.update)
    for note in result.notes:
        say(note)
    for table in (*(matrix.table() for matrix in result.matrices), summary_table(result.matrices)):
        console.print(as_terminal(table))
    say(f"wrote {', '.join(map(str, result.files))}")


def _parse_words(words: Sequence[str]) -> tuple[WhoseHead, dict[str, str], list[Path]]:
    from silotune.config.trees import parse_word

    options: dict[str, Any] = {"transfer.head": "target", "transfer.types": {}}
    folders = []
    for word in words:
        if not word.startswith("transfer.") or "=" not in word:
            folders.append(Path(word))
            continue
        key, value = parse_word(word)
        require_known("key", key, options)
        options[key] = value
    head, types = options["transfer.head"], options["transfer.types"]
    if not isinstance(types, dict) or not all(isinstance(word, str) for word in (*types, *types.values())):
        raise InputError(f"transfer.types: must map tasks to types, e.g. '{{SST-2: sentiment}}' (got {types!r})")
    return cast("WhoseHead", head), types, folders
