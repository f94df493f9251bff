"""The controller: one Ray actor a run. Starts workers, learns of deaths, re-forms the group.

It decides nothing about steps or samples; who is in the group is decided by membership.Roster.
The train function's progress does not pass through it, except for events on their way to the
journal. It runs in a thread of its own, beside workers' calls and the driver's calls, all
under one lock, and none blocks while it holds the lock.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import (
    PlacementGroupSchedulingStrategy,
)

from elastix.comm.door import draw_secret
from elastix.comm.meeting import Rendezvous
from elastix.comm.membership import Membership, Roster
from elastix.config import (
    CheckpointConfig,
    FailureConfig,
    ProfileConfig,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
)
from elastix.errors import (
    ElastixError,
    StoreError,
    TrainError,
)
from elastix.events import (
    Event,
    Events,
    GenerationFormed,
    Resumed,
    RunEnded,
    StepCommitted,
    WorkerLeft,
    WorkerLost,
    WorkerRaised,
    WorkerSlow,
    WorkerStarted,
)
from elastix.observe.metrics import Metrics
from elastix.store import Store
from elastix.train import lifeline, succession, verdicts
from elastix.train.beginning import begin
from elastix.train.checkpoint import restore
from elastix.train.checkpoint.assembly import Order, Release
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Dismiss,
    Entered,
    FromWorker,
    Heartbeat,
    Leave,
    Outcome,
    OutcomeKind,
    Ready,
    Record,
    Started,
    Suspect,
)
from elastix.train.hands import Hand
from elastix.train.heritage import Heritage
from elastix.train.link import Settings
from elastix.train.logbook import Logbook
from elastix.train.quorum import Quorum
from elastix.train.slots import Slot, Slots
from elastix.train.succession import Presence
from elastix.train.vigil import Vigil
from elastix.train.worker import Job, Worker

logger = logging.getLogger(__name__)
_TICK_S = 0.2
_FAREWELL_S = 10.0
_RECOVERY_S = 1.0
"""Starting a worker costs seconds of a core, which the survivors of a loss need for an instant."""
_SLOW = 1.5  # times the others' part of a step: worth a line
_LINGER_S = 5.0
_SETTLE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the trainer tells the controller: a run, validated, pickled and with room on Ray."""

    train: bytes
    config: dict[str, Any]
    scaling: ScalingConfig
    run: RunConfig
    checkpoint: CheckpointConfig
    restore: RestoreConfig
    failure: FailureConfig
    profile: ProfileConfig | None
    metrics: bool
    opening: Event
    placement: PlacementGroup
    size: int
    directory: Path
    heritage: Heritage | None = None
    until_reports: int | None = None
    secret: bytes = field(default_factory=draw_secret, repr=False)  # the same if Ray restarts it

    @property
    def run_id(self) -> str:
        """Under which Ray knows the run."""
        return succession.run_id(self.run.store, self.run.name)


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


