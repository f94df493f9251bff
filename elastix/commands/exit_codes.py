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
from elastix.errors import ConfigError, ElastixError
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
            what = f"{type(error).__name__}: {error}"
            complain(
                f"elastix: {what}. That was not foreseen; what was done until then stays. "
                "`elastix --debug` before the verb shows where it came from."
            )
            raise typer.Exit(1) from error

    run.__doc__ = _flowing(command.__doc__ or "")
    return run


def _flowing(text: str) -> str:
    """Paragraphs without line breaks, which would be shown where the source has them; not lists."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if "\n-" in part else part.replace("\n", " ") for part in parts)
