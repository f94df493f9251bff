"""Tracebacks for people whose code raised: their own frames, elastix's folded.

An error that elastix did not foresee keeps all frames: there it is ours that one wants to see.
"""

import traceback
from pathlib import Path

from elastix.errors import ElastixError

_OURS = str(Path(__file__).parents[2])
_TESTING = str(Path(_OURS) / "testing")  # train functions live there too


def told(error: BaseException) -> str:
    """The traceback of an error that a train function raised, as text."""
    whole = traceback.TracebackException.from_exception(error)
    if not isinstance(error, ElastixError) and whole.stack and _is_ours(whole.stack[-1]):
        return "".join(whole.format())
    seen: set[int] = set()
    part: traceback.TracebackException | None = whole
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if not _is_ours(f)])
        if isinstance(error, ElastixError):  # its message says what the causes were
            part.__cause__, part.__suppress_context__ = None, True
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(whole.format())


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OURS) and not frame.filename.startswith(_TESTING)
