"""A worker's State as a whole: captured, adopted from others, and stored when that is due.

Not here: the objects that it is made of (tracked_objects), how it is copied (state_copies), when it
is due (checkpoint.schedule), and who puts a checkpoint together (checkpoint.coordinator).
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastix.comm.protocol.operation import Operation
from elastix.comm.protocol.wants import Seat
from elastix.errors import StoreError
from elastix.event_records import from_record, to_record
from elastix.events import ReplicasLevelled, Reported, take_in
from elastix.sharding import InParts
from elastix.state import State
from elastix.train.checkpoint import state_digests
from elastix.train.checkpoint.assembly import CheckpointId, holder
from elastix.train.checkpoint.restore import leaving_out, newest
from elastix.train.checkpoint.saver import Occasion, Saver
from elastix.train.control.messages import HeldPart
from elastix.train.replica.beginning import ENDED, Beginning
from elastix.train.replica.exactness import computes_with, look_at_origin
from elastix.train.replica.inheritance import Inheritance
from elastix.train.replica.levelling import Levelling
from elastix.train.replica.model_source import TrainedModel
from elastix.train.replica.parts import WorkerParts
from elastix.train.replica.replicated_events import Untold
from elastix.train.replica.rounds import Finish
from elastix.train.replica.step_checks import DONOR
from elastix.train.replica.step_commits import StepCommits

logger = logging.getLogger(__name__)
DONE_AGAIN = (
    "the run goes on from a State, and the train function has changed %s between ctx.prepare and "
    "its first batch. That had been done when the State was captured, so it is done twice now. If "
    "it is not meant for a run that goes on, do it before ctx.prepare, or only if a tracked object "
    "says that it was not done yet. With exact=True it would have been undone."
)
AT_BOUNDARY = "at_boundary"
"""In the metadata of a State: it was captured at a boundary, not before the first one."""
UNTOLD = "untold"
"""In that of one that a worker gives another: events that the journal may not have."""
ASKED = "asked"
"""In that of one for who comes later: the loader that was asked for a batch at that boundary."""
PUT_BACK = (
    "the run goes on from a State, and the train function has changed %s between ctx.prepare and "
    "its first batch. That had been done when the State was captured, so it was undone. To change "
    "something on purpose as a run goes on, do it within the loop over batches."
)


def _event(untold: Sequence[Any]) -> Untold:
    """As `for_joiners` has written it."""
    number, operation, record = untold
    return number, operation, from_record(record)


@dataclass(frozen=True)
class KeptState:
    """What a process has of the State of a worker that it was of.

    Attributes:
        told: what the controller is told of it.
        state: of this process's place.
    """

    told: HeldPart
    state: State


class WorkerState:
    """One worker's. All methods are called in the training thread.

    Args:
        parts: of the worker.
        steps: its steps, of which the State says how many count.
        saver: has States stored.
        inheritance: where a State may come from and go to, beside the run's own.

    Attributes:
        reports: how many were made.
        begun: the step after which this worker took an ancestor's place; None if it did not.
        given: a State to begin from instead of the one that the run has stored; None for none.
        on_the_way: this worker has come to a group that runs, and not yet to where that is in the
            train function, which is where a loader is asked for a batch.
        asked: the loader that was asked for a batch last; None for none.
    """

    def __init__(
        self, parts: WorkerParts, steps: StepCommits, saver: Saver, inheritance: Inheritance
    ) -> None:
        self.reports = 0
        self._due: int | None = None  # the step that was the last at the report to pause after
        self.begun: int | None = None
        self.given: State | None = None
        self.on_the_way = False
        self.asked: int | None = None
        self._group_asks: int | None = None  # where the State came from that this worker was given
        self._at_boundary = False  # or past one: this worker has come to its first
        self._beginning: Beginning | None = None  # until the first boundary
        self._ended = False  # the train function is through, and nothing has begun since
        self._metrics: dict[str, Any] = {}  # that were reported last
        self._heard_all = True  # of these reports
        self._passes_before = 0.0  # over the data, of the ancestor whose place this run has taken
        self._parts = parts
        self._settings = parts.settings
        self._driver = parts.driver
        self._tracked = parts.tracked
        self._schedule = parts.schedule
        self._copies = parts.copies
        self._steps = steps
        self._saver = saver
        self._inheritance = inheritance

    @property
    def epochs(self) -> float:
        """Passes over the data of the first loader so far; without a loader, reports."""
        if not self._tracked.loaders:
            return float(self.reports)
        return self._tracked.passes - self._passes_before

    @property
    def overdue(self) -> bool:
        """Whether steps were taken since the report after which it was to pause."""
        return self._due is not None and self._steps.step > self._due

    def report(self, metrics: Mapping[str, Any]) -> Reported:
        """Metrics were reported: the event that says so."""
        event = Reported(seq=self.reports, step=self._steps.step, metrics=dict(metrics))
        self._schedule.reported(event.step, metrics)
        self.reports += 1
        if self.reports == self._settings.until_reports:
            self._due = self._steps.step
        take_in(self._metrics, event.metrics)
        return event

    # ------------------------------------------------------------------ captured and adopted

    def capture(self) -> State:
        """The State as it is now: views of live tensors."""
        self._driver.check_within(wait=True)
        return self._tracked.capture(self._counts)

    def for_joiners(self, *, founding: bool = False) -> State:
        """The same for newcomers, who go on from just here."""
        state = self._tracked.for_joiners(self.capture())
        untold = [(*at, to_record(event)) for *at, event in self._parts.replicated.hand_on()]
        more = {UNTOLD: json.loads(json.dumps(untold))}
        if not founding:
            more[DONOR] = self._steps.checks.vouches_for(self._parts.me)
            more[ASKED] = self.asked
        return replace(state, meta={**state.meta, **more})

    def hold(self, asked: int | None) -> Callable[[], KeptState | None]:
        """What gives the State as it is now for as long as nothing of it is changed in place.

        Args:
            asked: the loader that is asked for a batch; None for none.
        """
        self._driver.check_within(wait=True)
        replicated = self._parts.replicated
        held, following = self._tracked.hold(self._counts), replicated.sequence
        places = tuple((one.epoch, one.cursor.position) for one in self._tracked.loaders)
        told = HeldPart(
            self._steps.step,
            following,
            places,
            asked=-1 if asked is None else asked,
            generation=self._steps.generation,
        )

        def kept() -> KeptState | None:
            state = held()
            if state is None:
                return None
            return KeptState(replace(told, untold=replicated.untold(following)), state)

        return kept

    @property
    def _counts(self) -> dict[str, Any]:
        exact = {"exact": self._computes_with} if self._settings.exact else {}
        return {
            **self._steps.state_dict(),
            state_digests.SEQUENCE: self._parts.replicated.sequence,
            "reports": self.reports,
            "passes_before": self._passes_before,
            "stored_step": self._schedule.stored_step,
            **({ENDED: True} if self._ended else {}),
            **({AT_BOUNDARY: True} if self._at_boundary else {}),
            **({"own": list(self._tracked.own)} if self._tracked.own else {}),
            **exact,
        }

    @property
    def _computes_with(self) -> str:
        return computes_with(self._parts.device, self._settings.crew)

    def adopt(self, state: State) -> None:
        """Become equal to whoever has captured `state`."""
        state = self._tracked.take_passing(state)
        looked_at = not (self._settings.alone or self._driver.watching)
        self._ended = bool(state.meta.get(ENDED))  # whoever is given it from here is told so
        draws = any(name.startswith("@loader/") for name in state.meta)
        self.on_the_way = not self._at_boundary and draws and AT_BOUNDARY in state.meta
        # Who is given it at a boundary goes on from just there.
        # At its first boundary a group may wait for others, before any step.
        past = AT_BOUNDARY in state.meta or state.meta["step"] > 0
        again = looked_at and past and not (self._ended or self._at_boundary)
        in_parts = isinstance(state.tensors, InParts)  # of which this process reads its own alone
        self._beginning = Beginning(state, self._tracked) if again and not in_parts else None
        self._tracked.adopt(state)
        if again and in_parts:
            own = self._tracked.capture({"step": state.meta["step"]}).clone()
            self._beginning = Beginning(own, self._tracked)
        self._steps.load_state_dict(state.meta)
        self._group_asks = state.meta.get(ASKED)
        self._schedule.stored(state.meta["stored_step"])
        sequence, untold = state.meta[state_digests.SEQUENCE], state.meta.get(UNTOLD)
        if untold is None:  # what was told before that is not forgotten
            self._parts.replicated.sequence = sequence
        else:
            self._parts.replicated.go_on(sequence, map(_event, untold))
        self._heard_all &= state.meta["reports"] <= self.reports
        self.reports = state.meta["reports"]
        self._passes_before = state.meta.get("passes_before", 0.0)

    def passes_by(self, loader: int | None) -> bool:
        """Whether a loader that is asked for a batch has none, and the group is past it.

        Its last epoch is over, and another loader's turn has come (another phase of training).
        """
        if not self.on_the_way or loader is None or self._group_asks in (None, loader):
            return False
        return not any(one.steps_left for one in self._tracked.loaders if one.number == loader)

    def look_at_beginning(self) -> None:
        """At the first boundary: whether the way to it has changed the State that this began from.

        Of an exact run that is undone: in the undisturbed run it was done once.
        """
        self._tracked.set_out()
        beginning, self._beginning, self._ended = self._beginning, None, False
        self._at_boundary, self.on_the_way = True, False
        if beginning is None or self._driver.watching or beginning.step != self._steps.step:
            return
        first = self._driver.rank == 0 and self._parts.place == 0
        if not (self._settings.exact or first):
            return  # one says it for all
        changed = beginning.changed()
        if not changed:
            return
        if self._settings.exact:
            beginning.put_back()
            self._steps.rebase()
        if first:
            logger.warning(PUT_BACK if self._settings.exact else DONE_AGAIN, ", ".join(changed))

    def begin(self) -> None:
        """Go on from what this is given or the run has stored, or from where an ancestor stands."""
        given, self.given = self.given, None
        if given is not None:
            self.adopt(given)
            self.on_the_way = False  # all who found the group come to that boundary together
            self._steps.window.forget()
            return
        state = self._newest()
        if state is None:
            self._take_place()
            return
        self.adopt(state)
        self.on_the_way = False
        if "metrics" in state.meta:  # of a trial that was paused
            self._metrics, self._heard_all = dict(state.meta["metrics"]), True
        if self._settings.exact:
            look_at_origin(state.meta.get("exact"), self._computes_with)
        self._steps.window.forget()  # its workers were those of another run of the group
        self._schedule.stored(self._steps.step)

    def _take_place(self) -> None:
        """Begin where an ancestor stands, if this run is to."""
        found = self._inheritance.place()
        if found is None:
            return
        state, inherited, whole = found
        state = leaving_out(state, self._settings.left_out)
        self._tracked.take_place(state, inherited, whole=whole)
        self._steps.load_state_dict(state.meta)
        self._steps.window.forget()
        self._schedule.stored(self._steps.step)
        self.begun = self._steps.step
        self._passes_before = self._tracked.passes

    def _newest(self) -> State | None:
        """What the run goes on from: its last State, or the one that was left at a pause."""
        found = [self._inheritance.resume()]
        if not self._settings.alone:
            with self._parts.link.open_store() as store:
                ref = newest(store, self._settings.run)
                if ref is not None:
                    # Of a tensor of which this process has a part it reads no more than that.
                    found.append(store.get(ref, lazy=self._tracked.sharded))
        left_out = self._settings.left_out
        there = [leaving_out(state, left_out) for state in found if state is not None]
        return max(there, key=lambda state: int(state.meta["step"]), default=None)

    def together(self, work: Operation) -> torch.Tensor:
        """What a round comes to that the train function asks for; of who is on its way, alone.

        The others have left that one, and are in others.
        """
        if self.on_the_way:
            return work.payload(Seat(0, (self._parts.me,), 0))  # type: ignore[arg-type]
        return self._driver.run(work).result

    def level(self) -> None:
        """All go on from the State of one, as their processors differ. Collective."""
        parts, step = self._parts, self._steps.step
        parts.phase("level", step)
        self._copies.finish()
        take, kinds = self._tracked.take_tensors, self._driver.processors_of
        work = Levelling(parts.me, self.capture(), take, kinds, self._driver.device)
        source = int(self._driver.run(work).result[0])
        self._steps.levelled()
        parts.replicated.emit(ReplicasLevelled(step=step, worker=source))

    def digest(self) -> str:
        """Of what replicas must have in common: models, optimizers, schedulers, scalers."""
        return state_digests.digest(self.capture())

    def copy_for_joiners(self) -> Callable[[], State]:
        """A copy of the State as it is, made while the next step is computed."""
        self._parts.phase("give", self._steps.step)
        return self._copies.give(self.for_joiners(), self._steps.step)

    # ------------------------------------------------------------------ stored

    def boundary(self, *, compare: bool) -> None:
        """Store the State if that is due, or have it compared with the others' if that is wanted.

        One that is due may be left to a shadow. A worker that is alone has nobody who would put a
        checkpoint together.
        """
        step = self._steps.step
        reason = "" if self._settings.alone else self._schedule.due(step)
        if reason and self._leaves_to_shadow(reason):
            self._copies.leave(self._mark())
            self._schedule.stored(step)
        elif reason:
            mark = self.save(reason)
            if self._settings.checkpoint.wait:
                self._await_due(mark)
        elif compare:
            self._snapshot("join", self._mark(-1), stored=False)

    def store_here(self) -> None:
        """Store the State at this boundary, if one of this step was not stored before."""
        step = self._steps.step
        if self._schedule.lacks(step):
            self.save("notice")
        self._schedule.stored(step)

    def boundary_outside(self) -> None:
        """Those in the group store the State, if it is time to, or leave that to a shadow.

        A shadow that cannot tell whether its own is the same asks.
        """
        step = self._steps.step
        reason = self._schedule.due(step)
        if not reason:
            return
        if self._schedule.shadowed and self._steps.able:
            self._snapshot(reason, self._mark())
        elif self._driver.shadow:
            self._driver.ask_digest()
        self._schedule.stored(step)

    def _leaves_to_shadow(self, reason: str) -> bool:
        """Whether the group need not copy the State that is due.

        A score is known to those alone who have reported it.
        """
        waits = self._settings.checkpoint.wait
        scored = self._schedule.score(self._steps.step) is not None
        return self._schedule.shadowed and not waits and not scored and reason != "best"

    def _await_due(self, mark: CheckpointId) -> None:
        try:
            self.await_stored(mark)
        except StoreError as error:  # it stands in the journal; the final State must do better
            logger.warning("checkpoint not stored step=%d error=%s", self._steps.step, error)

    def save(self, reason: str) -> CheckpointId:
        """Have the State stored in the background, when it was compared with the other workers'.

        Returns:
            When a snapshot is under way: its mark, for `await_stored`.
        """
        self._steps.check(thoroughly=True)
        self._steps.random.boundary()
        step = self._steps.step
        score = self._schedule.score(step)
        mark = self._mark(2 if reason == "final" else int(score is not None))
        self._snapshot(reason, mark, score)
        self._schedule.stored(step, reason)
        return mark

    def _mark(self, order: int = 0) -> CheckpointId:
        """Of the State as it is: the same on all workers that are here."""
        epochs = sum(loader.epoch for loader in self._tracked.loaders)
        return CheckpointId(self._steps.step, self._steps.voids + epochs, order)

    def _snapshot(
        self, reason: str, mark: CheckpointId, score: float | None = None, *, stored: bool = True
    ) -> None:
        members = (self._parts.me,) if self._driver.shadow else self._driver.present
        places = self._settings.processes
        occasion = Occasion(
            mark=mark,
            reason=reason,
            members=tuple(holder(w, place, places) for w in members for place in range(places)),
            score=score,
            stored=stored,
            place=self._parts.place,
            places=places,
            processor=self._steps.processor,
            by_one=bool(self._tracked.own),
        )
        self._copies.save(self.capture(), occasion)
        self._schedule.compared()
        self._parts.phase("snapshot", self._steps.step)

    def await_stored(self, mark: CheckpointId) -> None:
        """Block until the State of that mark is stored, or compared if it is not to be stored.

        Raises:
            StoreError: it could not be stored.
            ReplicasDiffer: the workers hold different States.
        """
        release = self._saver.wait(mark)
        if release.error is not None:
            raise release.error

    # ------------------------------------------------------------------ the end

    def finish(self, reason: str) -> None:
        """All come to the end, and the final State is stored.

        Before that all who are left have compared their States. Collective; then waits for the
        store, which needs no group. A model source that takes the State has it alone; a run that is
        alone in its process and has none keeps nothing.

        Raises:
            StoreError: it could not be stored.
            ReplicasDiffer: the workers hold different States.
        """
        self._ended = reason == "final"
        if self._inheritance.takes_final:
            if len(self._driver.present) > 1:
                mark = self._mark(2)
                self._snapshot(reason, mark, stored=False)
                self._driver.run(Finish())  # nobody waits for the verdict while others need him
                self.await_stored(mark)
            self._driver.run(Finish(lambda: self._bequeath(reason)))
        elif self._settings.alone:
            self._driver.run(Finish())
        else:
            mark = self.save(reason)
            self._driver.run(Finish())
            self.await_stored(mark)

    def _bequeath(self, reason: str) -> None:
        """Leave the State to other models. Blocks this worker, and those that wait for it."""
        state, metrics = self.capture(), self._metrics
        left = TrainedModel(
            self._tracked.model, state, metrics, self.epochs, reason, self._heard_all
        )
        stored = self._inheritance.leave(left, self._steps.step)
        if stored is not None:
            self._parts.link.emit(stored)
