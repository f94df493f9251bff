"""Run the train function on one member, and say how it ended. No Ray."""

import gc
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from elastix.comm.protocol.participant import Fenced, OutOfMemory, Released
from elastix.errors import ElastixError, QuorumLost, StoreError
from elastix.train.control.messages import Outcome, OutcomeKind
from elastix.train.replica import refusals, tracebacks
from elastix.train.replica.context import Context
from elastix.train.replica.device_failures import is_device_failure
from elastix.train.replica.exactness import deterministic_operators
from elastix.train.replica.member import Member, Paused

logger = logging.getLogger(__name__)


class Halted(BaseException):
    """Whoever runs the function wants it to end. Not an Exception: user code must not catch it."""


_NEWS_S = 3.0
"""A collective within a worker may fail before it is heard why."""


def run_train(
    train: Callable[[Context], None],
    member: Member,
    config: Mapping[str, Any],
    before: Callable[[], None] = lambda: None,
) -> Outcome:
    """Call `before`, and `train` with a Context. Blocks until it is through.

    Raises:
        KeyboardInterrupt: in a process that runs it alone; nothing else is ever raised.
    """
    member.seed()
    try:
        with deterministic_operators() if member.settings.exact else nullcontext():
            before()
            paused = _paused(train, Context(member, config))
            _finish(member, "paused" if paused else "final")
        if member.watching:  # it took no part: nobody has to know that it is through
            return Outcome(kind=OutcomeKind.LEFT, step=member.step)
        return Outcome(
            kind=OutcomeKind.FINISHED,
            paused=paused,
            epochs=member.epochs,
            generation=member.generation,
            rank=member.rank,
            step=member.step,
        )
    except Halted:
        return Outcome(
            kind=OutcomeKind.HALTED, epochs=member.epochs, rank=member.rank, step=member.step
        )
    except Released as released:
        return Outcome(kind=OutcomeKind.LEFT, generation=released.generation, step=member.step)
    except Fenced as fenced:
        if member.settings.crew:
            return _cut(member, fenced)
        return Outcome(kind=OutcomeKind.FENCED, step=member.step, summary=str(fenced))
    except OutOfMemory as error:  # as if the system had ended the process for it
        logger.warning("worker %d is lost: %s", member.me, error)
        return Outcome(kind=OutcomeKind.OUT_OF_MEMORY, step=member.step, summary=str(error))
    except QuorumLost as error:
        try:
            member.store_last("quorum lost")
        except StoreError as failure:
            error.add_note(f"The State could not be stored: {failure}")
        return Outcome(
            kind=OutcomeKind.DISMISSED,
            generation=member.generation,
            rank=member.rank,
            step=member.step,
            error=error,
        )
    except BaseException as error:
        if member.settings.alone and isinstance(error, KeyboardInterrupt):
            raise  # it is meant for the process, not for the train function
        if not is_device_failure(error) and _was_cut(member, error):
            return _cut(member, error)
        return _failed(member, error)


def let_go_of_memory() -> None:
    """After a life of a process, which goes on with another.

    Models are collected, with their connections, and processes that read samples for them. A GPU
    may be shared, and what torch keeps of its memory nobody else can use.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _cut(member: Member, error: BaseException) -> Outcome:
    """The others of this worker are lost, or wait for this one for ever, as it does for them."""
    if member.processes.parted is not None:  # at once: the others raise soon, and do not know why
        return _raised(member, member.processes.parted.with_traceback(error.__traceback__))
    return Outcome(kind=OutcomeKind.FREE, step=member.step, summary=_said(error))


def _failed(member: Member, error: BaseException) -> Outcome:
    """The train function, or what it computes on."""
    if is_device_failure(error):
        said = _said(error)
        logger.warning("worker %d is lost: %s", member.me, said)
        return Outcome(
            kind=OutcomeKind.DEVICE_FAILED,
            step=member.step,
            summary=said,
            traceback=tracebacks.told(error),
        )
    member.failed()
    return _raised(member, error)


def _raised(member: Member, error: BaseException) -> Outcome:
    if isinstance(error, NameError) and member.came_to_none:
        error.add_note(refusals.CAME_TO_NONE)
    if isinstance(error, FileNotFoundError):
        _tell_folder(error, error.filename)
    return Outcome(
        kind=OutcomeKind.RAISED,
        epochs=member.epochs,
        rank=member.rank,
        step=member.step,
        error=error if isinstance(error, ElastixError) else None,
        summary=_said(error),
        traceback=tracebacks.told(error),
    )


def _tell_folder(error: FileNotFoundError, path: object) -> None:
    """Workers of a cluster run in the folder in which Ray was started, not in the script's."""
    if isinstance(path, str | os.PathLike) and not Path(path).is_absolute():
        where = {"folder": Path.cwd(), "host": socket.gethostname()}
        error.add_note(refusals.RELATIVE_PATH.format(path=os.fspath(path), **where))


def _paused(train: Callable[[Context], None], ctx: Context) -> bool:
    """Run it: whether it was paused before its end."""
    try:
        _call(train, ctx)
    except Paused:
        return True
    except RuntimeError as error:
        inner = tracebacks.unwrapped(error)
        if inner is error:
            raise
        raise inner from inner.__cause__
    return False


def _call(train: Callable[[Context], None], ctx: Context) -> None:
    """A process that the function forks ends where the function does: it is no second worker."""
    own = os.getpid()
    try:
        train(ctx)
    except BaseException as error:
        if os.getpid() != own:
            _end(error)
        raise
    if os.getpid() != own:
        _end(SystemExit())


def _end(error: BaseException) -> NoReturn:
    """End this process as Python would, but for what its parent has to see to."""
    code: Any = 1
    if isinstance(error, SystemExit):
        code = error.code or 0
    else:
        traceback.print_exception(error)
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _finish(member: Member, reason: str) -> None:
    """The function is through.

    Raises:
        ConfigError: it has never joined the group that it was to be trained by.
    """
    if member.prepared:
        member.finish(reason)
    elif not member.settings.alone:
        raise refusals.never_prepared()


def _was_cut(member: Member, error: BaseException) -> bool:
    """Whether a collective with mates has failed, as one of them is lost."""
    own = isinstance(error, ElastixError) or not isinstance(error, Exception)
    return bool(member.settings.crew) and not own and member.processes.await_broken(_NEWS_S)


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own __str__ may fail
        return type(error).__name__
