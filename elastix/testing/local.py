"""A run without Ray: worker processes forked from a warm server, and a controller here.

For tests and benchmarks that need many short runs with real processes, real gloo and real
signals. It starts a worker in some 50 ms where Ray takes seconds; the conductor that leads the run,
recovery, reducer and loader are the very same code.
"""

import math
import multiprocessing
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.config import CheckpointConfig, FailureConfig, Guard, RestoreConfig
from elastix.errors import ElastixError, StoreError, TrainError
from elastix.events import Event, Events, Resumed, RunStarted, StepCommitted
from elastix.store import Store
from elastix.testing.local_worker import HOST, work
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.control.actions import (
    Action,
    EndWorker,
    Forget,
    KillWorker,
    Relay,
    StartWorker,
    Tell,
    Vacate,
    Vacated,
    Write,
)
from elastix.train.control.conductor import Conductor, Phase, RunTerms
from elastix.train.control.messages import FromWorker, Outcome, ToWorker
from elastix.train.on_ray.trainer import keep_code
from elastix.train.record.beginning import begin, going_back
from elastix.train.record.logbook import Logbook
from elastix.train.replica.context import Context
from elastix.train.replica.link import Settings

_NAME = "local"
_TICK_S = 0.05
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
    guard: Guard | None = None,
    sentinel: bool = True,
    exact: bool = False,
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
        guard: as in FailureConfig.
        sentinel: as in FailureConfig.
        exact: as in RunConfig.
        timeout_s: kill everything and raise TrainError after so long.

    Raises:
        ElastixError: raised in a worker; the others are killed.
        TrainError: any other exception in a worker, with its traceback; or the timeout.
    """
    directory = directory or Path(tempfile.mkdtemp(prefix="elastix-local-"))
    failure = FailureConfig(
        hang_timeout_s=math.inf if hang_timeout_s is None else hang_timeout_s,
        evict_slower_than=evict_slower_than,
        replace=replace,
        recovery=recovery,  # type: ignore[arg-type]
        guard=guard,
        sentinel=sentinel,
    )
    settings = Settings(
        directory=directory,
        run=_NAME,
        seed=seed,
        min_workers=min_workers,
        checkpoint=checkpoint or CheckpointConfig(),
        rollback=recovery == "rollback",
        guard=guard,
        sentinel=sentinel,
        exact=exact,
        shared=shared,
        secret=draw_secret(),
    )
    terms = RunTerms(
        founders=workers,
        min_workers=min_workers,
        max_workers=max_workers or workers,
        failure=failure,
        first_step_s=0.0,
    )
    room = _Room(workers + spares, replace)
    kept = _Kept(store or directory / "store", restore or RestoreConfig())
    controller = _Controller(train, dict(config or {}), settings, kept, terms, room)
    try:
        controller.watch(timeout_s)
    finally:
        controller.close()
    return controller.run


@dataclass(frozen=True)
class _Kept:
    """Where States are kept, and which of them to begin with."""

    store: Path
    restore: RestoreConfig


@dataclass
class _Room:
    """For how many more processes there is room, and whether each that goes makes room again."""

    free: int
    again: bool


class _Controller:
    """The shell around the conductor, in the calling thread. Ray's: train.on_ray.controller."""

    def __init__(
        self,
        train: Callable[[Context], None],
        config: dict[str, Any],
        settings: Settings,
        kept: _Kept,
        terms: RunTerms,
        room: _Room,
    ) -> None:
        self.run = LocalRun(settings.directory)
        self._lock = threading.RLock()
        self._conductor = Conductor(terms)
        self._room = room
        listeners = Events()
        listeners.subscribe(self.run.events.append)
        self._log = Logbook(listeners)
        outlets = Outlets(
            send=self._tell,
            emit=self._emit,
            journaled=lambda: self._log.state.step,
            fail=self._fail,
            sync=self._log.sync,
        )
        opening = RunStarted(
            name=_NAME,
            seed=settings.seed,
            exact=settings.exact,
            config=config,
            scaling={},
            versions={},
        )
        self._log.open(settings.directory / "journal.jsonl", opening, stays=False, patience_s=0.0)
        self._checkpoints = Checkpoints(
            Store(kept.store), settings.run, settings.checkpoint, outlets
        )
        self._spawner = multiprocessing.get_context("forkserver")
        self._spawner.set_forkserver_preload(_WARM)
        self._rendezvous = Rendezvous(HOST, settings.secret)
        try:
            begun, settings = begin(self._checkpoints, settings, kept.restore)
        except ElastixError:
            self._checkpoints.close()
            self._log.close()
            raise
        self._args = (train, config, settings, kept.store)
        self._processes: dict[int, BaseProcess] = {}
        self._lines: dict[int, Connection] = {}
        self._released: dict[int, Connection] = {}  # of those whose outcome is known
        keep_code(settings.directory / "train.pkl", pickle.dumps(train))
        with self._lock:
            self._do(self._conductor.begin([opening, *begun]))

    def watch(self, timeout_s: float) -> None:
        """Serve the workers until the run is over."""
        deadline = time.monotonic() + timeout_s
        while self._conductor.phase is not Phase.OVER:
            if time.monotonic() > deadline:
                raise TrainError(f"the local run was not over after {timeout_s} s.")
            with self._lock:
                self._look_for_room()
                self._do(self._conductor.tick(time.monotonic()))
            if self._conductor.phase is Phase.GOING_BACK:
                self._checkpoints.give_up()
                train, config, settings, store = self._args
                self._args = (train, config, going_back(settings), store)
                last = self._checkpoints.last()
                stored = Resumed(step=last.step if last else 0, ref=last.ref if last else "")
                with self._lock:
                    self._do(self._conductor.went_back(stored, time.monotonic()))
            by_line = {line: worker for worker, line in self._lines.items()}
            for line in wait(list(by_line), timeout=_TICK_S):
                self._serve(by_line[line], line)  # type: ignore[index,arg-type]
        if self._conductor.error is not None:
            raise self._conductor.error

    def close(self) -> None:
        """Leave no process behind."""
        with self._lock:
            self._do(self._conductor.close())
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._checkpoints.close()
        with self._lock:
            self._emit(self._conductor.ending())
            self._log.close()

    def _serve(self, worker: int, line: Connection) -> None:
        """Hear what a worker has to say, unless it was ended just now."""
        if self._lines.get(worker) is not line:
            return
        try:
            message: FromWorker | Outcome | None = line.recv()
        except (EOFError, ConnectionError):
            message = None
        with self._lock:
            now = time.monotonic()
            if message is None:
                self._do(self._conductor.died(worker, now))
            elif isinstance(message, Outcome):
                self.run.outcomes[worker] = message
                self._released[worker] = self._lines.pop(worker)
                self._do(self._conductor.ended(worker, message, now))
            else:
                self._do(self._conductor.hear(worker, message, now))

    def _do(self, actions: Sequence[Action]) -> None:
        """Carry out what the conductor wants done. Under the lock."""
        for action in actions:
            match action:
                case Tell():
                    self._tell(action.to, action.message)
                case Write():
                    self._emit(action.event, action.sequence)
                    if isinstance(action.event, StepCommitted):
                        self._checkpoints.poke()
                case StartWorker():
                    self._start(action.worker)
                case KillWorker():
                    self.run.lost[action.worker] = time.monotonic()
                    self._end(action.worker)
                case EndWorker():
                    self._end(action.worker)
                case Vacate():
                    self._room.free += self._room.again and action.place is Vacated.FREE
                case Relay():
                    self._checkpoints.told(action.worker, action.message)
                case Forget():
                    self._checkpoints.lost(action.worker)
        if any(isinstance(action, Vacate) for action in actions):
            self._look_for_room()

    def _look_for_room(self) -> None:
        free = self._room.free
        self._do(self._conductor.room(free, more=free > 0, now=time.monotonic()))

    def _start(self, worker: int) -> None:
        self._room.free -= 1
        here, there = self._spawner.Pipe()
        args = (worker, there, self._rendezvous.address, *self._args)
        process = self._spawner.Process(target=work, args=args)  # no daemon: it has children
        process.start()
        there.close()
        self._processes[worker] = process
        self._lines[worker] = here

    def _end(self, worker: int) -> None:
        """Whoever is through with its run ends when its line is closed."""
        if worker in self._lines:
            self._processes[worker].kill()
        (self._lines if worker in self._lines else self._released).pop(worker).close()

    def _tell(self, to: int | None, message: ToWorker) -> None:
        """To one worker, or to all that are at work. Any thread."""
        with self._lock:
            for line in [line for w, line in self._lines.items() if to in (None, w)]:
                try:
                    line.send(message)
                except OSError:
                    continue  # it is dead, and `wait` will say so

    def _fail(self, error: ElastixError) -> None:
        """Any thread."""
        with self._lock:
            self._conductor.fail(error)

    def _emit(self, event: Event, sequence: int | None = None) -> None:
        """Write an event; a journal that cannot be written ends the run. Any thread."""
        with self._lock:
            try:
                self._log.write(event, sequence)
            except StoreError as error:
                self._conductor.fail(error)
