"""Run the train function on one member, and say how it ended. No Ray."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastix.comm.participant import Fenced, Released
from elastix.errors import ElastixError, QuorumLost, StoreError
from elastix.train.context import Context
from elastix.train.member import Member, Paused


class Halted(BaseException):
    """Whoever runs the function wants it to end. Not an Exception: user code must not catch it."""


_SETTLE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a worker's run ended: "finished", "raised", "left", "halted", "fenced" or "dismissed".

    Attributes:
        epochs: passes over the data that this worker saw committed.
        paused: it finished before its end, with its State stored, as its settings ask for.
        generation: of the group that a finished worker left; the first without one that was let go.
        error: what was raised, if it is elastix's own.
        traceback: of what was raised, as text.
    """

    kind: str
    paused: bool = False
    epochs: float = 0.0
    generation: int = 0
    rank: int = -1
    step: int = 0
    error: ElastixError | None = None
    summary: str = ""
    traceback: str = ""


def run_train(
    train: Callable[[Context], None], member: Member, config: Mapping[str, Any]
) -> Outcome:
    """Call `train` with a Context. Blocks until it is through.

    Raises:
        KeyboardInterrupt: in a process that runs it alone; nothing else is ever raised.
    """
    member.seed()
    paused = False
    try:
        try:
            train(Context(member, config))
        except Paused:
            paused = True
        if member.prepared:
            member.finish("paused" if paused else "final")
        if member.watching:  # it took no part: nobody has to know that it is through
            return Outcome(kind="left", step=member.step)
        return Outcome(
            kind="finished",
            paused=paused,
            epochs=member.epochs,
            generation=member.generation,
            rank=member.rank,
            step=member.step,
        )
    except Halted:
        return Outcome(kind="halted", epochs=member.epochs, rank=member.rank, step=member.step)
    except Released as released:
        return Outcome(kind="left", generation=released.generation, step=member.step)
    except Fenced as fenced:
        return Outcome(kind="fenced", step=member.step, summary=str(fenced))
    except QuorumLost as error:
        try:
            member.save("quorum lost")
            member.await_stored()
        except StoreError as failure:
            error.add_note(f"The State could not be stored: {failure}")
        return Outcome(kind="dismissed", rank=member.rank, step=member.step, error=error)
    except BaseException as error:
        if member.settings.alone and isinstance(error, KeyboardInterrupt):
            raise  # it is meant for the process, not for the train function
        member.saver.settle(_SETTLE_S)  # what was accepted before is stored nevertheless
        return Outcome(
            kind="raised",
            epochs=member.epochs,
            rank=member.rank,
            step=member.step,
            error=error if isinstance(error, ElastixError) else None,
            summary=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
        )
