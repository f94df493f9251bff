"""What a verb that fails says, and the code it ends with.

2 for what the user asked for and cannot have (ConfigError, wrong arguments), 1 for everything else
that failed, 130 after Ctrl-C, 0 otherwise.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import typer

from elastix.commands.output import complain
from elastix.errors import ConfigError, ElastixError, Full
from elastix.observe.excepthook import was_told

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
        except KeyboardInterrupt as error:
            if not was_told(error):
                complain("elastix: interrupted")
            sys.exit(130)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise  # typer ends quietly if `| head` has seen enough
        except Exception as error:  # the border of the process
            if _debug:
                raise
            complain(f"elastix: {_full(error) or _denied(error) or _unforeseen(error)}")
            raise typer.Exit(1) from error

    run.__doc__ = _flowing(command.__doc__ or "")
    return run


def ends(program: Callable[[], None]) -> None:
    """Run the program. What no verb prints, help and version, may have no room either.

    Raises:
        SystemExit: with its exit code.
    """
    try:
        program()
    except OSError as error:
        what = _full(error)
        if _debug or not what:
            raise
        complain(f"elastix: {what}")
        sys.exit(1)


def _full(error: Exception) -> str:
    """Empty if that is not it. Where a file is opened its name comes with the error."""
    if not isinstance(error, OSError) or error.filename is not None or not Full.tells(error):
        return ""
    return (
        f"what it prints, or a file that it writes, has no room: {error.strerror}. What was done "
        "until then stays. Make room, or have it print elsewhere."
    )


def _denied(error: Exception) -> str:
    """Empty if that is not it."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return ""
    return (
        f"{error.filename}: {error.strerror}. Let this user look, or write, there. What was done "
        "until then stays."
    )


def _unforeseen(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {error}. That was not foreseen; what was done until then stays. "
        "`elastix --debug` before the verb shows where it came from."
    )


def _flowing(text: str) -> str:
    """Paragraphs without line breaks, which would be shown where the source has them; not lists."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if "\n-" in part else part.replace("\n", " ") for part in parts)
