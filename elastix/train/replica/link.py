"""What a member is told when it starts, and what the process around it does for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from elastix.config import CheckpointConfig, ExchangeConfig, Guard
from elastix.events import Event, Span
from elastix.store import Store
from elastix.train.control.messages import OF_EACH, FromWorker
from elastix.train.replica.model_source import ModelSource

PHASES = (
    *("wait", "boundary", "batch", "slice", "handed", "again", "computed", "bucket", "filled"),
    *("round", "held", "left", "evaluate", "mean", "report", "snapshot", "level", "unequal"),
    *("enter", "meet", "give", "take", "crew", "pause", "released", "leaderless"),
)
"""Where a training thread may be: see Context.on_phase."""


class Link(Protocol):
    """What the process around a member does for it. No call blocks for long, unless it says so."""

    def send(self, message: FromWorker) -> None:
        """Tell the controller. Not in the training thread if it is of a checkpoint.

        Blocks for what must arrive while nobody leads the run: see messages.
        """
        ...

    def emit(self, event: Event, sequence: int | None = None) -> None:
        """Send an event to the journal. With a sequence number several workers may send it."""
        ...

    def journaled(self) -> int:
        """The highest sequence number that the journal has confirmed; -1 for none."""
        ...

    def phase(self, name: str, detail: int) -> None:
        """Where the training thread is."""
        ...

    def await_controller(self) -> None:
        """Block while nobody leads the run; returns at once otherwise."""
        ...

    def open_store(self) -> Store:
        """The store, for this worker to read and to write its shares."""
        ...


class FollowersLink:
    """The Link of a process that does not speak for its worker: it tells of itself alone."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.phase = link.phase
        self.await_controller = link.await_controller
        self.open_store = link.open_store

    def send(self, message: FromWorker) -> None:
        """What concerns this process, or what it has seen."""
        if isinstance(message, OF_EACH):
            self._link.send(message)

    def emit(self, event: Event, sequence: int | None = None) -> None:
        """Nothing: the speaker does."""

    def journaled(self) -> int:
        """It does not know."""
        return -1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every worker of a run is told when it starts.

    Attributes:
        directory: of the run.
        seed: of initial weights, and of whatever has no other.
        order_seed: of the order of samples, if it is not that of `seed`.
        run: its name; the State to start from is what the store has as `RUN/last`.
        left_out: by loader, the positions in the stream that are never used (any more).
        model_source: what the run takes from other models and leaves to them; None for nothing.
        until_reports: pause at the end of the step after so many reports; None never does.
        rollback: a step in which a worker is lost is done again, with the same samples.
        guard: which steps shall not count; None for none.
        sentinel: compare in every step what workers hold.
        recompute_every: of an exact run: after so many steps a slice is computed by two workers;
            None: none ever is.
        exact: the State is the same to the last bit for any number of workers.
        exchange: how workers exchange what they have learned.
        alone: the group is this worker and stays so; it may report without preparing anything.
        shared: workers of one host reduce gradients through memory that they share.
        secret: by which workers of the run know each other; see comm.network.door.
        crew: axes of the mesh that each worker's processes form; empty if it is one process.
    """

    directory: Path
    run: str
    seed: int
    min_workers: int
    checkpoint: CheckpointConfig
    left_out: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    model_source: ModelSource | None = None
    until_reports: int | None = None
    alone: bool = False
    rollback: bool = False
    guard: Guard | None = None
    sentinel: bool = True
    recompute_every: int | None = 200
    exact: bool = False
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    shared: bool = True
    secret: bytes = field(default=b"", repr=False)
    order_seed: int | None = None
    crew: Mapping[str, int] = field(default_factory=dict)

    @property
    def seed_of_order(self) -> int:
        """Of the order of samples, unless a loader is given one."""
        return self.seed if self.order_seed is None else self.order_seed

    @property
    def processes(self) -> int:
        """How many each worker is."""
        return math.prod(self.crew.values())

    @property
    def steps_alone(self) -> bool:
        """Whether each worker takes steps by itself between two that all take together."""
        return self.exchange.diloco

    @property
    def compares_steps(self) -> bool:
        """Whether what workers hold is compared in every step; that of crews is not, yet.

        After inner steps each holds something else.
        """
        return self.sentinel and not (self.alone or self.crew or self.exchange.diloco)

    @property
    def goes_back(self) -> bool:
        """Whether all do if States differ that are compared at a boundary; else the run ends."""
        return self.exact and self.compares_steps

    @property
    def may_void(self) -> bool:
        """Whether a step may turn out void."""
        return self.rewinds_exactly or self.compares_steps or self.computes_again

    @property
    def computes_again(self) -> bool:
        """Whether slices are ever computed more than once; those of crews are not, yet."""
        return self.exact and self.recompute_every is not None and not self.crew

    @property
    def rewinds_exactly(self) -> bool:
        """Whether all is kept at the beginning of each step, and not when one turns out void."""
        return self.rollback or self.guard is not None


@dataclass(frozen=True)
class Life:
    """What a process is to be next.

    Attributes:
        worker: the number of its worker.
        place: in that, if it is a crew.
        settings: of the run.
        founds: it goes on from what it has kept of the State, with others that have the rest.
    """

    worker: int
    place: int
    settings: Settings
    founds: bool = False
