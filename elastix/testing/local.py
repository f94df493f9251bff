"""A run without Ray: worker processes forked from a warm server, and a small controller here.

For tests and benchmarks that need many short runs with real processes, real gloo and real
signals. It starts a worker in some 50 ms where Ray takes seconds; membership, recovery, reducer
and loader are the very same code.
"""

import multiprocessing
import os
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

import torch

from elastix.comm.group import Rendezvous, Wiring
from elastix.comm.membership import Membership, Roster
from elastix.comm.news import News
from elastix.config import CheckpointConfig
from elastix.errors import QuorumLost, TrainError
from elastix.events import Event, GenerationFormed, RunStarted, WorkerLost
from elastix.observe.journal import Journal
from elastix.train.context import Context
from elastix.train.member import Member, Settings
from elastix.train.outcome import Outcome, run_train

_HOST = "127.0.0.1"
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
    heartbeat_timeout_s: float | None = None,
    checkpoint: CheckpointConfig | None = None,
    resume: Path | None = None,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> LocalRun:
    """Run `train` on processes of this machine until it is through.

    Args:
        train: must be picklable by reference (a function of a module).
        workers: founders.
        config: for `ctx.config`.
        directory: of the run; a temporary one by default.
        min_workers: below it survivors pause at the end of the step.
        replace: start a new worker for each lost one.
        checkpoint: as for ElasticTrainer.
        resume: file of a State to start from.
        seed: as in RunConfig.
        heartbeat_timeout_s: kill workers that are silent for so long; None never does.
        timeout_s: kill everything and raise TrainError after so long.

    Raises:
        ElastixError: raised in a worker; the others are killed.
        TrainError: any other exception in a worker, with its traceback; or the timeout.
    """
    directory = directory or Path(tempfile.mkdtemp(prefix="elastix-local-"))
    settings = Settings(
        directory=directory,
        seed=seed,
        min_workers=min_workers,
        checkpoint=checkpoint or CheckpointConfig(),
        resume=resume,
    )
    supervisor = _Supervisor(train, dict(config or {}), settings, workers, replace)
    try:
        supervisor.watch(timeout_s, heartbeat_timeout_s)
    finally:
        supervisor.close()
    return supervisor.run


