"""What the protocol asks its driver for: one type for each thing that lies outside. Pure.

A driver carries a want out and sends the answer back. Those marked *meets peers* wait for other
members. Such a one may be answered by throwing `Superseded`, as soon as a newer urgent membership
is in the inbox, or `Failed`, if it cannot be had in this group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from elastix.comm.network.door import Address
    from elastix.comm.protocol.catch_up_messages import Given, Watched
    from elastix.comm.protocol.crew import Word
    from elastix.comm.protocol.operation import Operation, OperationOutcome
    from elastix.comm.protocol.participant import Joined
    from elastix.comm.protocol.recovery import Position


class Superseded(Exception):
    """A newer generation was announced while waiting."""


class Failed(Exception):
    """What was wanted cannot be had in this group, although nobody is known to be dead.

    Attributes:
        error: why.
        unreachable: members that could not be reached, if it was to connect them.
    """

    def __init__(self, error: BaseException, unreachable: frozenset[int] = frozenset()) -> None:
        super().__init__(str(error))
        self.error = error
        self.unreachable = unreachable


class GroupHandle(Protocol):
    """Connected members, as far as the protocol looks at them."""

    @property
    def generation(self) -> int:
        """That they were connected for."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """Their ids in rank order."""
        ...


class Seat(NamedTuple):
    """A member's place among the members of a generation, whether they are connected or not."""

    generation: int
    members: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.members)


# ------------------------------------------------------------------ waiting, and the group


class Await(NamedTuple):
    """Wait until `until()` holds, which is looked at whenever there is news. Sends None.

    `phase` is where the member says it is meanwhile, if that is worth saying.
    """

    until: Callable[[], bool]
    phase: str = ""
    detail: int = 0


class Build(NamedTuple):
    """Connect members, and have `prepare` do meanwhile what it can. Meets peers; sends a group."""

    generation: int
    members: tuple[int, ...]
    scope: str = "all"
    prepare: Operation | None = None


class Connect(NamedTuple):
    """Begin to connect members, and leave it to Connected to wait for them. Sends None.

    Whatever was begun for older generations is dropped.
    """

    generation: int
    members: tuple[int, ...]


class Connected(NamedTuple):
    """Wait for what was begun with Connect. Meets peers; sends a group.

    One who is superseded may wait for it again.
    """

    generation: int


class Abandon(NamedTuple):
    """Leave a group without waiting for anybody. Sends None."""

    group: GroupHandle


class Meet(NamedTuple):
    """Tell all members one's position. Meets peers; sends all positions in rank order."""

    group: GroupHandle
    position: Position


class CompareLayouts(NamedTuple):
    """Refuse members with another model. Meets peers; sends None."""

    group: GroupHandle


class GiveState(NamedTuple):
    """Give one's State to all others in `group`. Meets peers; sends None."""

    group: GroupHandle
    founding: bool


class TakeState(NamedTuple):
    """Become what rank `root` gives. Meets peers; sends Joined."""

    group: GroupHandle
    root: int


class AllHaveState(NamedTuple):
    """Wait until all founders have come to this place. Meets peers; sends None."""

    group: GroupHandle


class PassOn(NamedTuple):
    """Rank `source` passes a result on, of the same shape as `held` is. Meets peers; sends it."""

    group: GroupHandle
    source: int
    held: torch.Tensor


# ------------------------------------------------------------------ one operation


class Compute(NamedTuple):
    """Have the train function compute what the operation lacks, if these members do it. Sends None.

    Other than all else it takes as long as the train function takes, which is at work and not
    waiting: the driver gives the thread back to it, and goes on when it is asked to.
    """

    members: tuple[int, ...]


class ReduceBuckets(NamedTuple):
    """Start all that goes before the round, and wait until it is over. Meets peers; sends None."""

    group: GroupHandle
    operation: Operation


class Payload(NamedTuple):
    """What this member adds to the round, and the operation's detail. Sends both."""

    group: GroupHandle | Seat
    operation: Operation


class CompareCalls(NamedTuple):
    """Tell all members kind and detail of the call. Meets peers; sends all of them by rank."""

    group: GroupHandle
    kind: int
    detail: int


class ReducePayload(NamedTuple):
    """The round itself. Meets peers; sends the reduced payload."""

    group: GroupHandle
    operation: Operation
    payload: torch.Tensor


class Conclude(NamedTuple):
    """The operation was left: take over what was agreed, and tell joiners. Sends None.

    Attributes:
        number: of the operation.
        plan: the workers over which its batch was split.
    """

    operation: Operation
    outcome: OperationOutcome
    number: int
    plan: tuple[int, ...]


class StoreState(NamedTuple):
    """At a boundary where the group stands still: have the State stored as it is. Sends None."""


class Say(NamedTuple):
    """Tell the followers of this worker; or, from one of them, its speaker. Sends None."""

    word: Word


# ------------------------------------------------------------------ reports


class TellEntered(NamedTuple):
    """In the group of `generation`, with the State. Sends None."""

    generation: int
    joined: Joined | None


class TellRecovered(NamedTuple):
    """Through with a change of the group. Sends None.

    Attributes:
        kind: of the operation that was in hand; 0 between operations.
        outcome: what became of it.
        since: the generation with whose news it began.
    """

    generation: int
    kind: int
    outcome: str
    since: int


class Doubt(NamedTuple):
    """Ask the controller for a new generation. Sends None."""

    generation: int
    error: BaseException
    unreachable: frozenset[int]


class AnnounceEntry(NamedTuple):
    """Tell joiners that this member enters a generation at this boundary. Sends None."""

    generation: int
    members: tuple[int, ...]


# ------------------------------------------------------------------ a joiner outside the group


class Subscribe(NamedTuple):
    """Be told by a donor. Sends a Stream."""

    donor: Address


class Adopt(NamedTuple):
    """Become what a donor has given, if its model is the same. Sends Joined."""

    given: Given


class TakeDigest(NamedTuple):
    """Of the State as it is. Sends text."""


class Unequal(NamedTuple):
    """The State here is not the donor's. Sends None.

    Attributes:
        operation: number of the next one.
        followed: operations since the State was copied.
        mine, theirs: the digests.
    """

    operation: int
    followed: int
    mine: str
    theirs: str


class Level(NamedTuple):
    """This joiner has drawn level, or shall be given the State in the group. Sends None.

    A shadow has the State; `equal` if it was found to be that of the worker that it follows.
    """

    equal: bool = True


class Lonely(NamedTuple):
    """This joiner has lost all its donors. Sends None."""


class Succeed(NamedTuple):
    """All members are lost, and this shadow goes on in their place. Sends None.

    `equal` unless its State was found to differ from theirs when it was compared last.
    """

    equal: bool


class Imitate(NamedTuple):
    """Take over what others agreed on, instead of carrying the operation through. Sends None."""

    operation: Operation
    watched: Watched


Want = (
    Await
    | Build
    | Connect
    | Connected
    | Abandon
    | Meet
    | CompareLayouts
    | GiveState
    | TakeState
    | AllHaveState
    | PassOn
    | Compute
    | ReduceBuckets
    | Payload
    | CompareCalls
    | ReducePayload
    | Conclude
    | StoreState
    | Say
    | TellEntered
    | TellRecovered
    | Doubt
    | AnnounceEntry
    | Subscribe
    | Adopt
    | TakeDigest
    | Unequal
    | Level
    | Lonely
    | Succeed
    | Imitate
)

_T = TypeVar("_T")
Course = Generator[Want, Any, _T]
"""A stretch of the protocol: yields wants, is sent their answers, returns what it came to."""
