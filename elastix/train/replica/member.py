"""One worker's side of a run: ties the group, the data and the State together. No Ray.

It is the Participant of GroupDriver, the Pace of the Loaders, and what a Context speaks to. What it
needs from the process around it is a Link.

Not here: what becomes of a step (step_commits) and of the State as a whole (worker_state), this
worker's processes (worker_processes), steps that it takes by itself (outer_steps), what the train
function asks of the group (group_calls), and what is said of the group (group_news).
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.exact_reducer import ExactReducer
from elastix.comm.gradients.outer_reducer import OuterReducer
from elastix.comm.gradients.reducer import Reducer
from elastix.comm.network.catch_up_stream import CatchUpSender
from elastix.comm.network.crew_world import DeviceMesh
from elastix.comm.network.model_layout import layout_of
from elastix.comm.network.process_group import Wiring
from elastix.comm.protocol.participant import Fenced, Released
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.data.backward_window import Ratio
from elastix.data.cursor import Cursor, subtract
from elastix.data.drawn_batch import SlicedDraw
from elastix.data.loader import Loader
from elastix.data.random_numbers import seed_generators
from elastix.data.rehearsal import Rehearsal
from elastix.data.source import Source
from elastix.errors import ConfigError
from elastix.events import EpochsPlanned
from elastix.state import State, Stateful
from elastix.train.checkpoint import state_digests
from elastix.train.checkpoint.saver import Saver
from elastix.train.checkpoint.schedule import Schedule
from elastix.train.control.messages import CaughtUp, Ready
from elastix.train.replica import refusals, unprepared_schedulers, used_models
from elastix.train.replica.crew_mates import Mates
from elastix.train.replica.exactness import (
    check_loader,
    check_rate_scaling,
    computes_with,
    kind_number,
)
from elastix.train.replica.group_calls import GroupCalls
from elastix.train.replica.group_news import GroupNews
from elastix.train.replica.inheritance import Inheritance
from elastix.train.replica.learning_rate import RateScaling
from elastix.train.replica.link import Link, Settings
from elastix.train.replica.outer_steps import OuterSteps
from elastix.train.replica.parts import WorkerParts
from elastix.train.replica.replicated_events import ReplicatedEvents
from elastix.train.replica.rounds import share_loss
from elastix.train.replica.sliced_step import Step
from elastix.train.replica.state_copies import StateCopies
from elastix.train.replica.step_commits import StepCommits
from elastix.train.replica.tracked_objects import TrackedObjects
from elastix.train.replica.unprepared_schedulers import UnpreparedSchedulers
from elastix.train.replica.worker_processes import WorkerProcesses
from elastix.train.replica.worker_state import KeptState, WorkerState

logger = logging.getLogger(__name__)

_SETTLE_S = 30.0
"""How long a run that ends with an error waits for what is being stored."""


class Paused(BaseException):
    """As many reports were made as were wanted. Not an Exception: user code must not catch it."""


def _nothing() -> None:
    """Of the State."""


class Member:
    """See the module. All methods are called in the training thread, unless they say otherwise.

    Attributes:
        processes: of this worker.
        saver: stores States.
        evaluate, clip, mean: see GroupCalls.
    """

    def __init__(
        self,
        wiring: Wiring,
        settings: Settings,
        inbox: ThreadSafeInbox,
        link: Link,
    ) -> None:
        self.me, self.place = wiring.me, wiring.place
        self.device = wiring.device
        self.settings = settings
        self._interface = wiring.interface
        self._secret = wiring.secret
        self._link = link
        self._inbox = inbox
        redo = Reducer.kind if settings.rollback else 0
        crew = settings.processes
        self._driver = GroupDriver(self, inbox, wiring, settings.min_workers, redo, crew)
        self.processes = WorkerProcesses(self.me, settings, self._driver, inbox)
        self._reducer: Reducer | None = None
        self._before_inheriting: used_models.Looks = ()
        self._used = used_models.Used()
        self._tracked = TrackedObjects()
        self._inheritance = Inheritance(settings.model_source)
        self._catch_up: CatchUpSender | None = None
        self._schedule = Schedule(settings.checkpoint, inbox)
        self.saver = Saver(link.send, link.open_store)
        self._copies = StateCopies(self._tracked, self.saver)
        self._replicated = ReplicatedEvents(
            link.emit,
            self._first,
            operation=lambda: self._driver.operation,
            held=lambda: self._catch_up.held if self._catch_up is not None else math.inf,
        )
        parts = WorkerParts(
            me=self.me,
            place=self.place,
            device=self.device,
            settings=settings,
            link=link,
            driver=self._driver,
            tracked=self._tracked,
            replicated=self._replicated,
            schedule=self._schedule,
            copies=self._copies,
            phase=self.phase,
        )
        self._steps = StepCommits(parts)
        self._state = WorkerState(parts, self._steps, self.saver, self._inheritance)
        every = settings.exchange.every_steps
        self._outer = OuterSteps(parts, self._steps, every) if every is not None else None
        self._driver.tell(GroupNews(parts, self._steps, self._lonely))
        own = self._steps, self._state, self.processes
        self._calls = calls = GroupCalls(parts, *own, self._step_together)
        self.evaluate, self.clip, self.mean = calls.evaluate, calls.clip, calls.mean
        inbox.on_urgent(self._heard_urgent)
        self._kept: Callable[[], KeptState | None] = _nothing
        self._computes_with = ""
        self._schedulers = UnpreparedSchedulers()
        self._listeners: list[Callable[[str, int], None]] = []

    # ------------------------------------------------------------------ this worker's processes

    def disband(self) -> KeptState | None:
        """This worker is no more, and its processes are free to be others.

        Returns:
            What this one has of the State at the last boundary, if that was not changed since.
        """
        if self._mates is not None:
            self._mates.come_out()
        kept, self._kept = self._kept(), _nothing
        self._driver.leave()
        if self._reducer is not None:
            self._reducer.close()
        if self._mates is not None:
            self._mates.close()
        return kept

    def found_from(self, kept: KeptState) -> None:
        """This process founds the group anew, with others that have the rest of the State."""
        on_cpu = self.device.type == "cpu"
        self._state.given = kept.state if on_cpu else kept.state.clone()  # a device has no room

    @property
    def mesh(self) -> DeviceMesh | None:
        """Of this worker's processes; None if it is one."""
        return self.processes.mesh

    @property
    def _mates(self) -> Mates | None:
        return self.processes.mates

    def _heard_urgent(self) -> None:
        """The group has changed. In the thread that heard it."""
        self._driver.unblock()
        self._replicated.send_again()
        self.processes.cut_if_broken()

    # ------------------------------------------------------------------ the group as it is

    @property
    def prepared(self) -> bool:
        """Whether `prepare` was called."""
        return self._reducer is not None

    @property
    def came_to_none(self) -> bool:
        """Whether a loop over an epoch began where that had no batch left."""
        return any(loader.came_to_none for loader in self._tracked.loaders)

    @property
    def step(self) -> int:
        """How many steps count."""
        return self._steps.step

    @property
    def rank(self) -> int:
        """Place in the group; -1 before `prepare`, and for a joiner that is catching up."""
        return self._driver.rank

    @property
    def world_size(self) -> int:
        """Members of the group; 0 before `prepare`."""
        return len(self._driver.present)

    @property
    def generation(self) -> int:
        """Of the group; 0 before `prepare`."""
        return self._driver.generation

    @property
    def waiting(self) -> bool:
        """Whether the training thread is blocked until others move. Any thread may ask."""
        return self._driver.waiting or self.saver.waiting

    @property
    def waited_s(self) -> float:
        """How long it has been so, altogether. Any thread may ask."""
        return self._driver.waited_s + self.saver.waited_s

    @property
    def call(self) -> tuple[int, int]:
        """Number and kind of the operation in hand. Any thread may ask."""
        return self._driver.call

    @property
    def watching(self) -> bool:
        """Whether this is a joiner that catches up, and takes no part in the group yet."""
        return self._driver.watching

    @property
    def holder(self) -> bool:
        """Whether this worker is in the group with the State. Any thread may ask."""
        return self._driver.holder

    @property
    def shadow(self) -> bool:
        """Whether it has the State as a shadow, outside of the group. Any thread may ask."""
        return self._driver.shadow

    def adopted(self, address: tuple[str, int]) -> int:
        """There is a new controller, which meets the group there. Any thread may call it.

        Returns:
            The newest generation that this worker has heard of.
        """
        self._driver.meet_at(address)
        self.saver.offer_again()
        return max(self._inbox.members, default=0)

    def _first(self) -> bool:
        """Whether this worker tells what all know: in its group, or in one that is to be entered.

        It may be told of the death of the first while it is blocked outside of any operation.
        """
        urgent = self._inbox.urgent.members
        called = self.holder and urgent[:1] == (self.me,)
        first = called or self.rank == 0 or self.settings.alone
        return first and not self._driver.lost_track

    def failed(self) -> None:
        """The train function raised: what was accepted before is told and stored nevertheless."""
        self._replicated.send_unconfirmed()
        self.saver.settle(_SETTLE_S)

    # ------------------------------------------------------------------ prepare and track

    def seed(self) -> None:
        """Equal random numbers on all workers, so that they build equal models."""
        seed_generators(self.settings.seed)

    def prepare(self, objects: Sequence[Any]) -> None:
        """Take in model, optimizer and the rest, and enter the group. Collective; blocks."""
        if self._reducer is not None:
            raise refusals.prepared_twice()
        if self.settings.alone:
            self._used.check(objects)
        live = self._tracked
        live.before_step = self._before_optimizer
        live.after_step = self._steps.rewind.after_optimizer
        live.before_held_step = self._steps.rewind.before_held_optimizer
        live.before_unprepared_step = self._steps.look_if_prepared
        had_gradients = live.prepare(objects, self.device)
        event = self._inheritance.prepared(live)
        if event is not None:
            self._replicated.emit(event)
        for optimizer in live.optimizers if self._outer is None else ():
            share_loss(optimizer, self._calls.mean_loss)
        self._reducer = self._make_reducer()
        self._steps.prepared(self._reducer)
        self._computes_with = computes_with(self.device)
        layout = layout_of(live.modules, self._computes_with if self.settings.exact else "")
        if self._mates is not None:
            self._mates.settle(live.modules, live.others)
            live.staged, live.whole = self._mates.stages > 1, self._mates.whole
            self._steps.slices.mates, self._steps.random.part = self._mates, self._mates.stream[0]
            self._driver.assemble()
        elif not self.settings.alone:
            heed = self._replicated.send_held
            self._catch_up = CatchUpSender(self._interface, layout, self._secret, heed)
            self._driver.catch_joiners_up(self._catch_up)
        self._say_ready()
        if self._mates is not None:
            self._link.send(CaughtUp())  # a crew follows nobody: it is given the State in the group
        several = not (self.settings.alone or self.settings.crew)
        processor = kind_number(self._computes_with) if several else 0
        self._steps.processor = processor
        self._driver.first_entry(layout, processor)
        self._steps.random.prepared()
        if had_gradients and self.rank == 0:
            logger.warning(refusals.GRADIENTS_DROPPED)
        if several and self.rank == 0 and live.has(torch.nn.SyncBatchNorm):
            logger.warning(refusals.UNSYNCED_NORM)
        if self.settings.alone:
            before, self._before_inheriting = self._before_inheriting, ()
            self._used.begin(objects, before)

    def _make_reducer(self) -> Reducer:
        settings, exchange = self.settings, self.settings.exchange
        to_reduce = (list(self._tracked.modules.values()), self._driver, self._steps)
        wire = getattr(torch, exchange.wire) if exchange.wire else None
        piped = self._mates is not None and self._mates.piped
        if self._outer is not None:
            lr, momentum = exchange.outer_lr, exchange.outer_momentum
            held = self._tracked.held
            outer = OuterReducer(
                *to_reduce, lr=lr, momentum=momentum, held=held, wire=wire, piped=piped
            )
            self._tracked.keep_outer(outer.optimizer)
            self._outer.reducer = outer
            return outer
        reducer = ExactReducer if settings.exact else Reducer
        void, measured = settings.may_void, settings.guard is not None
        return reducer(*to_reduce, may_void=void, measured=measured, wire=wire, piped=piped)

    def _say_ready(self) -> None:
        address = self._catch_up.address if self._catch_up is not None else None
        self._link.send(Ready(address, self._computes_with, self.call[0]))

    def _lonely(self) -> None:
        if self._catch_up is not None:
            self._say_ready()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._calls.refuse("optimizer.step()")
        if self._tracked.staged and any(loader.pending for loader in self._tracked.loaders):
            raise refusals.step_not_taken_together("optimizer.step()")
        self._kept = _nothing  # whether or not torch counts what this one changes
        if not closure:  # which runs a pass of its own
            self._steps.rewind.before_optimizer()
        if self._outer is None:
            self._steps.look_if_averaged(optimizer)
        else:
            self._outer.before_optimizer(optimizer)
        unmarked = self.settings.exact or not self.settings.alone  # a lone trial has no time for it
        others = self._tracked.others.values()
        forgotten = self._schedulers.look(optimizer, others, unmarked=unmarked)
        if forgotten is not None and self.settings.exact:
            raise unprepared_schedulers.refused(forgotten)
        if forgotten is not None and self.rank == 0:
            logger.warning(unprepared_schedulers.UNPREPARED, forgotten)

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """Make further objects part of the State, by name."""
        if self.settings.alone:
            self._used.check(objects.values())
        self._inheritance.tracked(self._tracked, self._tracked.track(objects))
        if self.settings.alone:
            self._used.begin(objects.values())

    def inherit(
        self, model: torch.nn.Module, rehearsal: Rehearsal | None
    ) -> Mapping[str, Any] | None:
        """Copy tensors of an ancestor into `model`; what was copied, None for nothing."""
        if self._reducer is not None:
            raise refusals.inherits_late()
        before = used_models.look(model) if self.settings.alone else ()
        inherited = self._inheritance.inherit(model, rehearsal)
        if inherited is None:
            return None
        self._before_inheriting = before
        self._replicated.emit(inherited)
        return inherited.found

    # ------------------------------------------------------------------ State

    def capture(self) -> State:
        """The State as it is now: views of live tensors."""
        return self._state.capture()

    def give_state(self, founding: bool) -> State:
        """For newcomers. The first founder restores the stored State, if the run has one."""
        if founding:
            self._state.begin()
            if self._stream[0]:  # the first place goes on as a worker of one process does
                self._draw_own_numbers()
        return self._state.for_joiners(founding=founding)

    def adopt_state(self, state: State) -> None:
        """Become equal to a peer; if it need not be exact, but for the random numbers to come."""
        self._state.adopt(state)
        if self._outer is not None:
            self._outer.over()
        self._draw_own_numbers()

    @property
    def _stream(self) -> tuple[int, int]:
        return self._mates.stream if self._mates is not None else (0, 1)

    def _draw_own_numbers(self) -> None:
        """From now on, unlike other workers and places, if the run need not be exact."""
        if not self.settings.exact:
            index, streams = self._stream
            state_digests.diverge(self.me * streams + index)

    def digest(self) -> str:
        """Of what replicas must have in common: models, optimizers, schedulers, scalers."""
        return self._state.digest()

    def store_last(self, reason: str) -> None:
        """Store the State beyond any schedule, and block until it is."""
        self._state.await_stored(self._state.save(reason))

    # ------------------------------------------------------------------ Participant of GroupDriver

    def store_state(self) -> None:
        """All workers are to go, and wait for others meanwhile: with them, store the State."""
        self._state.store_here()

    def phase(self, name: str, detail: int) -> None:
        """Where the training thread is."""
        self._link.phase(name, detail)
        for listener in self._listeners:
            listener(name, detail)

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """Call `listener` at each phase from now on."""
        self._listeners.append(listener)

    def on_reduced(self, listener: Callable[[int], None]) -> None:
        """Call `listener`, from any thread, with the number of a bucket that is reduced."""
        self._driver.on_reduced = listener

    # ------------------------------------------------------------------ Pace of the Loaders

    def boundary(self, loader: int | None = None) -> None:
        """Between two steps: joiners enter, checkpoints are taken. Nothing within one.

        Args:
            loader: which is asked for a batch; None if the train function uses none.

        Raises:
            TrainError: what has ended the run; user code may have caught it once.
            ConfigError: workers take steps by themselves, and no loader counts them.
        """
        self._steps.look_if_ended()
        self._steps.look_at_thread()
        self._steps.metrics.refuse("ctx.boundary, or a loader for its next batch,")
        self._steps.check()
        self._steps.slices.put_back()
        if self._outer is not None:
            self._outer.asked(loader)
        if any(loader.pending for loader in self._tracked.loaders):
            return  # a further micro-batch of a step, or a second loader
        if self._state.passes_by(loader):
            return
        self._state.asked = loader
        self.phase("boundary", self.step)
        self._link.await_controller()
        self._state.look_at_beginning()
        self._steps.put_back()
        if self._steps.level_due:
            self._state.level()
        if self._mates is not None:
            self._kept = self._state.hold(loader)  # here others may be waited for, and be lost
        self._driver.boundary()
        self._look_if_overtaken()
        self._steps.set_out()
        compare = self._schedule.compares_now()
        if not (self._driver.watching or self.settings.alone):
            self._schedule.grouped(self.step, self._driver.present)
        until = self.settings.until_reports
        if until is not None and self._state.reports >= until:
            raise Paused
        if self._driver.watching:
            self._state.boundary_outside()
            return
        if self._catch_up is not None:
            self._catch_up.boundary(
                self._state.copy_for_joiners, self._driver.operation, state_digests.digest
            )
        self._state.boundary(compare=compare)

    def _step_together(self) -> None:
        """Take the outer step, if there were inner ones. Collective."""
        if self._outer is not None:
            self._outer.step()

    def _look_if_overtaken(self) -> None:
        """A joiner that waited in its loop may find that the group is through with it.

        It would draw more batches there than anybody has, so its process is replaced. So it is in
        another epoch if that matters: in a run that has to be exact it may not have in hand what it
        drew for this one, and in any run it may have frozen for it what the others train.
        """
        loaders = self._tracked.loaders
        minds = any(one.overtaken for one in loaders) and (
            self.settings.exact or self._steps.froze_otherwise
        )
        if not (minds or any(one.outrun for one in loaders)):
            for one in loaders:  # what is frozen later on has nothing to do with the way in
                one.overtaken = False
            return
        if self._driver.watching:
            raise Released(0)
        raise Fenced(f"worker {self.me} was given the State of another epoch than its loop is in")

    def members(self) -> tuple[int, ...]:
        """The workers over which the next batch is split."""
        return self._driver.planned

    def binding(self, loader: int) -> Ratio | None:
        """The ratio that the next batch must be split in."""
        return self._steps.window.binding(loader, self.members())

    def drawn(self, loader: int, size: int, ratio: Ratio) -> None:
        """A batch begins."""
        within = self._tracked.loaders[loader].within
        if self._outer is not None:
            self._outer.drawn(loader, size, ratio)
            if self._mates is not None:
                self._mates.within = within
            self.phase("batch", self.step)
            return
        first = self._steps.window.fresh
        self._steps.window.drawn(loader, size, ratio)
        if self._mates is not None:
            # The pass is about both batches, or FSDP2 adds up gradients before they are weighed.
            otherwise = within != self._mates.within and (not first or self._mates.waits)
            # Those of one schedule are apart from those of another: see Accumulation.
            if otherwise or (self._steps.window.now and not self._mates.piped):
                raise refusals.ratios_in_crew()
            self._mates.within = within
        if first and self._reducer is not None:
            self._reducer.turn(self._steps.window.now, self.me in ratio)
        self.phase("batch", self.step)

    def begin_step(self, loader: Loader, draw: SlicedDraw, at: Cursor) -> Step:
        """A batch begins that is cut into slices."""
        self._steps.slices.refuse_others(loader, self._tracked.loaders)
        if self._reducer is None:
            raise ConfigError(
                "a loader was iterated before ctx.prepare. Nothing was read. Prepare the model "
                "first: that is where this worker joins the group."
            )
        self.phase("batch", self.step)
        self._steps.look_at_turn(loader.number)
        return self._steps.slices.open(loader, draw, at, self._reducer)

    def exhausted(self, loader: int) -> bool:
        """At the end of an epoch other weights are tried, say."""
        over = self._tracked.loaders[loader]
        together = self._outer is not None and self._outer.exhausted(over)
        self._copies.finish()
        return together

    def left(self) -> None:
        """What a void step has changed is put back before the code after the loop runs."""
        self._steps.left()

    def planned(self, loader: int, epochs: int) -> None:
        """So many epochs are meant to be made. For progress bars; may get lost with rank 0."""
        if self.rank == 0:
            self._link.emit(EpochsPlanned(loader=loader, epochs=epochs))

    # ------------------------------------------------------------------ what Context offers

    def open_loader(self, source: Source) -> Loader:
        """A loader that goes on where the State says.

        Raises:
            ConfigError: fewer samples in a batch than workers, or another dataset than before.
        """
        if self.settings.exact:
            check_loader(source)
        if self._outer is not None:
            source = self._outer.source(source)
            if self._mates is not None and self._tracked.loaders:
                raise refusals.not_in_crew("a second loader with ExchangeConfig(every_steps=...)")
        if self._mates is not None:
            source = self._mates.share_out(source)
        shared_out = source.slices is None and not source.per_worker
        if source.batch_size < self.world_size * source.unit and shared_out:
            raise refusals.small_batch(source.batch_size, self.world_size, source.unit)
        loader = Loader(len(self._tracked.loaders), source, self)
        if not self._tracked.open(loader):
            loader.leave_out(self.settings.left_out.get(loader.number, ()))
            self._replicated.emit(loader.opened())
        elif self._state.begun is not None:  # its own journal does not know of the loader yet
            before = subtract(((0, loader.cursor.position),), loader.cursor.owed)
            self._link.emit(replace(loader.opened(), before=before, begun=self._state.begun))
        return loader

    def scale_rate(self, scaling: RateScaling) -> None:
        """Learning rates follow the group's size from now on."""
        if self._steps.rate is not None:
            raise ConfigError(
                "ctx.scale_rate was called twice. The second call changed nothing. Call it once, "
                "for one optimizer."
            )
        if self.settings.exact:
            check_rate_scaling()
        self.track({"rate": scaling})
        self._steps.rate = scaling

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Defer the step."""
        if self._reducer is None:
            raise ConfigError(
                "ctx.accumulate was used before ctx.prepare. Nothing was done. Prepare the model "
                "first: that is where this worker joins the group."
            )
        self._steps.slices.refuse_accumulation()
        adding = nullcontext() if self._outer is None else self._outer.adding()
        with adding, self._reducer.accumulation.adding():
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Defer the step to its exit."""
        assert self._reducer is not None  # noqa: S101 - asked for after `prepare`
        if self._outer is not None:
            raise refusals.not_with_inner_steps("ctx.backward", "loss.backward()")
        return self._reducer.accumulation.step_at_exit()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Hand metrics to the journal."""
        self._calls.refuse("ctx.report")
        if self._state.on_the_way:
            return  # the group has made it
        self._steps.checks.reported(metrics)
        event = self._state.report(metrics)
        self.phase("report", event.seq)
        self._replicated.emit(event)
        until = self.settings.until_reports
        if until is not None and self._state.reports >= until:
            if not self.prepared:
                raise Paused  # nothing is to be stored, so no boundary need be waited for
            if self._state.overdue:
                raise refusals.passes_rungs(until)

    @property
    def epochs(self) -> float:
        """Passes over the data of the first loader so far; without a loader, reports."""
        return self._state.epochs

    def finish(self, reason: str = "final") -> None:
        """After the train function: all come to the end; see WorkerState.finish. Collective.

        Raises:
            StoreError: the final State could not be stored.
            ConfigError: it has added up gradients and never taken a step.
            ReplicasDiffer: the workers hold different States.
            TrainError: what has ended the run before.
        """
        self._steps.look_if_ended()
        self._steps.slices.refuse("the end of the train function")
        if self._driver.shadow:
            self._driver.await_succession()
        if self._driver.watching:
            return  # a joiner that never came in has no part in the end
        if self._outer is not None:
            self._outer.look_if_none()
        self._step_together()
        self._steps.look_if_left_over()
        self._steps.check(thoroughly=True)
        self._steps.random.boundary()
        self._state.finish(reason)

    def close(self) -> None:
        """After `finish`, in a process that goes on with something else."""
        self.saver.close()
        if self._reducer is not None:
            self._reducer.close()
        self._tracked.close()
        self._used.leave()
