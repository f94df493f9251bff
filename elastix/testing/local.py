"""A run without Ray: worker processes forked from a warm server, and a controller here.

For tests and benchmarks that need many short runs with real processes, real gloo and real
signals. It starts a worker in some 50 ms where Ray takes seconds; the conductor that leads the run,
recovery, reducer and loader are the very same code.
"""

import atexit
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from elastix.arguments import LONGEST_S
from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.config import (
    CheckpointConfig,
    ExchangeConfig,
    FailureConfig,
    Guard,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
    check_crew,
    check_exchange,
)
from elastix.data import leaving
from elastix.errors import ConfigError, ElastixError, TrainError
from elastix.events import Event, Events, RunStarted
from elastix.store import Store
from elastix.testing.local_worker import HOST, Gpus, work
from elastix.train.control.actions import Vacated
from elastix.train.control.messages import FromWorker, Outcome, ToWorker
from elastix.train.control.terms import Phase, RunTerms
from elastix.train.record.conductor_shell import Shell
from elastix.train.record.pickled_function import keep_code
from elastix.train.record.start_or_resume import begin
from elastix.train.replica.context import Context
from elastix.train.replica.exactness import check_configs
from elastix.train.replica.link import Settings

_NAME = "local"
_TICK_S = 0.05
_PROCESS = "elastix-local-worker"  # the name of workers' processes
_IMPORTS = os.EX_CONFIG  # how one of them ends that would start workers of its own

# Here, so that whoever wants more imported can say so after it. An optimizer imports the second.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["elastix.testing.local", "torch._dynamo"]
)


@dataclass
class LocalRun:
    """What a local run left.

    Attributes:
        events: all of them, in the order in which they arrived.
        outcomes: by worker, for those that were not lost.
        lost: worker and time.monotonic() of the moment its death was noticed.
        lost_places: of workers that are crews: worker, place and when its end was noticed.
        freed: worker, place and when it was out, of processes whose worker was lost.
    """

    directory: Path
    events: list[Event] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    lost: dict[int, float] = field(default_factory=dict)
    lost_places: list[tuple[int, int, float]] = field(default_factory=list)
    freed: list[tuple[int, int, float]] = field(default_factory=list)


