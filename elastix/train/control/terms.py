"""What a conductor is told when it begins, or takes a run over, and where its run stands. Data."""

from dataclasses import dataclass
from enum import Enum, auto

from elastix.comm.network.door import Address
from elastix.config import FailureConfig


class Phase(Enum):
    """Where a run stands.

    RUNNING: workers are started, or at work.
    GOING_BACK: nobody has the State any more; the shell gives up what is not stored yet, and
        then says from which State to go on.
    OVER: there is nothing more to do but to end the workers that are left.
    """

    RUNNING = auto()
    GOING_BACK = auto()
    OVER = auto()


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """What a run was asked to be.

    Attributes:
        founders: workers that it begins with.
        min_workers: below it the survivors pause at the end of a step.
        max_workers: the largest group; who is ready beyond it is a spare.
        failure: the limits.
        first_step_s: see FailureDetector.
        shadows: further workers that follow the group and are not in it.
        in_parts: workers are several processes, which have a State in parts when theirs is lost.
        exact: nobody goes on from a State that was found to differ.
    """

    founders: int
    min_workers: int
    max_workers: int
    failure: FailureConfig
    first_step_s: float
    shadows: int = 0
    in_parts: bool = False
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A worker that is at work when another conductor takes the run over.

    Attributes:
        generation: the newest it has heard of.
        address: where joiners can follow it; None if they cannot.
        ready: it is up to `prepare`, or was.
        holder: it has the State.
        shadow: it has a State from outside the group.
        operation: number of its next one; negative without a State.
        lifeline: see Started.
        noticed: it had notice to leave, of which the conductor that is gone may have heard alone.
        misinformed: when it was started other samples were left out than are now.
    """

    worker: int
    pid: int
    node: str
    device: str
    generation: int
    address: Address | None
    ready: bool
    holder: bool
    shadow: bool = False
    operation: int = -1
    lifeline: str = ""
    noticed: bool = False
    misinformed: bool = False


@dataclass
class AtWork:
    """A worker at work, as the conductor knows it.

    Attributes:
        address: where joiners can follow it; None before it is ready.
        ready: it is up to `prepare`, or was.
        leaves: why, if it was asked to.
        lifeline: by which others on its node hear of its death; empty for none.
    """

    pid: int = 0
    node: str = ""
    device: str = ""
    address: Address | None = None
    ready: bool = False
    leaves: str = ""
    lifeline: str = ""
