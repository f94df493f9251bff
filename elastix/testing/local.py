"""A run without Ray: worker processes forked from a warm server, and a small controller here.

For tests and benchmarks that need many short runs with real processes, real gloo and real
signals. It starts a worker in some 50 ms where Ray takes seconds; membership, recovery, reducer
and loader are the very same code.
"""

import math
import multiprocessing
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from elastix.comm.door import Address, draw_secret
from elastix.comm.meeting import Rendezvous
from elastix.comm.membership import Membership, Roster
from elastix.config import CheckpointConfig, RestoreConfig
from elastix.errors import ElastixError, QuorumLost, TrainError
from elastix.events import (
    Event,
    GenerationFormed,
    Resumed,
    RunStarted,
    StepCommitted,
    WorkerLeft,
    WorkerLost,
    WorkerSlow,
)
from elastix.observe.journal import Journal
from elastix.store import Store
from elastix.testing.local_worker import HOST, work
from elastix.train.beginning import begin
from elastix.train.checkpoint.assembly import Delivered, Offer, Withdrawn
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.context import Context
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Entered,
    FromWorker,
    Heartbeat,
    Leave,
    Outcome,
    OutcomeKind,
    Ready,
    Record,
    Suspect,
)
from elastix.train.link import Settings
from elastix.train.trainer import keep_code
from elastix.train.vigil import Vigil

_NAME = "local"
_WARM = ["elastix.testing.local", "torch._dynamo"]  # the second is what making an optimizer imports


@dataclass
class LocalRun:
    """What a local run left.

    Attributes:
        events: all of them, in the order in which they arrived.
        outcomes: by worker, for those that were not lost.
        lost: worker and time.monotonic() of the moment its death was noticed.
    """

    directory: Path
    events: list[Event] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    lost: dict[int, float] = field(default_factory=dict)


def run_local(
    train: Callable[[Context], None],
    workers: int,
    *,
    config: Mapping[str, Any] | None = None,
    directory: Path | None = None,
    min_workers: int = 1,
    replace: bool = False,
    spares: int = 0,
    max_workers: int | None = None,
    hang_timeout_s: float | None = None,
    evict_slower_than: float | None = None,
    recovery: str = "forward",
    checkpoint: CheckpointConfig | None = None,
    store: Path | None = None,
    restore: RestoreConfig | None = None,
    seed: int = 0,
    shared: bool = True,
    timeout_s: float = 60.0,
) -> LocalRun:
    """Run `train` on processes of this machine until it is through.

    Args:
        train: must be picklable by reference (a function of a module).
        workers: founders.
        config: for `ctx.config`.
        directory: of the run; a temporary one by default. One that holds a run continues it.
        min_workers: below it survivors pause at the end of the step.
        replace: start a new worker for each lost one, and each that left.
        spares: further workers that are started at once.
        max_workers: the largest group; as many as there are founders by default.
        checkpoint: as for ElasticTrainer.
        store: where States are kept; DIRECTORY/store by default.
        restore: as for ElasticTrainer.
        seed: as in RunConfig.
        shared: False for gradients through sockets, as between hosts.
        hang_timeout_s: as in FailureConfig; None evicts nobody.
        evict_slower_than: as in FailureConfig.
        recovery: as in FailureConfig.
        timeout_s: kill everything and raise TrainError after so long.

    Raises:
        ElastixError: raised in a worker; the others are killed.
        TrainError: any other exception in a worker, with its traceback; or the timeout.
    """
    directory = directory or Path(tempfile.mkdtemp(prefix="elastix-local-"))
    settings = Settings(
        directory=directory,
        run=_NAME,
        seed=seed,
        min_workers=min_workers,
        checkpoint=checkpoint or CheckpointConfig(),
        rollback=recovery == "rollback",
        shared=shared,
        secret=draw_secret(),
    )
    crew = _Crew(workers, spares, max_workers or workers, replace, evict_slower_than)
    vigil = Vigil(hang_timeout_s or math.inf, 0.0)
    place = _Place(store or directory / "store", restore or RestoreConfig())
    supervisor = _Supervisor(train, dict(config or {}), settings, place, crew, vigil)
    try:
        supervisor.watch(timeout_s)
    finally:
        supervisor.close()
    return supervisor.run


@dataclass(frozen=True)
class _Place:
    """Where States are kept, and which of them to begin with."""

    store: Path
    restore: RestoreConfig


@dataclass(frozen=True)
class _Crew:
    """How many workers, and what to do about losses and slow ones."""

    founders: int
    spares: int
    most: int
    replace: bool
    evict_slower_than: float | None