def run_local(
    train: Callable[[Context], None],
    workers: int,
    *,
    config: Mapping[str, Any] | None = None,
    directory: Path | None = None,
    min_workers: int = 1,
    replace: bool = False,
    spares: int = 0,
    shadows: int = 0,
    max_workers: int | None = None,
    hang_timeout_s: float | None = None,
    evict_slower_than: float | None = None,
    recovery: str = "forward",
    guard: Guard | None = None,
    sentinel: bool = True,
    recompute_every: int | None = 200,
    exact: bool = False,
    exchange: ExchangeConfig | None = None,
    crew: Mapping[str, int] | None = None,
    checkpoint: CheckpointConfig | None = None,
    store: Path | None = None,
    restore: RestoreConfig | None = None,
    seed: int = 0,
    shared: bool = True,
    gpus: Gpus | None = None,
    timeout_s: float = 60.0,
) -> LocalRun:
    """Run `train` on processes of this machine until it is through.

    Args:
        train: must be picklable by reference (a function of a module).
        workers: founders.
        config: for `ctx.config`.
        directory: of the run; by default a temporary one, which goes when this process ends. One
            that holds a run continues it.
        min_workers: below it survivors pause at the end of the step.
        replace: start a new worker for each lost one, and each that left.
        spares: further workers that are started at once.
        shadows: as in ScalingConfig.
        max_workers: the largest group; as many as there are founders by default.
        checkpoint: as for ElasticTrainer.
        store: where States are kept; DIRECTORY/store by default.
        restore: as for ElasticTrainer.
        seed: as in RunConfig.
        shared: False for gradients through sockets, as between hosts.
        gpus: what workers compute on; None: the CPU.
        hang_timeout_s: as in FailureConfig; None evicts nobody.
        evict_slower_than: as in FailureConfig.
        recovery: as in FailureConfig.
        guard: as in FailureConfig.
        sentinel: as in FailureConfig.
        recompute_every: as in FailureConfig.
        exact: as in RunConfig.
        exchange: as for ElasticTrainer.
        crew: as in ScalingConfig.
        timeout_s: kill everything and raise TrainError after so long.

    Raises:
        ConfigError: it is called by a script that a worker's process imports; or something is set
            that does not go together.
        ElastixError: raised in a worker; the others are killed.
        TrainError: any other exception in a worker, with its traceback; or the timeout.
    """
    _refuse_within_import()
    directory = directory or _temporary()
    failure = FailureConfig(
        hang_timeout_s=LONGEST_S if hang_timeout_s is None else hang_timeout_s,
        evict_slower_than=evict_slower_than,
        replace=replace,
        recovery=recovery,  # type: ignore[arg-type]
        guard=guard,
        sentinel=sentinel,
        recompute_every=recompute_every,
    )
    scaling = ScalingConfig(
        num_workers=workers, spares=spares, shadows=shadows, crew=dict(crew or {})
    )
    checkpoint = checkpoint or CheckpointConfig()
    exchange = exchange or ExchangeConfig()
    check_configs(RunConfig(exact=exact), failure, exchange)
    check_crew(scaling, failure, checkpoint, exact=exact)
    check_exchange(exchange, scaling, failure, exact=exact)
    settings = Settings(
        directory=directory,
        run=_NAME,
        seed=seed,
        min_workers=min_workers,
        checkpoint=checkpoint,
        rollback=recovery == "rollback",
        guard=guard,
        sentinel=sentinel,
        recompute_every=recompute_every,
        exact=exact,
        exchange=exchange,
        shared=shared,
        secret=draw_secret(),
        crew=scaling.crew,
    )
    terms = RunTerms(
        founders=workers,
        min_workers=min_workers,
        max_workers=max_workers or workers,
        failure=failure,
        first_step_s=0.0,
        shadows=shadows,
        in_parts=bool(crew),
        exact=exact,
    )
    room = _Room(workers + spares + shadows, replace)
    kept = _Kept(store or directory / "store", restore or RestoreConfig())
    lead = LocalController
    if settings.crew:
        if gpus is not None and gpus.backend == "gloo":
            raise ConfigError(
                'run_local was called with crew and gpus=Gpus("gloo"): what the processes of a '
                "worker compute together needs NCCL; over gloo it ended them. Nothing was started. "
                'Use Gpus("nccl").'
            )
        from elastix.testing.local_crews import LocalCrewController

        lead = LocalCrewController
    controller = lead(train, dict(config or {}), settings, kept, terms, room, gpus)
    try:
        controller.watch(timeout_s)
    finally:
        controller.close()
    return controller.run


