"""How a script ends whose run has ended badly, when the console has said why already.

What a user sees then is the console's last lines and not, a second time, a traceback: after Ctrl-C
nothing is added, and an error that was told of comes as the user's own frames and its message.
Whoever catches the exception sees no difference; neither does any other exception.

It stands in for `sys.excepthook` from the first such ending on.
"""

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TypeVar

_OURS = str(Path(__file__).parents[1])
_TOLD = "_elastix_has_told"
E = TypeVar("E", bound=BaseException)


def told(error: E) -> E:
    """Mark an exception: the console has told of it. The same comes back, to be raised."""
    setattr(error, _TOLD, True)
    if sys.excepthook is not _hook:
        _previous.append(sys.excepthook)
        sys.excepthook = _hook
    return error


_previous = [sys.__excepthook__]


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not getattr(error, _TOLD, False):
        _previous[-1](kind, error, trace)
        return
    if isinstance(error, KeyboardInterrupt):
        return
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(_OURS)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    sys.stderr.write("".join([*lines, *traceback.format_exception_only(error)]))
