"""Tracebacks for people whose code raised: their own frames, elastix's folded.

An error that elastix did not foresee keeps all frames: there it is ours that one wants to see.
"""

import traceback
from pathlib import Path

from elastix.errors import ElastixError

_OURS = str(Path(__file__).parents[2])
_TESTING = str(Path(_OURS) / "testing")  # train functions live there too
_LIBRARIES = {"site-packages", "dist-packages"}
_SCHEDULES = "torch.distributed.pipelining."


def unwrapped(error: BaseException) -> BaseException:
    """What a stage of a pipeline has raised, with the frames from the train function to there.

    torch's schedules raise a RuntimeError from it that has the shapes of what the stage was given.
    Any other error is returned as it is.
    """
    inner, before, end = error.__cause__, None, error.__traceback__
    while end is not None and end.tb_next is not None:
        before, end = end, end.tb_next
    if type(error) is not RuntimeError or inner is None or before is None or end is None:
        return error
    if not end.tb_frame.f_globals.get("__name__", "").startswith(_SCHEDULES):
        return error
    before.tb_next = inner.__traceback__
    return unwrapped(inner.with_traceback(error.__traceback__))


def told(error: BaseException) -> str:
    """The traceback of an error that a train function raised, as text."""
    whole = traceback.TracebackException.from_exception(error)
    if not isinstance(error, ElastixError) and whole.stack and _is_ours(whole.stack[-1]):
        return "".join(whole.format())
    seen: set[int] = set()
    part: traceback.TracebackException | None = whole
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        kept = [frame for frame in part.stack if not _is_ours(frame)]
        if isinstance(error, ElastixError):
            kept = _up_to_the_users_call(kept)
        part.stack = traceback.StackSummary.from_list(kept)
        if isinstance(error, ElastixError):  # its message says what the causes were
            part.__cause__, part.__suppress_context__ = None, True
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(whole.format())


def _up_to_the_users_call(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Without what a library, or a dataclass of ours, did between that call and us.

    All of them if everything is a library's, as where the train function is installed.
    """
    end = len(frames)
    while end and _is_between(frames[end - 1]):
        end -= 1
    return frames[:end] or frames


def _is_between(frame: traceback.FrameSummary) -> bool:
    return frame.filename == "<string>" or not _LIBRARIES.isdisjoint(Path(frame.filename).parts)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OURS) and not frame.filename.startswith(_TESTING)
