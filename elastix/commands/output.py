"""What all commands print: tables or JSON, and lines for people. Errors are in exit_codes.py."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastix.observe.event_text import plain, plain_lines

_LONG = 20  # of a word: digests, paths and names may be folded

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def say(text: str, *, err: bool = False) -> None:
    """Print lines for people. What a user named or a function raised does not steer a terminal."""
    for part in plain_lines(text):
        typer.echo(part, err=err)


def complain(text: str) -> None:
    """As `say`, to stderr."""
    say(text, err=True)


def undisturbed(as_json: bool) -> AbstractContextManager[Any]:
    """Under --json, send to stderr what is printed inside: Ray, scripts and workers print too."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_table(
    as_json: bool,
    value: Any,  # noqa: ANN401 - any JSON
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
) -> None:
    """Print `value` as JSON, or `rows`: a table on a terminal, lines with tabs elsewhere.

    The first of the lines names the columns; a single column has no name, as in `$(...)`. A value
    of several lines, such as a traceback, is one line there.
    """
    if as_json:
        typer.echo(json.dumps(strict(value), indent=1, allow_nan=False))
        return
    if not sys.stdout.isatty():
        if len(columns) > 1:
            typer.echo("\t".join(map(plain, columns)))
        for row in rows:
            typer.echo("\t".join(" ".join(_lines(cell)) for cell in row))
        return
    console, cells = Console(), [["\n".join(_lines(cell)) for cell in row] for row in rows]
    for gap in (2, 1):
        widths = _widths(columns, cells, console.width - gap * (len(columns) - 1))
        if widths:
            table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
            for column, width in zip(columns, widths, strict=True):
                table.add_column(Text(plain(column)), overflow="fold", width=width)
            for row in cells:
                table.add_row(*map(Text, row))
            console.print(table)
            return
    for number, row in enumerate(cells):  # in columns words would be broken
        block = Table.grid(padding=(0, 2, 0, 0))
        for column, cell in zip(columns, row, strict=True):
            block.add_row(Text(plain(column)), Text(cell, overflow="fold"))
        console.print(*[""] * (number > 0), block, sep="\n")


def _lines(cell: Any) -> list[str]:  # noqa: ANN401 - whatever has a text
    return [line for line in plain_lines(str(cell)) if line]


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], room: int
) -> Sequence[int] | None:
    """Of the columns, so that they fit and no word is broken that is not long; None: none are."""
    whole = [list(column) for column in zip(columns, *rows, strict=True)]
    lines = ("\n".join(column).split("\n") for column in whole)
    widths = [min(room, max(map(cell_len, column))) for column in lines]
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in whole]
    least = [min(_LONG, word) for word in words]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        spare = [width if width > word else 0 for width, word in zip(widths, least, strict=True)]
        widths[spare.index(max(spare))] -= 1
    return widths


def strict(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """With null for NaN and infinity, for which JSON has no word."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
