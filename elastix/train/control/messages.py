"""What a worker and the controller of its run say to each other. Data, and nothing else.

A worker has one `send` for all of `FromWorker`, the controller one `hear`; the other way round it
is the same with `ToWorker`. How a message travels is the business of the shell: in a call of a
Ray actor, or down a pipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastix.comm.network.door import Address
from elastix.comm.protocol.membership import Membership
from elastix.errors import ElastixError
from elastix.events import Event
from elastix.train.checkpoint.assembly import CheckpointEnded, Delivered, Offer, Order, Withdrawn

# ---------------------------------------------------------------------------- from a worker


@dataclass(frozen=True, kw_only=True)
class Started:
    """The worker's process is up, and its heartbeats begin.

    Attributes:
        pid: of its process.
        node: where it runs, as Ray names the node; empty in a local run.
        device: where its model goes.
        lifeline: see the module of that name; empty for none.
    """

    pid: int
    node: str = ""
    device: str = ""
    lifeline: str = ""


@dataclass(frozen=True)
class Ready:
    """The worker waits to be let in; or it has lost the peers that it caught up from.

    Attributes:
        address: where joiners can follow this worker; None where nobody ever joins.
        computes_with: on what its last bits depend, as text (exactness.computes_with).
        operation: number of its next one; negative without a State.
    """

    address: Address | None
    computes_with: str = ""
    operation: int = -1


@dataclass(frozen=True)
class CaughtUp:
    """A joiner can come in at any boundary; or a shadow has been given the State.

    Attributes:
        equal: what the shadow has was found to be what the group has.
    """

    equal: bool = True


@dataclass(frozen=True, kw_only=True)
class Succeeded:
    """A shadow goes on in place of the group, all of whose members are lost.

    Attributes:
        step: the last one in its State.
        since: number of the first event that it has; see ReplicatedEvents.
        sequence: number of its next event.
        equal: its State did not differ when it was last compared with the group's.
    """

    step: int
    since: int
    sequence: int
    equal: bool


@dataclass(frozen=True)
class Entered:
    """The worker has the State and is in the group of that generation."""

    generation: int


@dataclass(frozen=True)
class Suspect:
    """An operation failed: somebody is dead, or the network hiccuped.

    Attributes:
        generation: the group in which it failed.
        error: as text.
        unreachable: workers to whom no connection came about; itself if it reached no meeting.
    """

    generation: int
    error: str
    unreachable: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SawDeath:
    """The process of a worker on the same host has ended; see WatchNeighbour."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Diverged:
    """Workers hold different States; all of them say so alike, and wait for a newer group.

    Attributes:
        step: the last committed one.
        workers, apart, parts: as in ReplicasDiverged.
        error: what ends the run if nothing can be done about it.
        unseen: see ReplicasDiverged.
    """

    step: int
    workers: tuple[int, ...]
    apart: tuple[int, ...]
    parts: tuple[str, ...]
    error: ElastixError
    unseen: bool = False


@dataclass(frozen=True)
class Leave:
    """The worker is to go at the next boundary.

    Attributes:
        cause: as the journal has it.
    """

    cause: str


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life: where the worker was when it was sent.

    Attributes:
        call: number of the operation that it is in, or comes to next, and its kind; 0 for none.
        passed: places that its training thread has passed, of those that have a name.
        waiting: the training thread is blocked until others move.
        waited_s: how long it has been so, since the worker began.
    """

    generation: int = 0
    step: int = 0
    call: tuple[int, int] = (-1, 0)
    phase: str = "start"
    detail: int = 0
    passed: int = 0
    waiting: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What a worker uses, and where its time goes; see events.WorkersMeasured."""

    values: Mapping[str, float]


@dataclass(frozen=True)
class RecordEvents:
    """Events for the journal.

    Attributes:
        entries: each with its sequence number if several workers may send it, None otherwise. One
            with a number is written the first time that it comes.
    """

    entries: tuple[tuple[int | None, Event], ...]


FromWorker = (
    Started
    | Ready
    | CaughtUp
    | Succeeded
    | Entered
    | Suspect
    | Diverged
    | SawDeath
    | Leave
    | Heartbeat
    | Measured
    | RecordEvents
    | Offer
    | Withdrawn
    | Delivered
)

