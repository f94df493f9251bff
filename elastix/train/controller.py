"""The controller: one Ray actor a run. Starts workers, learns of deaths, re-forms the group.

It decides nothing about steps or samples; who is in the group is decided by membership.Roster.
The train function's progress does not pass through it, except for events on their way to the
journal. It runs in a thread of its own, beside workers' calls and the driver's calls, all
under one lock, and none blocks while it holds the lock.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from elastix.comm.group import Rendezvous
from elastix.comm.membership import Membership, Roster
from elastix.comm.news import Address
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
    QuorumLost,
    StoreError,
    TooManyFailures,
    TrainError,
    WorkerFailed,
)
from elastix.events import (
    Event,
    Events,
    GenerationFormed,
    Resumed,
    RunEnded,
    RunStarted,
    StepCommitted,
    WorkerLeft,
    WorkerLost,
    WorkerRaised,
    WorkerSlow,
    WorkerStarted,
)
from elastix.observe import journal
from elastix.observe.journal import Journal
from elastix.observe.metrics import Metrics
from elastix.observe.progress import Progress
from elastix.store import Store
from elastix.train import lifeline, succession
from elastix.train.beginning import begin
from elastix.train.checkpoint import restore
from elastix.train.checkpoint.assembly import Message, Order, Release
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.heritage import Heritage
from elastix.train.member import Settings
from elastix.train.outcome import Outcome
from elastix.train.slots import Slot, Slots
from elastix.train.succession import Presence
from elastix.train.vigil import Sign, Vigil
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


@dataclass
class _Hand:
    """A worker as the controller sees it."""

    worker: int
    actor: Any  # a handle of Worker
    slot: Slot
    run: ray.ObjectRef[Any]  # its outcome
    pid: int = 0
    node: str = ""
    device: str = ""
    feed: Address | None = None  # where joiners can watch it; None before it is ready
    leaves: str = ""  # why, if it was asked to
    slow: float = 0.0  # the factor that was told last
    gone: float = 0.0  # when it was let go


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
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        scaling = plan.scaling
        self._roster = Roster(plan.size, scaling.max_workers, scaling.min_workers)
        self._vigil = Vigil(plan.failure.hang_timeout_s, plan.failure.start_timeout_s)
        most = scaling.max_workers + scaling.spares
        self._slots = Slots(
            plan.placement, plan.size, most, scaling.resources_per_worker, plan.run_id
        )
        self._events = Events()
        if plan.metrics:
            self._events.subscribe(Metrics(plan.run.name).read)
        self._hands: dict[int, _Hand] = {}
        self._released: list[_Hand] = []
        self._doubts: dict[int, int] = {}
        self._doubted_since = 0.0
        self._next_worker = 0
        self._history: list[Event] = []
        self._progress = Progress()
        self._serial = -1
        self._step = 0
        self._losses = 0
        self._losses_since_step = 0
        self._vacant_since = 0.0  # of the last loss: its place is filled after the recovery
        self._short_since: float | None = None
        self._error: ElastixError | None = None
        self._dismissed = False
        self._interrupted = ""
        self._finished = 0
        self._over = threading.Event()
        self._told = time.monotonic()  # when a driver last asked
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
            self._error = error
        except Exception as error:
            logger.exception("controller failed run=%s", self._plan.run.name)
            self._error = TrainError(
                f"the controller failed after step {self._step}: {error!r}. The workers were "
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
        path = plan.directory / "journal.jsonl"
        outlets = Outlets(send=self._pass_on, emit=self._emit, journaled=lambda: self._step)
        store = Store(plan.run.store)
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
        )
        begun: list[Event] = []
        before = list(journal.read(path)) if path.exists() else []
        for event in before:
            self._progress.add(event)
        again = again and any(self._opens(event) for event in before)
        if again:
            settings = replace(settings, left_out=restore.left_out(before))
        else:
            begun, settings = begin(self._checkpoints, settings, plan.restore)
        self._journal = Journal(path)
        self._job = self._make_job(settings)
        if again and self._recall():
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
                    if isinstance(event, Resumed):
                        self._step = event.step
            self._fill()
        return True

    def _recall(self) -> bool:
        """What the journal says of this run; True if it is over."""
        for event, serial in journal.read_numbered(self._journal.path):
            if self._opens(event):
                self._history, self._losses, self._serial = [], 0, -1
            self._history.append(event)
            match event:
                case Resumed():
                    self._step, self._serial = event.step, -1
                case StepCommitted():
                    self._step = event.step
                case WorkerLost():
                    self._losses += 1
                case WorkerStarted():
                    self._next_worker = max(self._next_worker, event.worker + 1)
            self._serial = self._serial if serial is None else serial
        last = self._history[-1] if self._history else None
        if isinstance(last, RunEnded):
            if last.outcome != "finished":
                self._error = TrainError(f"the run had {last.outcome}: {last.message}")
            return True
        return False

    def _opens(self, event: Event) -> bool:
        return isinstance(event, RunStarted) and event.t == self._plan.opening.t

    def _take_over(self, actors: dict[int, Any], present: Sequence[Presence]) -> None:
        """Go on with the workers of the controller that was killed."""
        holders = [one.worker for one in present if one.holder]
        # Joiners in the making have lost whom they waited for, and spares know nothing that
        # cannot be learnt again: where the State lives on, others are started in their place.
        for one in [one for one in present if holders and not one.holder]:
            ray.kill(actors[one.worker], no_restart=True)
        present = [one for one in present if one.holder or not holders]
        generations = [e.generation for e in self._history if isinstance(e, GenerationFormed)]
        now = time.monotonic()
        for one in present:
            hand = _Hand(
                one.worker, actors[one.worker], one.slot, actors[one.worker].outcome.remote()
            )
            hand.pid, hand.node, hand.device, hand.feed = one.pid, one.node, one.device, one.feed
            self._hands[one.worker] = hand
            self._vigil.hear(one.worker, Sign(), now)
            self._listen(hand, one.lifeline)
        self._next_worker = max([self._next_worker, *(one.worker + 1 for one in present)])
        self._slots.take_over([one.slot for one in present])
        waiting = [one.worker for one in present if one.feed and not one.holder]
        newest = max([0, *generations, *(one.generation for one in present)])
        for worker in self._unaccounted(set(self._hands)):
            self._losses += 1
            self._emit(WorkerLost(worker=worker, rank=-1, generation=newest, cause="died unseen"))
        logger.info("took over workers=%d holders=%d", len(present), len(holders))
        if not holders:
            self._go_back()
        self._push(self._roster.take_over(newest, holders, waiting))

    def _unaccounted(self, present: set[int]) -> set[int]:
        """Workers that the journal has as members and that nobody has seen end."""
        members: set[int] = set()
        for event in self._history:
            if isinstance(event, GenerationFormed):
                members = set(event.members)
            elif isinstance(event, WorkerLost | WorkerLeft):
                members.discard(event.worker)
        return members - present

    def _go_back(self) -> None:
        """Nobody has the State: what comes next starts from the one that was stored last."""
        last = self._checkpoints.last()
        self._step, self._serial = (last.step if last else 0), -1
        self._emit(Resumed(step=self._step, ref=last.ref if last else ""))

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
                _kill(hand)
                self._slots.give_back(hand.slot)
            self._go_back()
            self._short_since = None
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
            self._news.wait_for(lambda: len(self._history) > start or self._over.is_set(), wait_s)
            self._told = time.monotonic()
            events = self._history[start:]
            over = self._over.is_set() and not events
            return Followed(events, over, self._error, self._losses)

    @ray.method(concurrency_group="driver")
    def process(self) -> int:
        """Process id."""
        return os.getpid()

    @ray.method(concurrency_group="driver")
    def status(self) -> dict[str, Any]:
        """Where the run stands, as JSON values: see Progress.summary. Never blocks for long."""
        with self._lock:
            summary = self._progress.summary(time.time())
        return {**summary, "store": self._plan.run.store, "directory": str(self._plan.directory)}

    # ------------------------------------------------------------------ from workers

    @ray.method(concurrency_group="workers")
    def started(self, worker: int, pid: int, node: str, device: str, line: str) -> None:
        """A worker's process is up, and its signs of life begin."""
        with self._lock:
            hand = self._hands.get(worker)
            if hand is not None:
                hand.pid, hand.node, hand.device = pid, node, device
                self._vigil.hear(worker, Sign(), time.monotonic())
                self._listen(hand, line)

    @ray.method(concurrency_group="workers")
    def ready(self, worker: int, feed: Address) -> None:
        """A worker is up to `prepare`, or has lost the peers that it caught up from."""
        with self._lock:
            hand = self._hands.get(worker)
            if hand is None or hand.leaves:
                return
            if hand.feed is None:
                self._emit(
                    WorkerStarted(worker=worker, pid=hand.pid, node=hand.node, device=hand.device)
                )
            hand.feed = feed
            self._push(self._roster.ready(worker))
            if worker in self._roster.watching:
                donors = [self._hands[donor].feed for donor in self._roster.donors()]
                hand.actor.invite.remote(tuple(donors))

    @ray.method(concurrency_group="workers")
    def level(self, worker: int) -> None:
        """A joiner has caught up."""
        with self._lock:
            if worker in self._hands:
                self._push(self._roster.level(worker))

    @ray.method(concurrency_group="workers")
    def leave(self, worker: int, cause: str) -> None:
        """A worker is to go at the next boundary."""
        with self._lock:
            hand = self._hands.get(worker)
            if hand is not None and not hand.leaves:
                self._ask_to_leave(hand, cause)

    @ray.method(concurrency_group="workers")
    def entered(self, worker: int, generation: int) -> None:
        """A worker has the State and is in the group."""
        with self._lock:
            if worker in self._hands:
                self._push(self._roster.entered(worker, generation))
                if self._roster.settled:
                    self._doubts.clear()

    @ray.method(concurrency_group="workers")
    def doubt(self, worker: int, generation: int, error: str) -> None:
        """An operation failed at a worker: somebody is dead, or the network hiccuped."""
        del error
        with self._lock:
            if worker not in self._hands:
                return
            self._doubted_since = self._doubted_since if self._doubts else time.monotonic()
            self._doubts[worker] = self._doubts.get(worker, 0) + 1
        # A death is known within milliseconds; only if there is none is the group made anew.
        timer = threading.Timer(1.0, self._still_in_doubt, (generation,))
        timer.daemon = True
        timer.start()

    def _still_in_doubt(self, generation: int) -> None:
        with self._lock:
            self._push(self._roster.doubt(generation))

    @ray.method(concurrency_group="workers")
    def heartbeat(self, worker: int, sign: Sign) -> bool:
        """A sign of life. Whether this controller counts the worker among its own."""
        with self._lock:
            if worker in self._hands:
                self._vigil.hear(worker, sign, time.monotonic())
            return worker in self._hands

    @ray.method(concurrency_group="workers")
    def record(self, worker: int, entries: Sequence[tuple[int | None, Event]]) -> bool:
        """Write events to the journal; one with a serial only the first time it comes.

        False, and nothing is written, for a worker that is not (yet) this controller's.
        """
        with self._lock:
            if worker not in self._hands:
                return False
            for serial, event in entries:
                if serial is not None:
                    if serial <= self._serial:
                        continue
                    self._serial = serial
                self._emit(event, serial)
                if isinstance(event, StepCommitted):
                    self._step = event.step
                    self._losses_since_step = 0
                    if event.generation == self._roster.newest.generation:
                        self._vacant_since = 0.0
                        self._fill()
                    self._checkpoints.poke()
            return True

    @ray.method(concurrency_group="workers")
    def save(self, worker: int, message: Message) -> bool:
        """What a worker has to say on a checkpoint; False if it is not this controller's."""
        known = worker in self._hands
        if known:
            self._checkpoints.told(worker, message)
        return known

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
                    hand.actor.save.remote(order)

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

    def _listen(self, hand: _Hand, path: str) -> None:
        """Ray tells of every death; of one on this host the controller hears sooner by itself."""
        if path and hand.node == ray.get_runtime_context().get_node_id():
            lifeline.watch(path, partial(self._lose, hand, "died"))

    def _ended(self, hand: _Hand) -> None:
        """A worker's run has ended, in one way or another."""
        try:
            outcome: Outcome = ray.get(hand.run)
        except ray.exceptions.RayActorError:
            self._lose(hand, "died")
            return
        except ray.exceptions.RayTaskError as error:
            outcome = Outcome(kind="raised", summary=str(error.cause), traceback=str(error))
        with self._lock:
            if outcome.kind == "finished":
                self._finished += 1
                self._hands.pop(hand.worker, None)
                self._released.append(hand)
                hand.gone = time.monotonic()
                self._forget(hand)
                self._push(self._roster.finished(hand.worker, outcome.generation))
            elif outcome.kind == "left":
                self._hands.pop(hand.worker, None)
                self._released.append(hand)
                hand.gone = time.monotonic()
                self._say_farewell(hand, outcome)
                self._push(self._roster.left(hand.worker, outcome.generation))
            elif outcome.kind == "raised":
                self._raised(hand, outcome)
            elif outcome.kind == "dismissed":
                self._hands.pop(hand.worker, None)
                self._released.append(hand)
                if not self._roster.holders & set(self._hands):  # rank 0 may still be storing
                    self._error = outcome.error
            else:
                self._lose(hand, outcome.kind)

    def _raised(self, hand: _Hand, outcome: Outcome) -> None:
        self._emit(
            WorkerRaised(
                worker=hand.worker,
                rank=outcome.rank,
                step=outcome.step,
                traceback=outcome.traceback,
            )
        )
        where = f"worker {hand.worker}, rank {outcome.rank}, after step {outcome.step}"
        if outcome.error is not None:
            outcome.error.add_note(f"Raised on {where}; the other workers were stopped.")
            self._error = outcome.error
            return
        self._error = WorkerFailed(
            f"the train function raised {outcome.summary} on {where}. The other workers were "
            f"stopped and nothing was retried. Its traceback:\n\n{outcome.traceback}",
            outcome.rank,
            hand.worker,
            outcome.traceback,
        )

    def _lose(self, hand: _Hand, cause: str) -> None:
        """A worker is dead or taken for dead: tell the survivors first, then mop up."""
        with self._lock:
            if self._hands.pop(hand.worker, None) is None:
                return
            members = self._roster.newest.members
            rank = members.index(hand.worker) if hand.worker in members else -1
            generation = self._roster.newest.generation
            self._push(self._roster.lost(hand.worker))
            self._losses += 1
            self._losses_since_step += 1
            self._emit(
                WorkerLost(worker=hand.worker, rank=rank, generation=generation, cause=cause)
            )
            _kill(hand)
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
                self._error = QuorumLost(
                    "every worker was lost before the group had come about, and FailureConfig has "
                    "replace=False. No step was taken. Look at the workers' logs."
                )

    def _ask_to_leave(self, hand: _Hand, cause: str) -> None:
        hand.leaves = cause
        if hand.worker in self._roster.newest.members:
            self._push(self._roster.leave(hand.worker))
        else:  # nobody would notice
            self._roster.leave(hand.worker)
            self._hands.pop(hand.worker)
            self._say_farewell(hand, Outcome(kind="left", step=self._step))
            _kill(hand)

    def _say_farewell(self, hand: _Hand, outcome: Outcome) -> None:
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

    def _forget(self, hand: _Hand) -> None:
        self._checkpoints.lost(hand.worker)
        self._vigil.forget(hand.worker)
        self._doubts.pop(hand.worker, None)

    def _let_go(self) -> None:
        """End processes that were let go, once nobody waits for what they have sent."""
        now = time.monotonic()
        rest = []
        for hand in self._released:
            if self._roster.settled or now - hand.gone > _LINGER_S:
                _kill(hand)
            else:
                rest.append(hand)
        self._released = rest

    def _judge_losses(self) -> None:
        allowed = self._plan.failure.max_worker_losses
        if allowed is not None and self._losses > allowed:
            self._error = TooManyFailures(
                f"{self._losses} workers were lost, and FailureConfig.max_worker_losses is "
                f"{allowed}. The run was stopped after step {self._step}. fit() again goes on "
                "from the last stored State."
            )
        elif self._losses_since_step > max(8, 3 * self._plan.size):
            self._error = TooManyFailures(
                f"{self._losses_since_step} workers in a row were lost without a step in between: "
                "they do not die by chance. The run was stopped. Look at the workers' logs; a "
                "crash in native code or too little memory are the usual causes."
            )
        elif self._roster.extinct and not self._plan.failure.replace:
            self._error = QuorumLost(
                f"no worker is left that has the State; the last one was lost after step "
                f"{self._step}. fit() again goes on from the last stored State. More workers, or "
                "CheckpointConfig(every_steps=...), make this cheaper."
            )

    def _check_hangs(self) -> None:
        """Take out who is silent, who holds up all others, and who cannot be reached by them."""
        now = time.monotonic()
        members = self._roster.newest.members
        for worker in self._vigil.silent(now):
            self._lose_by_id(worker, "silent")
        for worker in self._vigil.holding_up(members, now):
            self._lose_by_id(worker, "stuck")
        limit = self._plan.failure.hang_timeout_s
        if self._doubts and now - self._doubted_since > limit:
            # The group was made anew again and again. Whoever is cut off fails every time.
            worst = max(self._doubts, key=lambda worker: (self._doubts[worker], worker))
            self._doubts.clear()
            self._lose_by_id(worst, "unreachable")

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
                self._emit(WorkerSlow(worker=worker, step=self._step, factor=round(factor, 2)))
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
        """End a run whose group was too small for too long."""
        minimum, failure = self._plan.scaling.min_workers, self._plan.failure
        wait_s = failure.wait_s if self._roster.founded else failure.start_timeout_s
        present = len(self._roster.holders)
        if present >= minimum or self._finished:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = time.monotonic()
        if time.monotonic() - self._short_since <= wait_s:
            return
        if not self._roster.founded:
            self._error = QuorumLost(
                f"no group of {minimum} workers came about within start_timeout_s={wait_s:g}. No "
                "step was taken. Look at the workers' logs, or raise it if they start slowly."
            )
        elif not self._dismissed:  # they store their State before they leave
            self._dismissed = True
            self._short_since = time.monotonic()
            reason = (
                f"{present} workers are left, num_workers has a minimum of {minimum}, and none "
                f"came within wait_s={wait_s:g}. They stored their State; fit() again goes on "
                "from it. Free resources on the cluster, or lower the minimum."
            )
            for hand in self._hands.values():
                hand.actor.dismiss.remote(reason)
        else:
            self._error = QuorumLost(
                f"{present} workers are left of at least {minimum}, and they did not reach the end "
                f"of a step within another {wait_s:g} s. The run was stopped after step "
                f"{self._step}; fit() again goes on from the last stored State."
            )

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
        self._hands[worker] = _Hand(worker, actor, slot, actor.outcome.remote())

    def _push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        for hand in self._hands.values():
            hand.actor.tell.remote(membership)
        self._emit(
            GenerationFormed(
                generation=membership.generation,
                members=membership.members,
                cause=membership.cause,
            )
        )

    def _emit(self, event: Event, serial: int | None = None) -> None:
        with self._news:
            self._journal.append(event, serial)
            self._events.emit(event)
            self._history.append(event)
            self._progress.add(event)
            self._news.notify_all()

    def _end(self) -> None:
        self._checkpoints.settle(_SETTLE_S)  # what was accepted is stored while holders live
        with self._lock:
            for hand in [*self._hands.values(), *self._released]:
                _kill(hand)
            self._hands.clear()  # their deaths are no losses
        self._checkpoints.close()
        with self._lock:
            self._slots.close()
            outcome, message = "finished", ""
            if self._error is not None:
                outcome, message = "failed", str(self._error)
            elif self._interrupted:
                outcome, message = "interrupted", self._interrupted
            self._emit(RunEnded(outcome=outcome, step=self._step, message=message))
            self._journal.close()


def _kill(hand: _Hand) -> None:
    """End a worker's process, even a stopped one, wherever it is."""
    ray.kill(hand.actor, no_restart=True)
    if not hand.pid:
        return
    if hand.node == ray.get_runtime_context().get_node_id():
        _kill_process(hand.pid)
    else:
        strategy = NodeAffinitySchedulingStrategy(hand.node, soft=False)
        task = ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=strategy)
        task.remote(hand.pid)


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
