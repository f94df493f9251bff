"""How a script ends whose run has ended badly, when the console has said why already.

What a user sees then is the console's last lines and not, a second time, a traceback: after Ctrl-C
nothing is added, and an error that was told of comes as the user's own frames and its message.
Whoever catches the exception sees no difference; neither does any other exception.

It stands in for `sys.excepthook` from the first such ending on. IPython asks the exception itself.
"""

import functools
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TypeVar

_OURS = str(Path(__file__).parents[1])
_TOLD = "_elastix_has_told"
_IPYTHON = "_render_traceback_"  # IPython's word for it
E = TypeVar("E", bound=BaseException)


def told(error: E) -> E:
    """Mark an exception: the console has told of it. The same comes back, to be raised."""
    setattr(error, _TOLD, True)
    setattr(error, _IPYTHON, functools.partial(_lines, error))
    if sys.excepthook is not _hook:
        _previous.append(sys.excepthook)
        sys.excepthook = _hook
    return error


def was_told(error: BaseException) -> bool:
    """Whether an exception was marked so."""
    return bool(getattr(error, _TOLD, False))


_previous = [sys.__excepthook__]


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not was_told(error):
        _previous[-1](kind, error, trace)
        return
    sys.stderr.write("".join(f"{line}\n" for line in _lines(error)))


def _lines(error: BaseException) -> list[str]:
    if isinstance(error, KeyboardInterrupt):
        return []
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return "".join([*lines, *traceback.format_exception_only(error)]).splitlines()


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_OURS) and "IPython" not in Path(frame.filename).parts
