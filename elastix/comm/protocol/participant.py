"""The worker around the protocol: what it provides, what it is told, and how its part may end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elastix.state import State


class Fenced(BaseException):
    """This worker was taken out of the group. Not an Exception: user code must not catch it."""


class Broken(Fenced):
    """A process of this worker's crew is lost, and with it the worker."""

    def __init__(self, worker: int) -> None:
        super().__init__(f"worker {worker} has lost one of its processes")


class OutOfMemory(BaseException):
    """This worker cannot hold the State that it is given. Not an Exception, as Fenced is none."""


class Released(BaseException):
    """The others go on without this worker from here, as agreed: it was to leave."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"let go at the boundary of generation {generation}")
        self.generation = generation


@dataclass(frozen=True)
class Recovery:
    """One worker's way through one or more changes of the group.

    Attributes:
        kind: of the operation that was in hand; 0 between operations.
        outcome: what became of it.
        rebuild_s: from the meeting's start to a working group, for the last change.
        stall_s: from the news to the end of the operation.
    """

    generation: int
    kind: int
    outcome: str
    rebuild_s: float
    stall_s: float


@dataclass(frozen=True)
class Joined:
    """How a worker came by the State.

    Attributes:
        copy_s: how long the copy took.
        copy_bytes: size of the State; 0 of a shadow, which had it.
        watched_steps: operations that it followed before it came in; 0 if all waited for the copy.
    """

    copy_s: float
    copy_bytes: int
    watched_steps: int = 0


class Participant(Protocol):
    """What the worker around the protocol provides. Called in the training thread."""

    def give_state(self, founding: bool) -> State:
        """The State as it is, for newcomers. `founding`: the run begins here."""
        ...

    def adopt_state(self, state: State) -> None:
        """Become equal to the peer that gave `state`."""
        ...

    def digest(self) -> str:
        """Of the State as it is, equal for equal replicas."""
        ...

    def store_state(self) -> None:
        """Have the State stored, at a boundary where the group stands still."""
        ...

    def phase(self, name: str, detail: int) -> None:
        """Where this worker is: for heartbeats, traces, and tests that kill it there."""
        ...


class GroupListener(Protocol):
    """What is told of this worker's way in the group. Called in the training thread."""

    def level(self, *, equal: bool) -> None:
        """This joiner is level, or shall be given the State in the group instead; see Level."""
        ...

    def lonely(self) -> None:
        """This joiner has lost all its donors."""
        ...

    def unequal(self, operation: int, followed: int, mine: str, theirs: str) -> None:
        """The State here is not that of whom this worker follows, before that operation."""
        ...

    def succeed(self, *, equal: bool) -> None:
        """This shadow goes on in place of the group; see Succeed."""
        ...

    def entered(self, generation: int, joined: Joined | None) -> None:
        """In the group, with the State."""
        ...

    def recovered(self, recovery: Recovery) -> None:
        """An operation was left after the group changed in it."""
        ...

    def doubt(self, generation: int, error: BaseException, unreachable: frozenset[int]) -> None:
        """Ask the controller for a new generation, once for each that fails.

        `unreachable`: members that could not be reached when it was to be connected; this worker
        itself, if it could reach no meeting.
        """
        ...