class _Supervisor:
    """The controller, in the calling thread."""

    def __init__(
        self,
        train: Callable[[Context], None],
        config: dict[str, Any],
        settings: Settings,
        workers: int,
        replace: bool,
    ) -> None:
        self.run = LocalRun(settings.directory)
        self._spawner = multiprocessing.get_context("forkserver")
        self._spawner.set_forkserver_preload(_WARM)
        self._rendezvous = Rendezvous(_HOST)
        self._roster = Roster(workers)
        self._args = (train, config, settings)
        self._replace = replace
        self._processes: dict[int, BaseProcess] = {}
        self._lines: dict[int, Connection] = {}
        self._heard: dict[int, float] = {}
        self._doubts: list[tuple[float, int]] = []
        self._next = 0
        self._serial = -1
        self._journal = Journal(settings.directory / "journal.jsonl")
        (settings.directory / "train.pkl").write_bytes(pickle.dumps(train))
        self._emit(
            RunStarted(name="local", seed=settings.seed, config=config, scaling={}, versions={})
        )
        for _ in range(workers):
            self._start()

    def watch(self, timeout_s: float, heartbeat_timeout_s: float | None) -> None:
        """Serve the workers until the run is over."""
        deadline = time.monotonic() + timeout_s
        while not self._roster.over:
            if time.monotonic() > deadline:
                raise TrainError(f"the local run was not over after {timeout_s} s.")
            if not self._lines:
                raise QuorumLost("no worker is left.")
            by_line = {line: worker for worker, line in self._lines.items()}
            for line in wait(list(by_line), timeout=0.05):
                self._serve(by_line[line], line)  # type: ignore[index,arg-type]
            while self._doubts and self._doubts[0][0] < time.monotonic():
                self._push(self._roster.doubt(self._doubts.pop(0)[1]))
            if heartbeat_timeout_s is not None:
                self._check_silence(heartbeat_timeout_s)

    def close(self) -> None:
        """Leave no process behind."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        for line in self._lines.values():
            line.close()
        self._journal.close()

    def _start(self) -> None:
        worker = self._next
        self._next += 1
        here, there = self._spawner.Pipe()
        args = (worker, there, self._rendezvous.address, *self._args)
        process = self._spawner.Process(target=_work, args=args, daemon=True)
        process.start()
        there.close()
        self._processes[worker] = process
        self._lines[worker] = here
        self._heard[worker] = time.monotonic() + 30.0  # to start up

    def _serve(self, worker: int, line: Connection) -> None:
        try:
            kind, value = line.recv()
        except (EOFError, ConnectionError):
            self._lose(worker, "died")
            return
        self._heard[worker] = time.monotonic()
        if kind == "ready":
            self._push(self._roster.ready(worker))
        elif kind == "entered":
            self._push(self._roster.entered(worker, value))
        elif kind == "doubt":
            self._doubts.append((time.monotonic() + 1.0, value))
        elif kind == "record":
            for serial, event in value:
                if serial is None or serial > self._serial:
                    self._emit(event)
                self._serial = max(self._serial, -1 if serial is None else serial)
        elif kind == "outcome":
            self._end(worker, value)

    def _end(self, worker: int, outcome: Outcome) -> None:
        self.run.outcomes[worker] = outcome
        if outcome.kind == "finished":
            self._lines.pop(worker).close()
            self._push(self._roster.finished(worker, outcome.generation))
        elif outcome.kind == "fenced":
            self._lose(worker, "fenced")
        else:
            raise outcome.error or TrainError(outcome.traceback)

    def _lose(self, worker: int, cause: str) -> None:
        self.run.lost[worker] = time.monotonic()
        members = self._roster.newest.members
        rank = members.index(worker) if worker in members else -1
        generation = self._roster.newest.generation
        self._lines.pop(worker).close()
        self._push(self._roster.lost(worker))
        self._processes[worker].kill()
        self._emit(WorkerLost(worker=worker, rank=rank, generation=generation, cause=cause))
        if self._replace and not self._roster.over:
            self._start()

    def _check_silence(self, limit_s: float) -> None:
        now = time.monotonic()
        for worker in [w for w in self._lines if now - self._heard[w] > limit_s]:
            self._lose(worker, "silent")

    def _push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        for line in list(self._lines.values()):
            try:
                line.send(membership)
            except (BrokenPipeError, ConnectionError):
                continue  # it is dead, and `wait` will say so
        self._emit(
            GenerationFormed(
                generation=membership.generation,
                members=membership.members,
                cause=membership.cause,
            )
        )

    def _emit(self, event: Event) -> None:
        self.run.events.append(event)
        self._journal.append(event)


class _PipeLink:
    """The Link over a pipe. Its methods are described there."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._serial = -1

    def tell(self, kind: str, value: Any = None) -> None:  # noqa: ANN401
        with self._lock:
            self._line.send((kind, value))

    def ready(self) -> None:
        self.tell("ready")

    def entered(self, generation: int) -> None:
        self.tell("entered", generation)

    def doubt(self, generation: int, error: BaseException) -> None:
        del error
        self.tell("doubt", generation)

    def emit(self, event: Event, serial: int | None = None) -> None:
        self.tell("record", [(serial, event)])
        self._serial = max(self._serial, -1 if serial is None else serial)

    def journaled(self) -> int:
        return self._serial - 1  # what was written to a pipe is read even if the writer dies

    def phase(self, name: str, detail: int) -> None:
        pass


def _work(
    worker: int,
    line: Connection,
    address: tuple[str, int],
    train: Callable[[Context], None],
    config: dict[str, Any],
    settings: Settings,
) -> None:
    torch.set_num_threads(1)
    news = News()
    link = _PipeLink(line)
    wiring = Wiring(address=address, interface=_HOST, backend="gloo", me=worker)
    member = Member(wiring, torch.device("cpu"), settings, news, link)
    threading.Thread(target=_listen, args=(line, news), daemon=True).start()
    threading.Thread(target=_pulse, args=(link,), daemon=True).start()
    link.tell("outcome", run_train(train, member, config))
    line.close()
    os._exit(0)  # abandoned groups may have threads that wait for the dead


def _listen(line: Connection, news: News) -> None:
    try:
        while True:
            news.publish(line.recv())
    except (EOFError, OSError):
        os._exit(1)  # the supervisor is gone


def _pulse(link: _PipeLink) -> None:
    while True:
        time.sleep(0.1)
        try:
            link.tell("alive")
        except OSError:
            return
