"""Figures that are taken in processes of their own: what one holds is nobody else's."""

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = "spawn"
"""How multiprocessing starts them."""


class Died(RuntimeError):
    """The process ended before it had told its figures."""


def _told(ask: Callable[..., dict[str, float]], arguments: tuple[Any, ...], told: Any) -> None:  # noqa: ANN401
    found = ask(*arguments)
    told.send((found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def apart(ask: Callable[..., dict[str, float]], *arguments: Any) -> tuple[dict[str, float], float]:  # noqa: ANN401
    """What `ask` finds in a process of its own, and the most MiB that it held.

    Raises:
        Died: it told nothing.
    """
    context: Any = multiprocessing.get_context(START)
    hears, tells = context.Pipe(duplex=False)
    process = context.Process(target=_told, args=(ask, arguments, tells))
    process.start()
    tells.close()
    try:
        found: tuple[dict[str, float], float] = hears.recv()
    except EOFError:
        process.join()
        raise Died(f"{getattr(ask, '__name__', ask)} ended with {process.exitcode}") from None
    process.join()
    return found


def resident() -> int:
    """Bytes that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