class Controller:
    """See the module. It leaves no worker behind.

    If its process dies, Ray starts it anew with the same plan: then it goes on with the workers
    that it finds (train.succession), and with what the journal says.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._me = ray.get_runtime_context().current_actor
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), plan.secret)
        scaling = plan.scaling
        self._roster = Roster(plan.size, scaling.max_workers, scaling.min_workers)
        self._quorum = Quorum(scaling.min_workers, plan.failure)
        self._vigil = Vigil(plan.failure.hang_timeout_s, plan.failure.start_timeout_s)
        most = scaling.max_workers + scaling.spares
        self._slots = Slots(
            plan.placement, plan.size, most, scaling.resources_per_worker, plan.run_id
        )
        listeners = Events()
        if plan.metrics:
            listeners.subscribe(Metrics(plan.run.name).read)
        self._log = Logbook(listeners)
        self._hands: dict[int, Hand] = {}
        self._released: list[Hand] = []
        self._next_worker = 0
        self._vacant_since = 0.0  # of the last loss: its place is filled after the recovery
        self._error: ElastixError | None = None
        self._interrupted = ""
        self._finished = 0
        self._over = threading.Event()
        self._told = time.monotonic()  # when a driver last asked
        with warnings.catch_warnings():  # Ray's property warns of a deprecated one that it uses
            warnings.simplefilter("ignore", DeprecationWarning)
            again = ray.get_runtime_context().was_current_actor_reconstructed
        threading.Thread(target=self._run, args=(again,), name="run", daemon=True).start()

    def __repr__(self) -> str:
        newest = self._roster.newest
        where = f" gen={newest.generation} workers={newest.size}" if newest.generation else ""
        return f"controller {self._plan.run.name}{where}"

    # ------------------------------------------------------------------ the run

    def _run(self, again: bool) -> None:
        """Carry the run through, and end what is left of it."""
        try:
            if self._open(again):
                try:
                    while not (self._error or self._interrupted or self._roster.over):
                        self._watch()
                finally:
                    self._end()
        except ElastixError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("controller failed run=%s", self._plan.run.name)
            self._error = TrainError(
                f"the controller failed after step {self._log.step}: {error!r}. The workers were "
                "stopped; this is a bug in elastix. fit() again goes on from the last stored State."
            )
        self._over.set()
        with self._news:
            self._news.notify_all()
        if self._plan.run.detached:
            self._depart()

    def _open(self, again: bool) -> bool:
        """Store, journal and workers; False if the run was over when its controller died."""
        plan = self._plan
        outlets = Outlets(
            send=self._pass_on,
            emit=self._emit,
            journaled=lambda: self._log.step,
            fail=self._fail,
            sync=self._log.sync,
        )
        store = plan.heritage.open_store() if plan.heritage is not None else None
        store = store or Store(plan.run.store)
        self._checkpoints = Checkpoints(store, plan.run.name, plan.checkpoint, outlets)
        settings = Settings(
            directory=plan.directory,
            run=plan.run.name,
            seed=plan.run.seed,
            min_workers=plan.scaling.min_workers,
            checkpoint=plan.checkpoint,
            heritage=plan.heritage,
            until_reports=plan.until_reports,
            rollback=plan.failure.recovery == "rollback",
            secret=plan.secret,
        )
        begun: list[Event] = []
        path, stays = plan.directory / "journal.jsonl", plan.run.detached
        before = self._log.open(path, plan.opening, stays, succession.LET_GO_S)
        again = again and bool(self._log.history)
        if again:
            settings = replace(settings, left_out=restore.left_out(before))
        else:
            begun, settings = begin(self._checkpoints, settings, plan.restore)
        self._job = self._make_job(settings)
        if (ended := self._log.ended) is not None:
            if ended.outcome != "finished":
                self._error = TrainError(f"the run had {ended.outcome}: {ended.message}")
            return False
        if again:
            # While no one is in hand their calls are turned away, and they call again.
            found = succession.take_stock(
                plan.run_id, self._rendezvous.address, plan.failure.hang_timeout_s
            )
        with self._lock:
            if again:
                self._take_over(*found)
            else:
                for event in (plan.opening, *begun):
                    self._emit(event)
            self._fill()
        return True

    def _take_over(self, actors: dict[int, Any], present: Sequence[Presence]) -> None:
        """Go on with the workers of the controller that was killed."""
        holders = [one.worker for one in present if one.holder]
        # Joiners in the making have lost whom they waited for, and spares know nothing that
        # cannot be learnt again: where the State lives on, others are started in their place.
        for one in [one for one in present if holders and not one.holder]:
            ray.kill(actors[one.worker], no_restart=True)
        present = [one for one in present if one.holder or not holders]
        now = time.monotonic()
        for one in present:
            hand = Hand(
                one.worker, actors[one.worker], one.slot, actors[one.worker].outcome.remote()
            )
            hand.pid, hand.node, hand.device, hand.feed = one.pid, one.node, one.device, one.feed
            hand.actor.run.remote()  # the first call may have died with who made it
            self._hands[one.worker] = hand
            self._vigil.hear(one.worker, Heartbeat(), now)
            self._listen(hand, one.lifeline)
        # Of those that were ended above too, whose names Ray may not have given back yet.
        self._next_worker = max([-1, *self._log.started, *actors]) + 1
        self._slots.take_over([one.slot for one in present])
        known = self._log.started  # others call `ready` until it is heeded
        waiting = [one.worker for one in present if one.worker in known and not one.holder]
        newest = max([self._log.generation, *(one.generation for one in present)])
        for worker in self._log.unaccounted(self._hands):
            self._emit(WorkerLost(worker=worker, rank=-1, generation=newest, cause="died unseen"))
        logger.info("took over workers=%d holders=%d", len(present), len(holders))
        if not holders:
            self._go_back()
        self._push(self._roster.take_over(newest, holders, waiting))

    def _go_back(self) -> None:
        """Nobody has the State: what comes next starts from the one that was stored last."""
        last = self._checkpoints.last()
        self._emit(Resumed(step=last.step if last else 0, ref=last.ref if last else ""))

    def _start_over(self) -> None:
        """The last worker with the State is lost: found the group anew, from the stored State."""
        self._checkpoints.give_up()
        with self._lock:
            logger.warning("all workers lost, starting over run=%s", self._plan.run.name)
            for hand in [hand for hand in self._hands.values() if hand.feed is not None]:
                # A joiner that has caught up halfway must not pass for one that has the State.
                self._hands.pop(hand.worker)
                self._roster.lost(hand.worker)
                self._forget(hand)
                hand.end()
                self._slots.give_back(hand.slot)
            self._go_back()
            self._quorum.start_over()
            self._push(self._roster.start_over())
            self._fill()

    def _depart(self) -> None:
        """A detached controller ends itself when a driver has heard the outcome, or none asks."""
        while time.monotonic() - self._told < _FAREWELL_S:
            time.sleep(_TICK_S)
        remove_placement_group(self._plan.placement)
        ray.kill(self._me, no_restart=True)

    # ------------------------------------------------------------------ from the driver

    @ray.method(concurrency_group="driver")
    def stop(self, reason: str) -> None:
        """End the run as soon as can be; States and journal stay as they are."""
        with self._lock:
            self._interrupted = reason

    @ray.method(concurrency_group="driver")
    def follow(self, start: int, wait_s: float) -> Followed:
        """Events from number `start` on; waits up to `wait_s` for one, or for the end."""
        with self._news:
            history = self._log.history
            self._news.wait_for(lambda: len(history) > start or self._over.is_set(), wait_s)
            self._told = time.monotonic()
            events = history[start:]
            over = self._over.is_set() and not events
            return Followed(events, over, self._error, self._log.losses)

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
        return {
            **summary,
            "over": over,
            "store": self._plan.run.store,
            "directory": str(self._plan.directory),
        }

    # ------------------------------------------------------------------ from workers

    @ray.method(concurrency_group="workers")
    def hear(self, worker: int, message: FromWorker) -> bool:
        """What a worker has to say; never blocks for long.

        Returns:
            Whether it is heeded. False if the worker is not (yet) this controller's, or if the
            journal cannot be written.
        """
        with self._lock:
            hand = self._hands.get(worker)
            if hand is None:
                return False
            match message:
                case Heartbeat():
                    self._vigil.hear(worker, message, time.monotonic())
                case Started():
                    hand.pid, hand.node, hand.device = message.pid, message.node, message.device
                    self._vigil.hear(worker, Heartbeat(), time.monotonic())
                    self._listen(hand, message.lifeline)
                case Ready():
                    self._ready(hand, message)
                case CaughtUp():
                    self._push(self._roster.level(worker))
                case Leave():
                    if not hand.leaves:
                        self._ask_to_leave(hand, message.cause)
                case Entered():
                    self._push(self._roster.entered(worker, message.generation))
                    if self._roster.settled:
                        self._vigil.settled(self._roster.newest.members)
                case Suspect():
                    self._suspect(worker, message)
                case Record():
                    return self._record(message)
                case _:
                    self._checkpoints.told(worker, message)
            return True

    def _ready(self, hand: Hand, message: Ready) -> None:
        worker = hand.worker
        if hand.leaves:
            return
        if worker not in self._log.started:
            self._emit(
                WorkerStarted(worker=worker, pid=hand.pid, node=hand.node, device=hand.device)
            )
        hand.feed = message.address
        self._push(self._roster.ready(worker))
        if worker in self._roster.watching:
            donors = [self._hands[donor].feed for donor in self._roster.donors()]
            there = tuple(feed for feed in donors if feed is not None)
            hand.actor.hear.remote(CatchUp(there))

    def _suspect(self, worker: int, message: Suspect) -> None:
        if not self._vigil.doubt(
            worker, message.generation, message.error, message.unreachable, time.monotonic()
        ):
            return
        logger.info(
            "doubt worker=%d generation=%d unreachable=%s error=%s",
            worker,
            message.generation,
            sorted(message.unreachable),
            message.error,
        )
        # A death is known within milliseconds; only if there is none is the group made anew.
        timer = threading.Timer(1.0, self._still_in_doubt, (message.generation,))
        timer.daemon = True
        timer.start()

    def _still_in_doubt(self, generation: int) -> None:
        with self._lock:
            self._push(self._roster.doubt(generation))

    def _record(self, message: Record) -> bool:
        for serial, event in message.entries:
            if serial is not None and serial <= self._log.serial:
                continue
            if not self._emit(event, serial):
                return False
            if isinstance(event, StepCommitted):
                if event.generation == self._roster.newest.generation:
                    self._vacant_since = 0.0
                    self._fill()
                self._checkpoints.poke()
        return True

    @ray.method(concurrency_group="store")
    def call(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - any method
        """A worker's question to the store's index; see StoreServer."""
        if method.startswith("_"):
            raise StoreError(f"{method!r} is no question to a store.")
        return getattr(self._checkpoints.store.ledger, method)(*args, **options)

    def _pass_on(self, worker: int | None, order: Order | Release) -> None:
        with self._lock:
            for hand in self._hands.values():
                if worker in (None, hand.worker):
                    hand.actor.hear.remote(order)

    def _fail(self, error: ElastixError) -> None:
        """The run cannot go on. Any thread; what came first counts."""
        with self._lock:
            self._error = self._error or error

    # ------------------------------------------------------------------ watching workers

    def _watch(self) -> None:
        runs = {hand.run: hand for hand in list(self._hands.values())}
        over, _ = ray.wait(list(runs), timeout=_TICK_S, num_returns=1) if runs else ([], [])
        for run in over:
            self._ended(runs[run])
        if self._roster.extinct and self._plan.failure.replace and not self._error:
            self._start_over()
        self._slots.look()
        with self._lock:
            self._check_hangs()
            self._check_pace()
            self._check_nodes()
            self._check_quorum()
            self._let_go()
            if time.monotonic() - self._vacant_since > _RECOVERY_S:
                self._fill()

    def _listen(self, hand: Hand, path: str) -> None:
        """Ray tells of every death; of one on this host the controller hears sooner by itself."""
        if path and hand.here:
            lifeline.watch(path, partial(self._lose, hand, "died"))

    def _ended(self, hand: Hand) -> None:
        """A worker's run has ended, in one way or another."""
        try:
            outcome: Outcome = ray.get(hand.run)
        except ray.exceptions.RayActorError:
            self._lose(hand, "died")
            return
        except ray.exceptions.RayTaskError as error:
            outcome = Outcome(
                kind=OutcomeKind.RAISED, summary=str(error.cause), traceback=str(error)
            )
        with self._lock:
            if outcome.kind is OutcomeKind.FINISHED:
                self._finished += 1
                self._hands.pop(hand.worker, None)
                self._released.append(hand)
                hand.gone = time.monotonic()
                self._forget(hand)
                self._push(self._roster.finished(hand.worker, outcome.generation))
            elif outcome.kind is OutcomeKind.LEFT:
                self._hands.pop(hand.worker, None)
                self._released.append(hand)
                hand.gone = time.monotonic()
                self._say_farewell(hand, outcome)
                self._push(self._roster.left(hand.worker, outcome.generation))
            elif outcome.kind is OutcomeKind.RAISED:
                self._raised(hand, outcome)
            elif outcome.kind is OutcomeKind.DISMISSED:
                self._hands.pop(hand.worker, None)
                self._released.append(hand)
                if not self._roster.holders & set(self._hands):  # rank 0 may still be storing
                    self._error = outcome.error
            else:
                self._lose(hand, outcome.kind)

    def _raised(self, hand: Hand, outcome: Outcome) -> None:
        self._emit(
            WorkerRaised(
                worker=hand.worker,
                rank=outcome.rank,
                step=outcome.step,
                traceback=outcome.traceback,
            )
        )
        self._error = verdicts.raised(outcome, hand.worker)

    def _lose(self, hand: Hand, cause: str) -> None:
        """A worker is dead or taken for dead: tell the survivors first, then mop up."""
        with self._lock:
            if self._hands.pop(hand.worker, None) is None:
                return
            members = self._roster.newest.members
            rank = members.index(hand.worker) if hand.worker in members else -1
            generation = self._roster.newest.generation
            self._push(self._roster.lost(hand.worker))
            self._emit(
                WorkerLost(worker=hand.worker, rank=rank, generation=generation, cause=cause)
            )
            hand.kill()
            self._forget(hand)
            self._judge_losses()
            if self._plan.failure.replace:
                self._slots.give_back(hand.slot)
                self._vacant_since = time.monotonic()
                if not self._roster.founded or not self._roster.holders:
                    self._fill()
                return
            self._slots.drop(hand.slot)
            if not self._hands and self._error is None:
                self._error = verdicts.none_came_about()

    def _ask_to_leave(self, hand: Hand, cause: str) -> None:
        hand.leaves = cause
        if hand.worker in self._roster.newest.members:
            self._push(self._roster.leave(hand.worker))
        else:  # nobody would notice
            self._roster.leave(hand.worker)
            self._hands.pop(hand.worker)
            self._say_farewell(hand, Outcome(kind=OutcomeKind.LEFT, step=self._log.step))
            hand.end()

    def _say_farewell(self, hand: Hand, outcome: Outcome) -> None:
        """A worker has gone as it should."""
        self._emit(
            WorkerLeft(
                worker=hand.worker,
                generation=outcome.generation,
                step=outcome.step,
                cause=hand.leaves,
            )
        )
        self._forget(hand)
        self._slots.give_back(hand.slot, node=hand.node if hand.leaves == "draining" else "")

    def _forget(self, hand: Hand) -> None:
        self._checkpoints.lost(hand.worker)
        self._vigil.forget(hand.worker)

    def _let_go(self) -> None:
        """End processes that were let go, once nobody waits for what they have sent."""
        now = time.monotonic()
        rest = []
        for hand in self._released:
            if self._roster.settled or now - hand.gone > _LINGER_S:
                hand.end()
            else:
                rest.append(hand)
        self._released = rest

    def _judge_losses(self) -> None:
        log, plan = self._log, self._plan
        self._error = self._error or verdicts.too_many_losses(
            plan.failure, log.losses, log.losses_in_a_row, plan.size, log.step
        )
        if self._roster.extinct and not plan.failure.replace:
            self._error = self._error or verdicts.none_left(log.step)

    def _check_hangs(self) -> None:
        """Take out who is silent, who holds up all others, and who cannot be reached by them.

        A run that cannot get on whoever goes is ended.
        """
        now = time.monotonic()
        members = self._roster.newest.members
        for worker in self._vigil.silent(now):
            self._lose_by_id(worker, "silent")
        for worker in self._vigil.holding_up(members, now):
            self._lose_by_id(worker, "stuck")
        cut_off = self._vigil.unreachable(self._roster.holders or members, now)
        if cut_off is not None:
            self._lose_by_id(cut_off, "unreachable")
        self._error = self._error or self._vigil.hopeless(now)

    def _lose_by_id(self, worker: int, cause: str) -> None:
        hand = self._hands.get(worker)
        if hand is None:
            self._vigil.forget(worker)
        else:
            self._lose(hand, cause)

    def _check_pace(self) -> None:
        """Tell who is slow; let it go if that is asked for."""
        limit = self._plan.failure.evict_slower_than
        members = self._roster.newest.members
        for worker, factor in self._vigil.slow(members, min(_SLOW, limit or _SLOW)).items():
            hand = self._hands.get(worker)
            if hand is None:
                continue
            if factor >= 1.25 * hand.slow:
                hand.slow = factor
                self._emit(WorkerSlow(worker=worker, step=self._log.step, factor=round(factor, 2)))
            if limit is not None and factor >= limit and not hand.leaves:
                self._ask_to_leave(hand, "slow")

    def _check_nodes(self) -> None:
        """Whoever is on a node that is to be taken away leaves before that."""
        for hand in list(self._hands.values()):
            if hand.node in self._slots.draining and not hand.leaves:
                self._ask_to_leave(hand, "draining")

    def _fill(self) -> None:
        """Start a worker in every slot that is free; spares when the group has come about.

        Starting one costs seconds of a core, and those who are to found the group come first.
        """
        while not (self._error or self._interrupted or self._finished):
            if not self._roster.founded and len(self._hands) >= self._plan.size:
                return
            slot = self._slots.take()
            if slot is None:
                return
            self._spawn(slot)

    def _check_quorum(self) -> None:
        """End a run whose group was too small for too long, or to which nobody can come."""
        if self._finished:
            return
        verdict = self._quorum.judge(
            len(self._roster.holders),
            founded=self._roster.founded,
            coming=self._slots.more or len(self._hands) >= self._plan.scaling.min_workers,
            step=self._log.step,
            now=time.monotonic(),
        )
        if isinstance(verdict, ElastixError):
            self._error = verdict
        elif verdict is not None:
            for hand in self._hands.values():
                hand.actor.hear.remote(Dismiss(verdict))

    # ------------------------------------------------------------------ acting

    def _make_job(self, settings: Settings) -> Job:
        plan = self._plan
        gpus = plan.scaling.gpus_per_worker
        return Job(
            train=plan.train,
            config=plan.config,
            settings=settings,
            store=plan.run.store,
            address=self._rendezvous.address,
            backend="nccl" if gpus >= 1 else "gloo",  # NCCL refuses two ranks on one GPU
            heartbeat_s=min(1.0, plan.failure.hang_timeout_s / 5),
            threads=max(1, int(plan.scaling.cpus_per_worker)),
            affinity=plan.scaling.affinity,
            profile=plan.profile,
        )

    def _spawn(self, slot: Slot) -> None:
        worker = self._next_worker
        self._next_worker += 1
        scaling = self._plan.scaling
        actor: Any = (
            ray.remote(concurrency_groups={"control": 2, "outcome": 4})(Worker)  # type: ignore[call-overload]
            .options(
                name=succession.worker_name(self._plan.run_id, worker),
                namespace=succession.NAMESPACE,
                lifetime="detached",  # it lives on if this process dies
                num_cpus=scaling.cpus_per_worker,
                num_gpus=scaling.gpus_per_worker,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    slot.group, placement_group_bundle_index=slot.bundle
                ),
            )
            .remote(worker, self._me, self._job, slot)
        )
        actor.run.remote()
        self._hands[worker] = Hand(worker, actor, slot, actor.outcome.remote())

    def _push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        for hand in self._hands.values():
            hand.actor.hear.remote(membership)
        self._emit(
            GenerationFormed(
                generation=membership.generation,
                members=membership.members,
                cause=membership.cause,
            )
        )

    def _emit(self, event: Event, serial: int | None = None) -> bool:
        """Write an event; a journal that cannot be written ends the run."""
        with self._news:
            try:
                self._log.write(event, serial)
            except StoreError as error:
                self._fail(error)
                return False
            self._news.notify_all()
            return True

    def _end(self) -> None:
        self._checkpoints.settle(_SETTLE_S)  # what was accepted is stored while holders live
        with self._lock:
            for hand in [*self._hands.values(), *self._released]:
                hand.end()
            self._hands.clear()  # their deaths are no losses
        self._checkpoints.close()
        with self._lock:
            self._slots.close()
            outcome, message = "finished", ""
            if self._error is not None:
                outcome, message = "failed", str(self._error)
            elif self._interrupted:
                outcome, message = "interrupted", self._interrupted
            self._emit(RunEnded(outcome=outcome, step=self._log.step, message=message))
            self._log.close()
