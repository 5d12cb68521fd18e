"""Printing, completion in a shell, and types of arguments and options, that all commands share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import TextType
from typing_extensions import override

console = Console(highlight=False)


def complete_source(incomplete: str) -> list[str]:
    """Return the presets and YAML files that begin so."""
    from silotune.config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)] + _paths(incomplete, "*.yaml")


def complete_key(incomplete: str) -> list[str]:
    """Return the keys and sections that begin so."""
    from silotune.config.reference import all_keys, sections

    return [name for name in (*filter(None, sections()), *all_keys()) if name.startswith(incomplete)]


def complete_word(incomplete: str) -> list[str]:
    """Return `key=` of the keys that begin so, and the methods after `method=`."""
    from silotune.config.reference import all_keys
    from silotune.config.registries import METHODS, TUNERS

    for section, registry in (("method", METHODS), ("tuner", TUNERS)):
        if incomplete.startswith(f"{section}="):
            return [word for name in registry if (word := f"{section}={name}").startswith(incomplete)]
    return [word for name in all_keys() if (word := f"{name}=").startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders and folders of runs that begin so."""
    return [path for path in _paths(incomplete, "*") if Path(path).is_dir()]


def _paths(incomplete: str, pattern: str) -> list[str]:
    parent = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    return [str(path) for path in sorted(parent.glob(pattern)) if str(path).startswith(incomplete)]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only results.")]

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also a line for every silo's round, with its losses.")]

LogFile = Annotated[
    Path | None, typer.Option("--log-file", help="Append a line a round to this file, with times.", metavar="FILE")
]

PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="Load the backbone in this precision instead of the run's: fp32, …")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value …", metavar="[KEY=VALUE]…", autocompletion=complete_word)
]

Source = Annotated[
    str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML", autocompletion=complete_source)
]


_NAME, _TEXT, _FRAME = 20, 10, 3
"""Least widths of a table: of names of rows and of a text, where they are longer; of the frame around a cell."""


class WholeTable(Table):
    """A table that cuts nothing: texts are folded, and columns beyond the width go into further tables.

    Cells of numbers, which are justified to the right, stay on one line. Every table has the first column, the names
    of the rows, which gets the room that the others can spare.
    """

    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as one table, or several."""
        ranges = [_widths(column, console, options) for column in self.columns]
        least = [min(ranges[0][1], _NAME), *(low for low, _ in ranges[1:])]
        room = options.max_width - 1 - least[0] - _FRAME
        rest, parts = room, [[0]]
        for number in range(1, len(least)):
            if least[number] + _FRAME > rest and len(parts[-1]) > 1:
                parts.append([0])
                rest = room
            parts[-1].append(number)
            rest -= least[number] + _FRAME
        for part in parts:
            widths, spare = {number: least[number] for number in part}, room - sum(least[n] + _FRAME for n in part[1:])
            while spare > 0 and (narrow := [number for number in part if widths[number] < ranges[number][1]]):
                for number in [0] if narrow[0] == 0 else narrow[:spare]:
                    widths[number], spare = widths[number] + 1, spare - 1
            yield self._with(widths, self.title if part is parts[0] else None)

    def _with(self, widths: Mapping[int, int], title: TextType | None) -> Table:
        """Return a table of some of the columns, with these widths."""
        table = Table(title=title, show_lines=self.show_lines)
        selection = [(self.columns[number], width) for number, width in widths.items()]
        for column, width in selection:
            table.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        for row, *cells in zip(self.rows, *(column.cells for column, _ in selection), strict=True):
            table.add_row(*cells, style=row.style, end_section=row.end_section)
        return table


def _widths(column: Column, console: Console, options: ConsoleOptions) -> tuple[int, int]:
    """Return the least width of a column, and the width with which nothing is folded."""
    header = Measurement.get(console, options, column.header)
    cells = [Measurement.get(console, options, cell) for cell in column.cells]
    most = max(each.maximum for each in (header, *cells))
    if column.justify == "right":
        return max(header.minimum, *(cell.maximum for cell in cells), 1), most
    return min(_TEXT, max(each.minimum for each in (header, *cells))), most


def new_table(title: str | None, texts: Iterable[str], numbers: Iterable[str] = ()) -> WholeTable:
    """Make a table with columns of texts, and behind them columns of numbers."""
    table = WholeTable(*texts, title=title)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def say_aside(text: str) -> None:
    """Print a line to stderr, where stdout is JSON."""
    typer.echo(text, err=True)


def say(text: str) -> None:
    """Print a line unchanged: no wrapping (paths stay in one piece), no markup."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)