class _Supervisor:
    """The controller, in the calling thread."""

    def __init__(
        self,
        train: Callable[[Context], None],
        config: dict[str, Any],
        settings: Settings,
        place: _Place,
        crew: _Crew,
        vigil: Vigil,
    ) -> None:
        self.run = LocalRun(settings.directory)
        self._step = 0
        self._sending = threading.RLock()
        self._journal = Journal(settings.directory / "journal.jsonl")
        self._failed: list[ElastixError] = []
        outlets = Outlets(
            send=self._send,
            emit=self._emit,
            journaled=lambda: self._step,
            fail=self._failed.append,
            sync=self._journal.sync,
        )
        self._checkpoints = Checkpoints(
            Store(place.store), settings.run, settings.checkpoint, outlets
        )
        self._spawner = multiprocessing.get_context("forkserver")
        self._spawner.set_forkserver_preload(_WARM)
        self._rendezvous = Rendezvous(HOST, settings.secret)
        self._roster = Roster(crew.founders, crew.most, settings.min_workers)
        self._feeds: dict[int, Address] = {}
        self._crew = crew
        self._spares = crew.spares  # to be started when the group has formed
        self._vigil = vigil
        try:
            begun, settings = begin(self._checkpoints, settings, place.restore)
        except ElastixError:
            self._checkpoints.close()
            self._journal.close()
            raise
        self._args = (train, config, settings, place.store)
        self._processes: dict[int, BaseProcess] = {}
        self._lines: dict[int, Connection] = {}
        self._doubts: list[tuple[float, int]] = []
        self._released: dict[int, Connection] = {}
        self._slow: set[int] = set()
        self._next = 0
        self._serial = -1
        keep_code(settings.directory / "train.pkl", pickle.dumps(train))
        self._emit(
            RunStarted(name=_NAME, seed=settings.seed, config=config, scaling={}, versions={})
        )
        for event in begun:
            self._emit(event)
            if isinstance(event, Resumed):
                self._step = event.step
        for _ in range(crew.founders):
            self._start()

    def watch(self, timeout_s: float) -> None:
        """Serve the workers until the run is over."""
        deadline = time.monotonic() + timeout_s
        while not self._roster.over:
            if self._failed:
                raise self._failed[0]
            if time.monotonic() > deadline:
                raise TrainError(f"the local run was not over after {timeout_s} s.")
            if self._roster.extinct and self._crew.replace:
                self._start_over()
            if not self._lines:
                raise QuorumLost("no worker is left.")
            by_line = {line: worker for worker, line in self._lines.items()}
            for line in wait(list(by_line), timeout=0.05):
                self._serve(by_line[line], line)  # type: ignore[index,arg-type]
            while self._doubts and self._doubts[0][0] < time.monotonic():
                self._push(self._roster.doubt(self._doubts.pop(0)[1]))
            if self._roster.founded:
                self._start_spares()
            self._check_hangs()
            self._check_pace()
            if self._roster.settled:
                self._let_go()

    def _start_over(self) -> None:
        """Everybody who had the State is lost: from the one that was stored last."""
        self._checkpoints.give_up()
        for worker in [w for w in self._lines if w in self._feeds]:
            # A joiner that has caught up halfway must not pass for one that has the State.
            self._lines.pop(worker).close()
            self._processes[worker].kill()
            self._vigil.forget(worker)
            self._roster.lost(worker)
            self._start()
        last = self._checkpoints.last()
        self._step, self._serial = (last.step if last else 0), -1
        self._emit(Resumed(step=self._step, ref=last.ref if last else ""))
        self._push(self._roster.start_over())

    def close(self) -> None:
        """Leave no process behind."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        for line in (*self._lines.values(), *self._released.values()):
            line.close()
        self._checkpoints.close()
        self._journal.close()

    def _start_spares(self) -> None:
        while self._spares:
            self._spares -= 1
            self._start()

    def _start(self) -> None:
        worker = self._next
        self._next += 1
        here, there = self._spawner.Pipe()
        args = (worker, there, self._rendezvous.address, *self._args)
        process = self._spawner.Process(target=work, args=args)  # no daemon: it has children
        process.start()
        there.close()
        self._processes[worker] = process
        self._lines[worker] = here

    def _serve(self, worker: int, line: Connection) -> None:
        try:
            message = line.recv()
        except (EOFError, ConnectionError):
            self._lose(worker, "died")
            return
        if isinstance(message, Outcome):
            self._end(worker, message)
        else:
            self._hear(worker, message)

    def _hear(self, worker: int, message: FromWorker) -> None:
        match message:
            case Heartbeat():
                self._vigil.hear(worker, message, time.monotonic())
            case Ready():
                if message.address is not None:
                    self._feeds[worker] = message.address
                self._push(self._roster.ready(worker))
                if worker in self._roster.watching:
                    donors = tuple(self._feeds[donor] for donor in self._roster.donors())
                    self._send(worker, CatchUp(donors))
            case CaughtUp():
                self._push(self._roster.level(worker))
            case Entered():
                self._push(self._roster.entered(worker, message.generation))
                if self._roster.settled:
                    self._vigil.settled(self._roster.newest.members)
            case Leave():
                self._ask_to_leave(worker)
            case Suspect():
                self._suspect(worker, message)
            case Record():
                self._record(message)
            case Offer() | Withdrawn() | Delivered():
                self._checkpoints.told(worker, message)

    def _suspect(self, worker: int, message: Suspect) -> None:
        generation, now = message.generation, time.monotonic()
        if self._vigil.doubt(worker, generation, message.error, message.unreachable, now):
            self._doubts.append((now + 1.0, generation))

    def _record(self, message: Record) -> None:
        for serial, event in message.entries:
            if serial is None or serial > self._serial:
                self._emit(event)
                if isinstance(event, StepCommitted):
                    self._step = event.step
                    self._checkpoints.poke()
            self._serial = max(self._serial, -1 if serial is None else serial)

    def _end(self, worker: int, outcome: Outcome) -> None:
        self.run.outcomes[worker] = outcome
        self._vigil.forget(worker)
        self._checkpoints.lost(worker)
        if outcome.kind is OutcomeKind.LEFT:
            self._released[worker] = self._lines.pop(worker)
            self._push(self._roster.left(worker, outcome.generation))
            self._emit(
                WorkerLeft(
                    worker=worker, generation=outcome.generation, step=outcome.step, cause="notice"
                )
            )
            if self._crew.replace:
                self._start()
        elif outcome.kind is OutcomeKind.FINISHED:
            self._lines.pop(worker).close()
            self._push(self._roster.finished(worker, outcome.generation))
        elif outcome.kind is OutcomeKind.FENCED:
            self._lose(worker, "fenced")
        else:
            raise outcome.error or TrainError(outcome.traceback)

    def _lose(self, worker: int, cause: str) -> None:
        self.run.lost[worker] = time.monotonic()
        members = self._roster.newest.members
        rank = members.index(worker) if worker in members else -1
        generation = self._roster.newest.generation
        self._lines.pop(worker).close()
        self._vigil.forget(worker)
        self._push(self._roster.lost(worker))
        self._processes[worker].kill()
        self._checkpoints.lost(worker)
        self._emit(WorkerLost(worker=worker, rank=rank, generation=generation, cause=cause))
        if self._crew.replace and not self._roster.over:
            self._start()

    def _check_hangs(self) -> None:
        now = time.monotonic()
        for worker in self._vigil.silent(now):
            self._lose(worker, "silent")
        for worker in self._vigil.holding_up(self._roster.newest.members, now):
            self._lose(worker, "stuck")
        cut_off = self._vigil.unreachable(self._roster.holders or self._roster.newest.members, now)
        if cut_off in self._lines:
            self._lose(cut_off, "unreachable")
        hopeless = self._vigil.hopeless(now)
        if hopeless is not None:
            self._failed.append(hopeless)

    def _check_pace(self) -> None:
        limit = self._crew.evict_slower_than
        found = self._vigil.slow(self._roster.newest.members, limit or 1.5)
        for worker, factor in found.items():
            if worker not in self._slow:
                self._slow.add(worker)
                step = self._vigil.step(worker)
                self._emit(WorkerSlow(worker=worker, step=step, factor=factor))
            if limit is not None:
                self._ask_to_leave(worker)

    def _ask_to_leave(self, worker: int) -> None:
        if worker in self._roster.newest.members:
            self._push(self._roster.leave(worker))

    def _let_go(self) -> None:
        """Workers that have left end when their lines are closed."""
        while self._released:
            self._released.popitem()[1].close()

    def _push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        self._send(None, membership)
        self._emit(
            GenerationFormed(
                generation=membership.generation,
                members=membership.members,
                cause=membership.cause,
            )
        )

    def _send(self, worker: int | None, message: object) -> None:
        """To one worker, or to all. Any thread."""
        with self._sending:
            for line in [line for w, line in dict(self._lines).items() if worker in (None, w)]:
                try:
                    line.send(message)
                except OSError:
                    continue  # it is dead, and `wait` will say so; or its line was just closed

    def _emit(self, event: Event) -> None:
        with self._sending:
            self.run.events.append(event)
            self._journal.append(event)
