"""What all commands print: tables or JSON, and lines for people. Errors are in exit_codes.py."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastix.observe.event_text import plain, plain_lines

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

    The first of the lines names the columns; a single column has no name, as in `$(...)`.
    """
    if as_json:
        typer.echo(json.dumps(strict(value), indent=1, allow_nan=False))
        return
    if not sys.stdout.isatty():
        if len(columns) > 1:
            typer.echo("\t".join(map(plain, columns)))
        for row in rows:
            typer.echo("\t".join(plain(str(cell)) for cell in row))
        return
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(Text(plain(column)), overflow="fold")  # a narrow terminal cuts nothing
    for row in rows:
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    Console().print(table)


def strict(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """With null for NaN and infinity, for which JSON has no word."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
