"""What all verbs share: tables or JSON, and errors as a message with an exit code."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastix.errors import ConfigError, ElastixError
from elastix.observe.lines import plain, plain_lines

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
P = ParamSpec("P")
T = TypeVar("T")
_debug = False


def show_tracebacks(wanted: bool) -> None:
    """Whether an error comes with its traceback."""
    global _debug
    _debug = wanted


def says(command: Callable[P, T]) -> Callable[P, T]:
    """Turn an error into a message and an exit code, one that nobody foresaw too."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except ElastixError as error:
            if _debug:
                raise
            complain(f"elastix: {error}")
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise  # typer ends quietly if `| head` has seen enough
        except Exception as error:  # the border of the process
            if _debug:
                raise
            what = f"{type(error).__name__}: {error}"
            complain(
                f"elastix: {what}. That was not foreseen; what was done until then stays. "
                "`elastix --debug` before the verb shows where it came from."
            )
            raise typer.Exit(1) from error

    return run


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
        typer.echo(json.dumps(_strict(value), indent=1, allow_nan=False))
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


def _strict(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """With null for NaN and infinity, for which JSON has no word."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
