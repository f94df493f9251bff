"""What an executor is given, what it gives back, and the protocol in between.

Not here: why a piece of work is done (campaign_loop), or what its reports mean (trial.Objectives).

Invariant: every piece of work that was submitted ends exactly once, whatever becomes of the
worker that had it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from elastix.errors import ElastixError
from elastix.search.model_sources import StoreOpener
from elastix.search.trial import Config
from elastix.state import Ref
from elastix.train.replica.context import Context
from elastix.train.replica.model_source import ModelSource

TrainFunction = Callable[[Context], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run of a trial.

    Attributes:
        number: of the trial; no two pieces of work under way have the same.
        name: of the run, where one is written to disk.
        config: for `ctx.config`.
        seed: of weights.
        order_seed: of the order of samples, which all trials of a campaign have in common.
        model_source: what it takes from other models, and where its own is left.
        until_reports: pause after so many reports; None: run to the end.
        memory_bytes: what its worker may hold, which an executor that places work by memory keeps
            free for it; 0: as the executor thinks fit.
        predicted_bytes: what a step was estimated to take; 0: nothing was.
    """

    number: int
    name: str
    config: Config
    seed: int
    order_seed: int | None = None
    model_source: ModelSource | None = None
    until_reports: int | None = None
    memory_bytes: int = 0
    predicted_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkReport:
    """A report of work under way. `seq` counts the reports of the trial from 0."""

    number: int
    seq: int
    metrics: Mapping[str, Any]


class EndedKind(StrEnum):
    """In which way a piece of work ended.

    FINISHED: the train function returned.
    PAUSED: the reports that it was to make are made.
    HALTED: it was asked to end.
    RAISED: the train function raised.
    STARVED: there was too little memory for it, whoever said so.
    LOST: its worker died.
    RETURNED: it had not begun, and is as if it had never been given out; or what it met says
        nothing of it, as a GPU that fails for others too.
    """

    FINISHED = "finished"
    PAUSED = "paused"
    HALTED = "halted"
    RAISED = "raised"
    STARVED = "starved"
    LOST = "lost"
    RETURNED = "returned"


CUT_SHORT = frozenset({EndedKind.RAISED, EndedKind.LOST})
"""Where what it took is not all that it needs."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What came of a piece of work.

    Attributes:
        kind: in which way it ended.
        results: all reports by their seq, those that were passed on as Progress included.
        ref: of the model that it left.
        epochs: passes over the data, those before a pause included.
        inherited: what `ctx.inherit` gave.
        ignored: there was an ancestor, and the train function never called `ctx.inherit`.
        error: what was raised, if it is elastix's own.
        summary, traceback: of what was raised, as text.
        started_s, finished_s: seconds since the epoch, on the worker's clock.
        worker: where it ran, for people.
        peak_bytes: the most that its worker held while it ran, or its GPU; 0: unknown.
        base_bytes: what that held when it began.
        reserved_bytes: what was kept free for it; 0: nothing in particular.
        alone: the executor can give it no more memory than it had.
        spent: the process that ran it can compute nothing any more, as its GPU does nothing for it.
    """

    number: int
    kind: EndedKind
    results: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    ref: Ref | None = None
    epochs: float = 0.0
    inherited: Mapping[str, Any] | None = None
    ignored: bool = False
    error: ElastixError | None = None
    summary: str = ""
    traceback: str = ""
    started_s: float = field(default_factory=time.time)
    finished_s: float = field(default_factory=time.time)
    worker: str = ""
    peak_bytes: int = 0
    base_bytes: int = 0
    reserved_bytes: int = 0
    alone: bool = True
    spent: bool = False


@runtime_checkable
class Executor(Protocol):
    """Runs work on workers that stay. Used by one thread; `open` comes first, `close` last.

    One that takes work which does not begin at once has `held_back`: the numbers of that work,
    whose trials have not started.
    """

    def open(self, train: TrainFunction) -> None:
        """Get workers ready for this train function. Does not wait for them.

        Raises:
            ConfigError: the function cannot be sent, or there can never be a worker for it.
        """
        ...

    def reach(self, store: str) -> StoreOpener:
        """How workers get at the store in this directory. After `open`."""
        ...

    @property
    def room(self) -> int:
        """How many pieces of work may be submitted now; it changes in `poll`."""
        ...

    def submit(self, work: Work) -> None:
        """Have it run. Never blocks. No more than `room` at a time."""
        ...

    def poll(self, timeout_s: float) -> Sequence[WorkReport | Ended]:
        """What has happened; waits up to `timeout_s` for something.

        Raises:
            SearchError: no worker can be had any more.
        """
        ...

    def halt(self, number: int) -> None:
        """Let a piece of work end soon. It may still finish, pause or raise. Never blocks."""
        ...

    def close(self) -> None:
        """End all workers, with what they have in hand. Leaves nothing behind."""
        ...
