"""The controller: one Ray actor a run. Starts workers, learns of deaths, passes messages on.

It decides nothing: that is the business of the conductor (train.control), whose actions it carries
out (train.record.conductor_shell). The train function's progress does not pass through it, except
for events on their way to the journal. It runs in a thread of its own, beside workers' calls and
the driver's calls, all under one lock, and none blocks while it holds the lock.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import (
    PlacementGroupSchedulingStrategy,
)

from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.config import (
    CheckpointConfig,
    ExchangeConfig,
    FailureConfig,
    ProfileConfig,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
)
from elastix.data import leaving
from elastix.errors import ElastixError, Interrupted, OtherCode, StoreError, TrainError
from elastix.events import Event, Events, Resumed
from elastix.observe.ray_metrics import Metrics
from elastix.store import Store
from elastix.train.control.actions import Vacated
from elastix.train.control.messages import (
    FromWorker,
    Outcome,
    OutcomeKind,
    RecordEvents,
    Started,
    ToWorker,
)
from elastix.train.control.terms import Found, Phase, RunTerms
from elastix.train.on_ray import lifeline, takeover
from elastix.train.on_ray.actor_classes import as_actor
from elastix.train.on_ray.placement import Slot, Slots
from elastix.train.on_ray.preemption_notices import Notices
from elastix.train.on_ray.takeover import Presence
from elastix.train.on_ray.worker import Job, Worker
from elastix.train.on_ray.worker_handle import WorkerHandle
from elastix.train.record.conductor_shell import Shell
from elastix.train.record.pickled_function import TRAIN, read_code
from elastix.train.record.provenance import (
    Installation,
    how_to_have_one,
    installation,
    warn_of_other,
)
from elastix.train.record.start_or_resume import begin
from elastix.train.replica.link import Life, Settings
from elastix.train.replica.model_source import ModelSource

logger = logging.getLogger(__name__)
_TICK_S = 0.2
_FAREWELL_S = 10.0
_CLEARING_S = 5.0  # for a task that is to clear up on another node
_SETTLE_S = 10.0
_OPENING_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the trainer tells the controller: a run, validated, pickled and with room on Ray.

    Attributes:
        code: digest of the train function, which lies beside the journal.
        placement: of the founders: one group for all, or one for each if workers are crews.
        size: how many these are.
        avoided: nodes that are known to have other elastix code.
        driver: the elastix that it has.
    """

    code: str
    config: dict[str, Any]
    scaling: ScalingConfig
    run: RunConfig
    checkpoint: CheckpointConfig
    restore: RestoreConfig
    failure: FailureConfig
    exchange: ExchangeConfig
    profile: ProfileConfig | None
    metrics: bool
    opening: Event
    placement: tuple[PlacementGroup, ...]
    size: int
    directory: Path
    model_source: ModelSource | None = None
    until_reports: int | None = None
    order_seed: int | None = None
    avoided: Collection[str] = ()
    driver: Installation = field(default_factory=installation)
    secret: bytes = field(default_factory=draw_secret, repr=False)  # the same if Ray restarts it

    @property
    def run_id(self) -> str:
        """Under which Ray knows the run."""
        return takeover.run_id(self.run.store, self.run.name)


@dataclass(frozen=True)
class Followed:
    """What a driver is told.

    Attributes:
        events: those that are new to it.
        over: the run is over, and there will be no more.
        error: what ended it early.
        losses: workers lost.
    """

    events: list[Event]
    over: bool = False
    error: ElastixError | None = None
    losses: int = 0


