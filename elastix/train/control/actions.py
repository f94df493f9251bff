"""What the conductor wants done. Data: a shell carries them out, in their order."""

from dataclasses import dataclass
from enum import Enum, auto

from elastix.events import Event
from elastix.train.checkpoint.assembly import Delivered, Offer, Withdrawn
from elastix.train.control.messages import ToWorker


class Vacated(Enum):
    """What becomes of the place in which a worker ran.

    FREE: another worker may be started there.
    DRAINING: its node is to be taken away.
    UNUSED: nobody is to be started in its stead.
    """

    FREE = auto()
    DRAINING = auto()
    UNUSED = auto()


@dataclass(frozen=True)
class Tell:
    """Send a message to a worker; `to` is None for all that are at work."""

    to: int | None
    message: ToWorker


@dataclass(frozen=True)
class StartWorker:
    """Start a worker, under this id."""

    worker: int


@dataclass(frozen=True)
class KillWorker:
    """The worker is lost: end its process at once, even a stopped one, wherever it is."""

    worker: int


@dataclass(frozen=True)
class EndWorker:
    """The worker's work is done, or not needed: end its process."""

    worker: int


@dataclass(frozen=True)
class Vacate:
    """The worker's place is free, or is not to be used again. Comes once for each worker."""

    worker: int
    place: Vacated


@dataclass(frozen=True)
class Write:
    """Add an event to the journal; with its sequence number, if several workers may send it."""

    event: Event
    sequence: int | None = None


@dataclass(frozen=True)
class Relay:
    """Hand what a worker says of a checkpoint to their coordinator."""

    worker: int
    message: Offer | Withdrawn | Delivered


@dataclass(frozen=True)
class Forget:
    """Tell the coordinator of checkpoints that the worker is gone."""

    worker: int


Action = Tell | StartWorker | KillWorker | EndWorker | Vacate | Write | Relay | Forget