def _temporary() -> Path:
    """A folder that goes with this process. Not with a fork of it that ends before."""
    folder = tempfile.mkdtemp(prefix="elastix-local-")
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_within_import() -> None:
    """A worker's process imports the script that it is of, and must not run it again.

    One of ours ends there, and its supervisor raises: what several print at once is mixed up.

    Raises:
        ConfigError: it is about to.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name == _PROCESS:
            os._exit(_IMPORTS)
        raise _called_within_import()


def _called_within_import() -> ConfigError:
    return ConfigError(
        "run_local was called while a process imports your script: the call stands outside of a "
        "function, so each worker would start workers of its own. No worker was started by it. "
        'Put the call under `if __name__ == "__main__":`.'
    )


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


class LocalController(Shell):
    """The shell around the conductor, in the calling thread. Ray's: train.on_ray.controller."""

    def __init__(
        self,
        train: Callable[[Context], None],
        config: dict[str, Any],
        settings: Settings,
        kept: _Kept,
        terms: RunTerms,
        room: _Room,
        gpus: Gpus | None,
    ) -> None:
        self.run = LocalRun(settings.directory)
        listeners = Events()
        listeners.subscribe(self.run.events.append)
        super().__init__(terms, listeners)
        self._room = room
        self._gpus = gpus
        opening = RunStarted(
            name=_NAME,
            seed=settings.seed,
            exact=settings.exact,
            config=config,
            scaling={},
            versions={},
            exchange=settings.exchange.to_dict(),
            sentinel=settings.compares_steps,
        )
        self._log.open(settings.directory / "journal.jsonl", opening, stays=False, patience_s=0.0)
        self._keep_checkpoints(Store(kept.store), settings)
        self._spawner = multiprocessing.get_context("forkserver")
        self._rendezvous = Rendezvous(HOST, settings.secret)
        try:
            begun, self._settings = begin(self._checkpoints, settings, kept.restore)
        except ElastixError:
            self._checkpoints.close()
            self._log.close()
            raise
        self._train, self._config, self._store = train, config, kept.store
        self._processes: dict[int, BaseProcess] = {}
        self._lines: dict[int, Connection] = {}
        self._released: dict[int, Connection] = {}  # of those whose outcome is known
        self._prepare()
        keep_code(settings.directory / "train.pkl", pickle.dumps(train))
        with self._lock:
            self._do(self._conductor.begin([opening, *begun]))

    def _prepare(self) -> None:
        """Before the first worker is started."""

    def watch(self, timeout_s: float) -> None:
        """Serve the workers until the run is over."""
        deadline = time.monotonic() + timeout_s
        while self._conductor.phase is not Phase.OVER:
            with self._lock:
                if time.monotonic() > deadline:
                    self._fail(TrainError(f"the local run was not over after {timeout_s} s."))
                self._look_for_room()
                self._do(self._conductor.tick(time.monotonic()))
            if self._conductor.phase is Phase.GOING_BACK:
                self._go_back()
            by_line = {line: worker for worker, line in self._lines.items()}
            for ready in wait(by_line, timeout=_TICK_S):
                line: Any = ready
                self._serve(by_line[line], line)
        if self._conductor.error is not None:
            raise self._conductor.error

    def close(self) -> None:
        """Leave no process behind."""
        self._close()

    def _let_go(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        leaving.clear(killed=bool(self.run.lost))

    def _serve(self, worker: int, line: Connection) -> None:
        """Hear what a worker has to say, unless it was ended just now."""
        if self._lines.get(worker) is not line:
            return
        message: FromWorker | Outcome | None = heard(line)
        if message is None and worker not in self._conductor.state.started:
            self._look_why(self._processes[worker])
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

    def _look_why(self, process: BaseProcess) -> None:
        """A process has ended before it was a worker."""
        process.join()
        if process.exitcode == _IMPORTS:
            self._fail(_called_within_import())

    def _look_for_room(self) -> None:
        free = self._room.free
        self._do(self._conductor.room(free, more=free > 0, now=time.monotonic()))

    def _start(self, worker: int) -> None:
        self._room.free -= 1
        here, there = self._spawner.Pipe()
        run = (self._train, self._config, self._settings, self._store, self._gpus)
        args = (worker, there, self._rendezvous.address, *run)
        process = self._spawn(work, args)
        there.close()
        self._processes[worker] = process
        self._lines[worker] = here

    def _spawn(self, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
        """No daemon: it has children."""
        process = self._spawner.Process(target=target, args=args, name=_PROCESS)
        process.start()
        return process

    def _vacate(self, worker: int, place: Vacated) -> None:
        del worker
        self._room.free += self._room.again and place is Vacated.FREE

    def _kill(self, worker: int) -> None:
        self.run.lost[worker] = time.monotonic()
        self._end(worker)

    def _end(self, worker: int) -> None:
        """Whoever is through with its run ends when its line is closed."""
        if worker in self._lines:
            self._processes[worker].kill()
        line = (self._lines if worker in self._lines else self._released).pop(worker, None)
        if line is not None:  # else there is no process, and why is told
            line.close()

    def _tell(self, to: int | None, message: ToWorker) -> None:
        """To one worker, or to all that are at work. Any thread."""
        with self._lock:
            for line in [line for w, line in self._lines.items() if to in (None, w)]:
                try:
                    line.send(message)
                except OSError:
                    continue  # it is dead, and `wait` will say so


def heard(line: Connection) -> Any:  # noqa: ANN401 - what a worker says
    """What there is on a line; None if its worker has ended, were it within a message."""
    try:
        return line.recv()
    except (EOFError, OSError):
        return None