class Controller(Shell):
    """See the module. It leaves no worker behind.

    If its process dies, Ray starts it anew with the same plan: then it goes on with the workers
    that it finds (train.on_ray.takeover), and with what the journal says.
    """

    def __init__(self, plan: RunRequest) -> None:
        self._plan = plan
        scaling = plan.scaling
        terms = RunTerms(
            founders=plan.size,
            min_workers=scaling.min_workers,
            max_workers=scaling.max_workers,
            failure=plan.failure,
            first_step_s=plan.failure.start_timeout_s,
            shadows=scaling.shadows,
            in_parts=bool(scaling.crew),
            exact=plan.run.exact,
        )
        listeners = Events()
        if plan.metrics:
            listeners.subscribe(Metrics(plan.run.name).read)
        super().__init__(terms, listeners)
        self._news = threading.Condition(self._lock)
        self._me = ray.get_runtime_context().current_actor
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), plan.secret)
        self._open_room(scaling.max_workers + scaling.spares + scaling.shadows)
        self._handles: dict[int, WorkerHandle] = {}  # by process
        self._killed: list[ray.ObjectRef[Any] | None] = []  # and what comes when nothing is left
        self._places: dict[int, Slot] = {}  # where a process is, until the place is given back
        self._failed: dict[int, str] = {}  # by process, what its GPU said before it was of use
        self._notices = Notices(plan.failure.notices, plan.failure.notices_address)
        self._unwritable = False
        self._opened = threading.Event()  # the store is
        self._over = threading.Event()
        self._told = time.monotonic()  # when a driver last asked
        self._begun = False  # it is known who is at work
        self._stop_reason = ""  # of who has asked for the end before that
        with warnings.catch_warnings():  # Ray's property warns of a deprecated one that it uses
            warnings.simplefilter("ignore", DeprecationWarning)
            again = ray.get_runtime_context().was_current_actor_reconstructed
        threading.Thread(target=self._run, args=(again,), name="run", daemon=True).start()

    def _open_room(self, most: int) -> None:
        """Where so many workers can be started."""
        plan = self._plan
        (group,) = plan.placement
        wanted = plan.scaling.resources_per_worker
        self._slots = Slots(group, plan.size, most, wanted, plan.run_id, plan.avoided)

    def __repr__(self) -> str:
        newest = self._conductor.membership
        where = f" gen={newest.generation} workers={newest.size}" if newest.generation else ""
        return f"controller {self._plan.run.name}{where}"

    # ------------------------------------------------------------------ the run

    def _run(self, again: bool) -> None:
        """Carry the run through, and end what is left of it."""
        with self._failing():
            if self._open(again):
                try:
                    with self._failing():  # before the journal says how the run ended
                        while self._conductor.phase is not Phase.OVER:
                            self._watch()
                finally:
                    self._checkpoints.settle(_SETTLE_S)  # stored while their holders live
                    self._close()
        self._over.set()
        with self._news:
            self._news.notify_all()
        if self._plan.run.detached:
            self._depart()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error within ends the run."""
        try:
            yield
        except ElastixError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("controller failed run=%s", self._plan.run.name)
            self._fail(
                TrainError(
                    f"the controller failed after step {self._log.state.step}: {error!r}. The "
                    "workers were stopped; this is a bug in elastix. Calling fit() again goes on "
                    "from the last stored State."
                )
            )

    def _open(self, again: bool) -> bool:
        """Store, journal and workers; False if the run was over when its controller died."""
        plan = self._plan
        if not again and not installation().is_same(plan.driver):
            raise OtherCode(
                f"the driver has elastix {plan.driver}, and Ray's workers have {installation()}: "
                "what one of them sends, the other could take for something else. Nothing was "
                f"trained. {how_to_have_one(plan.driver, installation())}",
                node=ray.get_runtime_context().get_node_id(),
            )
        warn_of_other(plan.driver, "the new controller")
        self._train = read_code(plan.directory / TRAIN, plan.code)
        store = plan.model_source.open_store() if plan.model_source is not None else None
        store = store or Store(plan.run.store)
        settings = Settings(
            directory=plan.directory,
            run=plan.run.name,
            seed=plan.run.seed,
            order_seed=plan.order_seed,
            min_workers=plan.scaling.min_workers,
            checkpoint=plan.checkpoint,
            model_source=plan.model_source,
            until_reports=plan.until_reports,
            rollback=plan.failure.recovery == "rollback",
            guard=plan.failure.guard,
            sentinel=plan.failure.sentinel,
            recompute_every=plan.failure.recompute_every,
            exact=plan.run.exact,
            exchange=plan.exchange,
            secret=plan.secret,
            crew=plan.scaling.crew,
        )
        self._keep_checkpoints(store, settings)
        self._opened.set()
        begun: list[Event] = []
        path, stays = plan.directory / "journal.jsonl", plan.run.detached
        self._log.open(path, plan.opening, stays, takeover.LET_GO_S)
        again = again and bool(self._log.count)
        if not again:
            begun, settings = begin(self._checkpoints, settings, plan.restore)
        self._settings = settings
        if (ended := self._log.ended) is not None:
            if ended.outcome == "failed":
                self._fail(TrainError(f"the run had failed: {ended.message}"))
            return False
        if again:
            stored = self._take_up()
            # While no one is in hand their calls are turned away, and they call again.
            found = takeover.take_stock(
                plan.run_id,
                self._rendezvous.address,
                self._settings.left_out,
                plan.failure.hang_timeout_s,
            )
        with self._lock:
            if again:
                self._take_over(*found, stored)
            else:
                self._do(self._conductor.begin([plan.opening, *begun]))
            self._begun = True
            if self._stop_reason:
                self._do(self._conductor.stop(self._stop_reason, time.monotonic()))
            self._look_for_room()
        return True

    def _take_over(
        self, actors: dict[int, Any], present: Sequence[Presence], stored: Resumed
    ) -> None:
        """Go on with the workers of the controller that was killed."""
        for one in present:
            actor = actors[one.process]
            ends = actor.outcome.remote(one.worker - 1)
            self._handles[one.process] = WorkerHandle(one.process, actor, ends, one.pid, one.node)
            self._places[one.process] = one.slot
        found = self._find(actors, present)
        # Ids of those that were ended too, whose names Ray may not have given back yet.
        known = [*actors] if not self._settings.crew else [one.worker for one in present]
        state = self._log.state.copy()
        now = time.monotonic()
        self._do(self._conductor.take_over(state, found, known, stored, now))
        self._places = {process: self._places[process] for process in self._handles}
        self._take_slots_over()
        for one in present:
            if one.process in self._handles:
                handle = self._handles[one.process]
                # The first call may have died with who made it.
                handle.actor.run.remote(Life(one.worker, one.place, self._settings))
                self._listen(handle, one.lifeline)
        holders = sum(one.holder for one in found)
        logger.info("took over workers=%d holders=%d", len(found), holders)

    def _take_slots_over(self) -> None:
        """Where nobody is replaced, the room of those that were lost stays empty."""
        state, replaces = self._conductor.state, self._plan.failure.replace
        unused = 0 if replaces else state.losses + state.not_started
        self._slots.take_over(list(self._places.values()), unused)

    def _find(self, actors: Mapping[int, Any], present: Sequence[Presence]) -> list[Found]:
        """The workers that there are, of the processes that are present."""
        del actors
        return [
            Found(
                worker=one.worker,
                pid=one.pid,
                node=one.node,
                device=one.device,
                generation=one.generation,
                address=one.catch_up,
                ready=one.ready,
                holder=one.holder,
                shadow=one.shadow,
                operation=one.operation,
                lifeline=one.lifeline,
                noticed=one.noticed,
                misinformed=one.left_out != self._settings.left_out,
            )
            for one in present
        ]

    def _depart(self) -> None:
        """A detached controller ends itself when a driver has heard the outcome, or none asks."""
        while time.monotonic() - self._told < _FAREWELL_S:
            time.sleep(_TICK_S)
        for group in self._plan.placement:
            remove_placement_group(group)
        ray.kill(self._me, no_restart=True)

    # ------------------------------------------------------------------ from the driver

    @ray.method(concurrency_group="driver")
    def stop(self, reason: str) -> None:
        """End the run when its State is stored; asked again, at once."""
        with self._lock:
            if self._begun:
                self._do(self._conductor.stop(reason, time.monotonic()))
            else:
                self._stop_reason = reason

    @ray.method(concurrency_group="driver")
    def follow(self, start: int, wait_s: float) -> Followed:
        """Events from number `start` on; waits up to `wait_s` for one, or for the end."""
        with self._news:
            log = self._log
            self._news.wait_for(lambda: log.count > start or self._over.is_set(), wait_s)
            self._told = time.monotonic()
            events = log.events(start)
            over = self._over.is_set() and not events
            return Followed(events, over, self._error(), log.state.losses)

    def _error(self) -> ElastixError | None:
        """What the driver raises when the run is over."""
        ended = self._log.ended
        if self._conductor.error is None and ended is not None and ended.outcome == "interrupted":
            return Interrupted(
                f"run {self._plan.run.name!r} was stopped after step {ended.step}. Calling "
                "fit() again goes on from the last stored State."
            )
        return self._conductor.error

    @ray.method(concurrency_group="driver")
    def process(self) -> int:
        """Process id."""
        return os.getpid()

    @ray.method(concurrency_group="driver")
    def status(self) -> dict[str, Any]:
        """Where the run stands, as JSON values: see Progress.summary. Never blocks for long."""
        with self._lock:
            summary = self._log.summary()
            over = self._over.is_set() or self._log.ended is not None
            stopping = bool(self._stop_reason or self._conductor.state.stopping)
        return {
            **summary,
            "over": over,
            "stopping": stopping,
            "store": self._plan.run.store,
            "directory": str(self._plan.directory),
        }

    # ------------------------------------------------------------------ from workers

    @ray.method(concurrency_group="workers")
    def hear(self, process: int, worker: int, message: FromWorker) -> bool:
        """What a process has to say, of a worker; never blocks for long.

        Returns:
            Whether it is heeded. False if the worker is not (yet) this controller's, or if the
            journal cannot be written.
        """
        with self._lock:
            handle = self._handles.get(process)
            if isinstance(message, Started) and handle is not None and not handle.pid:
                handle.pid, handle.node = message.pid, message.node
                self._slots.welcome()
                self._listen(handle, message.lifeline)
            return self._heed(process, worker, message)

    def _heed(self, process: int, worker: int, message: FromWorker) -> bool:
        del process
        if worker not in self._conductor.workers:
            return False
        self._do(self._conductor.hear(worker, message, time.monotonic()))
        return not (isinstance(message, RecordEvents) and self._unwritable)

    @ray.method(concurrency_group="store")
    def call(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - any method
        """A worker's question to the store's index; see StoreServer.

        Waits for the store to be open: a controller that was restarted is asked at once.
        """
        if method.startswith("_"):
            raise StoreError(f"{method!r} is no question to a store.")
        if not self._opened.wait(_OPENING_S):
            raise StoreError(
                f"the controller has not opened the store within {_OPENING_S:g} s, so {method!r} "
                "was not answered. What was stored before is safe."
            )
        return getattr(self._checkpoints.store.ledger, method)(*args, **options)

    # ------------------------------------------------------------------ watching workers

    def _watch(self) -> None:
        runs = {handle.run: handle for handle in list(self._handles.values()) if not handle.over}
        over, _ = ray.wait(list(runs), timeout=_TICK_S, num_returns=1) if runs else ([], [])
        for run in over:
            self._ended(runs[run])
        nodes = {handle.node for handle in list(self._handles.values()) if handle.node}
        self._slots.look(self._notices.look(nodes | self._slots.nodes))
        with self._lock:
            self._look_for_room()
            self._do(self._conductor.tick(time.monotonic()))
        if self._conductor.phase is Phase.GOING_BACK:
            self._go_back()

    def _listen(self, handle: WorkerHandle, path: str) -> None:
        """Ray tells of every death; of one on this host the controller hears sooner by itself."""
        if path and handle.here:
            lifeline.watch(path, partial(self._died, handle))

    def _died(self, handle: WorkerHandle) -> None:
        with self._lock:
            handle.over = True
            self._lost(handle, time.monotonic())

    def _lost(self, handle: WorkerHandle, now: float) -> None:
        """A process has ended."""
        self._do(self._conductor.died(handle.process, now))

    def _ended(self, handle: WorkerHandle) -> None:
        """A worker's run has ended, in one way or another."""
        try:
            worker, outcome = ray.get(handle.run)
        except ray.exceptions.RayActorError:
            self._died(handle)
            return
        except ray.exceptions.RayTaskError as error:
            worker, outcome = (
                handle.process,
                Outcome(kind=OutcomeKind.RAISED, summary=str(error.cause), traceback=str(error)),
            )
        with self._lock:
            handle.over = True
            if outcome.node and self._slots.avoid(outcome.node):
                logger.warning("%s", outcome.summary)
            self._look_at_gpu(handle.process, worker, outcome)
            self._through(handle, worker, outcome, time.monotonic())
            if outcome.node:  # also if that worker was given up before: nobody is started there
                self._look_for_room()

    def _look_at_gpu(self, process: int, worker: int, outcome: Outcome) -> None:
        """Note a GPU with which a worker did not even come to `prepare`; see Slots.give_back.

        Or, where others train on, not beyond its first step.
        """
        state, others = self._conductor.state, {*self._conductor.holders} - {worker}
        began = state.began.get(worker, outcome.step)  # it may not have come into the group
        useless = worker not in state.started or (others and outcome.step <= began + 1)
        if outcome.kind is OutcomeKind.DEVICE_FAILED and useless and process in self._places:
            self._failed[process] = outcome.summary

    def _through(self, handle: WorkerHandle, worker: int, outcome: Outcome, now: float) -> None:
        """A process is through with what it was of a worker."""
        del handle
        self._do(self._conductor.ended(worker, outcome, now))

    def _look_for_room(self) -> None:
        slots = self._slots
        now = time.monotonic()
        self._do(
            self._conductor.room(slots.free, more=slots.more, draining=slots.draining, now=now)
        )

    # ------------------------------------------------------------------ acting

    def _make_job(self) -> Job:
        plan = self._plan
        gpus, crew = plan.scaling.resources_per_process.get("GPU", 0.0), bool(plan.scaling.crew)
        # NCCL refuses two ranks on one GPU, unless it takes their hosts to be different.
        shares_gpu = crew and 0 < gpus < 1
        return Job(
            train=self._train,
            config=plan.config,
            run=plan.run.name,
            directory=plan.directory,
            store=plan.run.store,
            crew=crew,
            address=self._rendezvous.address,
            backend="nccl" if gpus >= 1 or shares_gpu else "gloo",
            shares_gpu=shares_gpu,
            heartbeat_s=min(1.0, plan.failure.hang_timeout_s / 5),
            threads=max(1, int(plan.scaling.resources_per_process.get("CPU", 0.0))),
            affinity=plan.scaling.affinity,
            profile=plan.profile,
            driver=plan.driver,
        )

    def _start(self, worker: int) -> None:
        slot = self._slots.take()
        if slot is None:  # since room was counted its node was lost, or is to be taken away
            self._do(self._conductor.died(worker, time.monotonic()))
            return
        self._start_process(worker, slot)
        self._handles[worker].actor.run.remote(Life(worker, 0, self._settings))

    def _start_process(self, process: int, slot: Slot) -> None:
        wanted = self._plan.scaling.resources_per_process
        actor: Any = (
            as_actor(Worker, control=2, outcome=4)
            .options(
                name=takeover.worker_name(self._plan.run_id, process),
                namespace=takeover.NAMESPACE,
                lifetime="detached",  # it lives on if this process dies
                num_cpus=wanted.get("CPU", 0.0),
                num_gpus=wanted.get("GPU", 0.0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    slot.group, placement_group_bundle_index=slot.bundle
                ),
            )
            .remote(process, self._me, self._make_job(), slot)
        )
        self._handles[process] = WorkerHandle(process, actor, actor.outcome.remote(-1))
        self._places[process] = slot

    def _kill(self, worker: int) -> None:
        self._kill_process(worker)

    def _kill_process(self, process: int) -> None:
        handle = self._handles.pop(process, None)  # None: there was no room for it
        if handle is not None:
            self._killed.append(handle.kill())

    def _end(self, worker: int) -> None:
        self._handles.pop(worker).end()

    def _vacate(self, worker: int, place: Vacated) -> None:
        slot = self._places.pop(worker, None)
        if slot is None:
            return
        match place:
            case Vacated.FREE | Vacated.DRAINING:  # the slots know which nodes are draining
                self._slots.give_back(slot, self._failed.pop(worker, ""))
            case Vacated.UNUSED:
                self._slots.drop(slot)

    def _tell(self, to: int | None, message: ToWorker) -> None:
        """To one worker, or to all that are at work. Any thread."""
        with self._lock:
            workers = self._conductor.workers
            for worker in list(workers) if to is None else [to] if to in workers else []:
                handle = self._handles.get(worker)  # None: it is started by a later action
                if handle is not None:
                    handle.actor.hear.remote(worker, message)

    def _emit(self, event: Event, sequence: int | None = None) -> bool:
        with self._news:
            if not super()._emit(event, sequence):
                self._unwritable = True
                return False
            self._news.notify_all()
            return True

    def _let_go(self) -> None:
        self._notices.close()
        self._slots.close()
        elsewhere = [ref for ref in self._killed if ref is not None]
        if elsewhere:
            ray.wait(elsewhere, num_returns=len(elsewhere), timeout=_CLEARING_S)
        leaving.clear(killed=bool(self._killed))