MUST_ARRIVE = (
    Started,
    Ready,
    Succeeded,
    Diverged,
    Leave,
    RecordEvents,
    Offer,
    Withdrawn,
    Delivered,
)
"""These are said until a controller has heeded them. Without the others nothing is lost: a new
controller asks every worker what it holds, and heartbeats come again."""

OF_EACH = (Suspect, SawDeath, Leave, Offer, Withdrawn, Delivered)
"""What each process of a crew may say; all else its speaker says for the worker."""

# ------------------------------------------------------------------------------ to a worker


@dataclass(frozen=True)
class CatchUp:
    """A joiner is to follow one of these peers, the first of them that is there.

    Attributes:
        shadow: it is to do so for good.
    """

    donors: tuple[Address, ...]
    shadow: bool = False


@dataclass(frozen=True)
class WatchNeighbour:
    """Another worker runs on the same node: say so when its process ends.

    Attributes:
        lifeline: see the module of that name.
    """

    worker: int
    lifeline: str


@dataclass(frozen=True)
class Dismiss:
    """Nobody will come any more: store the State, and end.

    Attributes:
        reason: for the error that the worker raises.
    """

    reason: str


@dataclass(frozen=True)
class StoreSoon:
    """All of the group are to go, or the run is to end: store the State at the next boundary."""


@dataclass(frozen=True)
class Disband:
    """A process of the worker is lost, and the worker with it: come out of whatever it is in."""


ToWorker = (
    Membership | CatchUp | WatchNeighbour | Dismiss | StoreSoon | Disband | Order | CheckpointEnded
)

# --------------------------------------------------------------------------- a worker's end


class OutcomeKind(StrEnum):
    """In which way a worker's run ended.

    FINISHED: the train function returned.
    RAISED: it raised.
    LEFT: the worker was let go at a boundary, or was never let in.
    HALTED: whoever runs the function wanted it to end.
    FENCED: the others went on without the worker, and it cannot catch up from where it is.
    DISMISSED: it waited in vain for others.
    FREE: one of the worker's processes is lost, or the worker was taken out; this one is well.
    OUT_OF_MEMORY: it could not hold the State that it was given.
    DEVICE_FAILED: its GPU, or the driver of that, reports an error.
    OTHER_CODE: its node has other elastix code than the driver; it has not begun.
    """

    FINISHED = "finished"
    RAISED = "raised"
    LEFT = "left"
    HALTED = "halted"
    FENCED = "fenced"
    DISMISSED = "dismissed"
    FREE = "free"
    OUT_OF_MEMORY = "ran out of memory"
    DEVICE_FAILED = "its GPU failed"
    OTHER_CODE = "its node has other elastix code"


@dataclass(frozen=True)
class HeldPart:
    """Of which State a process of a lost worker has its part yet.

    Attributes:
        step: the last one in it.
        following: number of the next event that several workers may send.
        places: by loader, the epoch and the position in its stream.
        asked: the loader that was asked for a batch at that boundary; -1 for none. One step may end
            at several: where one loader has no batch left, and where the next one is asked.
        generation: whose members have contributed to that step; None if the process was given the
            State after it. A step may be taken twice, if those who took it first are lost.
        untold: such events before `following` that the journal may not have, with their numbers.
    """

    step: int
    following: int
    places: tuple[tuple[int, int], ...] = ()
    asked: int = -1
    generation: int | None = None
    untold: tuple[tuple[int, Event], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a worker's run ended.

    Attributes:
        epochs: passes over the data that this worker saw committed.
        paused: it finished before its end, with its State stored, as its settings ask for.
        generation: of the group that a worker left that finished, or waited in vain; the first
            without one that was let go.
        error: what was raised, if it is elastix's own.
        traceback: of what was raised, as text.
        kept: what a process that is free has of the State yet.
        node: on which no other is to be started, as Ray names it; empty for none.
    """

    kind: OutcomeKind
    paused: bool = False
    epochs: float = 0.0
    generation: int = 0
    rank: int = -1
    step: int = 0
    error: ElastixError | None = None
    summary: str = ""
    traceback: str = ""
    kept: HeldPart | None = None
    node: str = ""
