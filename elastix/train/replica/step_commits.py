"""How a worker's steps are weighed, voted on and counted, and what follows if one does not count.

These are the Steps of the Reducer: before a step is reduced, what this worker has of it; in its
commit round, this worker's vote; after that, samples and events if it counts. A step that is void
is taken back; if workers hold or compute different things, whoever is at fault is taken out.

Not here: what is looked at for the vote (step_checks), what travels (vote), the slices of a step
(sliced_step), and what a worker does between two steps (member).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NoReturn

import torch

from elastix.comm.gradients.reducer import Reducer
from elastix.comm.gradients.steps import Weights
from elastix.comm.network.tree_reduction import Sharing
from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.operation import OperationOutcome
from elastix.data import loader_order
from elastix.data.backward_window import Window
from elastix.errors import ConfigError, TrainError
from elastix.events import SamplesLeftOut, StepCommitted, StepVoided
from elastix.sharding import let_go_of_gathered
from elastix.train.checkpoint.comparison import compare_kinds, diverged, parted_from_lost
from elastix.train.control.messages import Diverged
from elastix.train.replica import plain_loaders, refusals, unprepared_optimizers
from elastix.train.replica.draw_comparison import Drawn, alike, drawn, of_frozen, parted
from elastix.train.replica.evaluation import MetricsUnderWay
from elastix.train.replica.exactness import AnyPlaces, RandomPlaces
from elastix.train.replica.guard import Alarm
from elastix.train.replica.learning_rate import RateScaling
from elastix.train.replica.parts import WorkerParts
from elastix.train.replica.recomputation import (
    Recomputation,
    SliceFault,
    miscalculated,
    unrepeatable,
)
from elastix.train.replica.rewind import Rewind
from elastix.train.replica.rounds import Regroup, RollCall, told
from elastix.train.replica.slice_effects import SliceEffects
from elastix.train.replica.sliced_step import Slices
from elastix.train.replica.step_checks import StepChecks
from elastix.train.replica.unprepared_optimizers import UnpreparedOptimizers
from elastix.train.replica.vote import StepVerdict, Vote

logger = logging.getLogger(__name__)

_FAULTS = 3
"""So often a step is done again for a worker that is alone, and computes a slice in two ways."""
LEVEL_S = 60.0
"""So long workers with different processors, or such a shadow, go on from what each has rounded."""


class StepCommits:
    """One worker's. All methods are called in the training thread.

    Args:
        parts: of the worker.

    Attributes:
        step: how many count.
        voids: steps since the last of them that do not.
        generation: whose members have contributed to the last one; None if this worker was given
            the State since.
        slices: of the step in hand.
        window: in which ratio its batches are split.
        checks: what is found out for the vote.
        random: sets the random numbers of slices.
        rewind: puts back what a void step has changed.
        metrics: that are being computed, in which no step has a place.
        rate: follows the size of the group; None if learning rates stay.
        ended: why this run cannot go on; None if it can.
        processor: the kind of this worker's, as a number.
        foreign: as far as this worker, outside of the group, has seen, nobody in it has such a one.
        level_due: at the next boundary all go on from one State.
    """

    def __init__(self, parts: WorkerParts) -> None:
        settings, driver = parts.settings, parts.driver
        self.step = self.voids = 0
        self.generation: int | None = None
        self.window = Window()
        self.checks = StepChecks(settings, parts.tracked)
        places = RandomPlaces(settings.seed, lambda: self.step)
        self.random = places if settings.exact else AnyPlaces()
        every = settings.recompute_every if settings.computes_again else None
        self._again = Recomputation(settings.seed, every, lambda: self.step)
        begins = self._check_beginning
        ends = self._check_end
        self.slices = Slices(parts.me, driver, self.random, self._again, parts.phase, begins, ends)
        self._effects = SliceEffects()
        self.rewind = Rewind()
        self.metrics = MetricsUnderWay()
        self.rate: RateScaling | None = None
        self.ended: ConfigError | TrainError | None = None
        self.processor = 0
        self.foreign = self.level_due = False
        self._levelled_at = self._copied_at = time.monotonic()
        self._me = parts.me
        self._thread: int | None = None  # that which trains
        self._settings = settings
        self._link = parts.link
        self._driver = driver
        self._tracked = parts.tracked
        self._replicated = parts.replicated
        self._schedule = parts.schedule
        self._copies = parts.copies
        self._able = False  # as a shadow, to store States, as was said to whom it follows
        self._asked = False  # as one, whether the State that it has is the group's
        self._reducer: Reducer | None = None
        self._turns: deque[int] = deque(maxlen=loader_order.REMEMBERED)  # of loaders, step by step
        self._turns_from_before = False  # none of them was taken since the State came
        self._frozen_there = 0  # what was where the State that came was captured
        self._bad_batch = False  # the guard has voided a step since the last boundary
        self._unmarked = False  # one was void whose beginning nobody knows, and it was said
        self._doubted = False  # what a step was about, and it was said
        self._faulty, self._faults = -1, 0  # the last step that was, for who is alone; how often
        self._plain = plain_loaders.PlainLoaders()
        self._unprepared = UnpreparedOptimizers(self._computes_batch)
        self._told_unprepared = False
        self._told_alike = False

    def prepared(self, reducer: Reducer) -> None:
        """The objects are tracked, and their gradients are averaged by `reducer`."""
        self._reducer, self._thread = reducer, threading.get_ident()
        self.checks.prepared(reducer)
        self.rewind.prepared(self._tracked.modules.values())
        plain_loaders.watch()

    def state_dict(self) -> dict[str, Any]:
        """What is known of the steps so far, as part of a State's metadata."""
        return {
            "step": self.step,
            "voids": self.voids,
            "window": self.window.state_dict(),
            **self.checks.state_dict(),
            **self._again.state_dict(),
            **({"turns": list(self._turns)} if len(self._tracked.loaders) > 1 else {}),
            **({"frozen": frozen} if (frozen := of_frozen(self._frozen)) else {}),
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """As the metadata of a State have it, which was adopted just now."""
        self.rebase()
        self.rewind.forget_tensors()
        self.step, self.generation = meta["step"], None
        self.voids = meta.get("voids", 0)
        self.window.load_state_dict(meta.get("window", {}))
        self.checks.load_state_dict(meta)
        self._again.load_state_dict(meta)
        self._turns = deque(meta.get("turns", ()), loader_order.REMEMBERED)
        self._turns_from_before = bool(self._turns)
        self._frozen_there = meta.get("frozen", 0)
        self._able = self._asked = self.foreign = self.level_due = False
        self._copied_at = time.monotonic()

    def check(self, *, thoroughly: bool = False) -> None:
        """That nothing was left out of the steps so far; see Reducer.check."""
        if thoroughly:
            let_go_of_gathered(self._tracked.modules.values())
        if self._reducer is not None:
            self._reducer.check(thoroughly)

    def look_if_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """That an optimizer that is about to take a step has gradients of the whole group.

        Raises:
            ConfigError: a batch was drawn, and what it has is of this worker's samples.
        """
        if self._settings.alone or self._reducer is None or not self._draws:
            return
        groups = optimizer.param_groups
        if self._reducer.has_unaveraged(
            parameter for group in groups for parameter in group["params"]
        ):
            if torch._C._current_graph_task_id() < 0:  # not in a hook of a backward pass
                self._reducer.check()  # if one was left by an exception, that is why
            raise refusals.not_averaged()

    def look_if_prepared(self, optimizer: torch.optim.Optimizer) -> None:
        """Of an optimizer that is no part of the State, before it takes a step.

        Raises:
            ConfigError: it trains by slices, and which these are depends on who computes what.
        """
        if self._settings.alone or self._thread != threading.get_ident():
            return
        if not self._unprepared.look(optimizer, self.step):
            return
        if self._settings.exact:
            raise unprepared_optimizers.refused(optimizer)
        if not self._told_unprepared and self._driver.rank == 0:
            logger.warning(unprepared_optimizers.UNPREPARED, type(optimizer).__name__)
        self._told_unprepared = True

    def _computes_batch(self) -> bool:
        """Whether a gradient that comes now is of a batch of the group."""
        return self.slices.under_way if self._settings.exact else self._draws

    @property
    def _draws(self) -> bool:
        """Whether a batch was drawn since the last step."""
        return any(loader.pending for loader in self._tracked.loaders)

    def look_if_left_over(self) -> None:
        """The train function is through: whether what it has added up is in a step.

        Raises:
            ConfigError: it never took one.
        """
        if not self.window.added_up:
            idle = self._draws and not (self.step or self._settings.alone)
            if idle and self._tracked.optimizers:
                raise refusals.never_ran_backward()
            return
        if not self.step:
            raise refusals.never_took_a_step()
        if self._driver.rank == 0:
            logger.warning(refusals.LEFT_OVER, self.step)

    def put_back(self) -> None:
        """At a boundary: what a step that is void has changed is as it was when that began."""
        if self.rewind.due and self._reducer is not None:
            self._reducer.put_back_buffers()
        self.rewind.restore(self._tracked.others)

    def left(self) -> None:
        """The loop over batches was left: what follows is no part of a void step, and stays."""
        if self.rewind.due and self.ended is None and self._thread == threading.get_ident():
            self.put_back()
            self.rewind.forget_tensors()

    def set_out(self) -> None:
        """At a boundary: a step begins from here, and may have to be done again from here."""
        self._plain.boundary()
        self._bad_batch = False
        if self._settings.exact:
            self.random.boundary()
        if self._settings.rewinds_exactly:
            self.rewind.keep(self._tracked.others)
        elif self._settings.may_void:
            self.rewind.outline(self._tracked.others)
        if self._settings.may_void:
            self.rewind.set_out(copies=self._settings.rewinds_exactly)
        if self._reducer is not None:
            self._reducer.set_out()

    # ------------------------------------------------------------------ Steps of the Reducer

    def lacks(self, members: Sequence[int]) -> bool:
        """Whether slices fall to this worker that it has not computed, if these take part."""
        return self.slices.lacks(tuple(members))

    def weights(self, members: Sequence[int]) -> Weights:
        """What this worker has of the step in hand, if `members` have the rest.

        An equal part if nothing was ever drawn.

        Raises:
            ConfigError: a metric has called backward().
        """
        self.metrics.refuse("backward()")
        if self.slices.step is not None:
            return self.slices.step.weights()
        if self._settings.exchange.diloco:
            return self._weights_of_all_drawn(members)
        window = self.window
        draws = any(loader.pending for loader in self._tracked.loaders)
        if not draws and window.several and not self._doubted:
            self._doubted = True
            if self._driver.rank == 0:
                logger.warning(refusals.DOUBTFUL_STEP)
        if self._settings.rollback and window.ratio and not draws:
            raise refusals.second_pass()
        parts = window.shares(self._me, members)
        # Without samples, all of them are lost; see Reducer.accept.
        scales = [share / total if total else 0.0 for share, total in parts]
        share, total = map(sum, zip(*parts, strict=True))
        return Weights(scales, share, total)

    def _weights_of_all_drawn(self, members: Sequence[int]) -> Weights:
        """By the samples that each had in the inner steps since the last outer one."""
        draws = [draw for loader in self._tracked.loaders for draw in loader.drawn]
        samples = {w: sum(d.weigh(d.share_of(w)) for d in draws) for w in {self._me, *members}}
        share, total = samples[self._me], sum(samples[member] for member in members)
        return Weights([share / total if total else 0.0], share, total)

    def samples(self) -> Sequence[int]:
        """By slice of the step in hand."""
        return self.slices.in_hand.draw.samples

    def sharing(self, members: Sequence[int]) -> Sharing:
        """Who of these has computed which slices."""
        return self.slices.in_hand.sharing(members)

    def passed(self) -> None:
        """There was, or might have been, a backward pass since the last batch was drawn."""
        self.window.passed()
        for loader in self._tracked.loaders:
            loader.passed()

    def carried(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A step adds to what the step before has left as their gradients.

        Raises:
            ConfigError: an optimizer is going to use it.
        """
        if any(self._tracked.optimized(parameter) for parameter in parameters):
            raise refusals.carries_gradients()

    @property
    def _drawn(self) -> Drawn:
        """What this worker has drawn for the step in hand, and how often it ran backward."""
        passes = self._reducer.passes if self._reducer and self.slices.step else 0
        return drawn(self._tracked.loaders, passes, self._frozen)

    @property
    def _frozen(self) -> Sequence[int]:
        return self._reducer.frozen if self._reducer else ()

    @property
    def froze_otherwise(self) -> bool:
        """Whether other parameters are frozen than where the State that came was captured."""
        return of_frozen(self._frozen) != self._frozen_there

    def vote(self) -> torch.Tensor:
        """What goes into the commit round."""
        first = self._driver.rank == 0
        void = self._driver.void or bool(self._again.disputed)
        vote = Vote(
            proposal=self._driver.proposal(),
            journaled=self._link.journaled() if first else -1,
            sequence=self._replicated.sequence,
            store=first and (self._schedule.time_is_up() or self._abandoned()),
            # A bit may flip in what it stores, and in an exact run nobody is to go on from that.
            shadowed=first and self._driver.shadowed and not self._settings.exact,
            processor=self.processor,
            processors=self._driver.processors,
            level=first and self._time_to_level(),
            # While a snapshot is being stored, another one would hold up training.
            compare=first and self._schedule.compare and not self._copies.busy,
            drawn=0 if self._settings.alone else self._drawn.mark,  # nobody drew anything else
            void=void,
            **self.checks.vote(void=void, alone=self._unwatched()),
            **self._again.vote(),
            slice_us=self.slices.times(self.step),
        )
        return torch.tensor(vote.encode(), dtype=torch.int64, device="cpu")

    def _unwatched(self) -> bool:
        """Whether nobody holds a State that this worker's could be compared with.

        A shadow compares its own, and stores States once it has found that equal.
        """
        alone = len(self._driver.present) < 2 and not self._driver.has_shadow
        return alone or self._driver.unlevel

    def _time_to_level(self) -> bool:
        """Whether workers whose processors differ have gone their own ways for long enough."""
        mixed = len(self._driver.processors) > 1
        late = time.monotonic() - self._levelled_at > LEVEL_S
        return mixed and (late or self._driver.unlevel)

    def look_if_ended(self) -> None:
        """Raise what has ended the run, if anything has: user code may have caught it once."""
        if self.ended is not None:
            raise self.ended

    def look_at_thread(self) -> None:
        """That this is the thread that called ctx.prepare.

        Raises:
            ConfigError: it is not.
        """
        if self._thread not in (None, threading.get_ident()):
            self.ended = refusals.other_thread()  # the one that trains ends with it, too
            raise self.ended

    def rebase(self) -> None:
        """Something was loaded."""
        if self._reducer is not None:
            self._reducer.rebase()

    def levelled(self) -> None:
        """All workers have gone on from one State."""
        self.rebase()
        self.level_due = False
        self._levelled_at = time.monotonic()
        self._driver.levelled()

    def _abandoned(self) -> bool:
        """Whether a State was left to a shadow that is lost, and did not store it."""
        return not self._driver.shadowed and self._copies.left_undone

    def watched(self, result: torch.Tensor) -> None:
        """A step that others agreed on is about to be taken over.

        A shadow compares what it holds with what they held, and says whether it can store States.
        """
        if not self._driver.shadow:
            return
        held = self.checks.verdict(result).agreed.held
        self.foreign = self.processor not in held
        if self.foreign and time.monotonic() - self._copied_at > LEVEL_S:
            self._copied_at = time.monotonic()
            self._driver.ask_digest()  # it has parted by rounding, and is copied anew
        if self._settings.exact and not (self._settings.compares_steps or self._driver.equal):
            self._ask_once()  # it has another State since, of which no step tells
        able = self.checks.matches(held)
        if able is False:
            self._driver.differs()  # all others may be lost before a digest comes
        if able is None or able == self._able:
            return
        self._able = able
        self._driver.say_able(able)
        if not (able and self._driver.equal):
            self._driver.ask_digest()  # of all of it; if it differs, there is another one

    def _ask_once(self) -> None:
        """Have the State that this shadow was given last compared as a whole."""
        if not self._asked:
            self._asked = True
            self._driver.ask_digest()

    @property
    def able(self) -> bool:
        """Whether this worker is a shadow that can store States."""
        return self._able and self._driver.shadow

    def committed(self, left: OperationOutcome) -> None:
        """A step counts; or it is void, and its samples are drawn again or left out."""
        self._copies.finish()
        verdict = self.checks.verdict(left.result)
        agreed = verdict.agreed
        self._replicated.catch_up(agreed.sequence)
        if not agreed.alike:
            mine = astuple(self._drawn)
            of_all = self._roll_call(OperationKind.DRAWS, mine)
            self._end(parted(self.step + 1, {w: Drawn(*row) for w, row in of_all.items()}))
        self._schedule.agreed(agreed.store, agreed.compare, agreed.shadowed)
        self._driver.step_left(left, agreed.proposal)
        self.checks.over(verdict)
        if verdict.void:
            self._void(verdict, left.contributors)
            return
        self._tracked.void = False
        self.rewind.left(copies=self._settings.rewinds_exactly)
        self.level_due = agreed.level
        if self.slices.step is not None:
            self._turns.append(self.slices.step.loader.number)
        contributors = left.contributors
        handed_over = self.slices.committed(self.step, agreed.slice_us, contributors)
        self.step, self.voids = self.step + 1, 0
        self.generation = left.complete
        if self.rate is not None:
            self.rate.observe(len(contributors))
        drew = any(loader.pending for loader in self._tracked.loaders)
        missed = self.window.close(contributors, drew=drew)
        if missed and self._me == contributors[0]:
            logger.warning(refusals.MISSED_PASSES, ", ".join(map(str, missed)), self.step)
        if not self._told_alike and (same := alike(self._tracked.loaders)) is not None:
            self._told_alike = True
            if self._me == contributors[0]:
                logger.warning(refusals.SAME_SAMPLES, *same, self.step)
        batches = [
            batch for loader in self._tracked.loaders for batch in loader.commit(contributors)
        ]
        self._replicated.emit(
            StepCommitted(
                step=self.step,
                generation=left.complete,
                world_size=len(contributors),
                batches=tuple(batches),
            )
        )
        if handed_over is not None:
            self._replicated.emit(handed_over)
        self._replicated.confirm(agreed.journaled)
        if not self._tracked.loaders:
            self._look_at_plain_loop(contributors)

    def _look_at_plain_loop(self, contributors: Sequence[int]) -> None:
        """A step counts that drew no batch from a loader of elastix."""
        hints = [(refusals.PLAIN_LOADER, len(contributors))] if self._plain.step() else []
        if self._plain.unmarked() and not self._settings.alone:
            hints.append((refusals.NO_BOUNDARY, self.step))
        for hint, number in hints if self._me == contributors[0] else ():
            logger.warning(hint, number)

    def _void(self, verdict: StepVerdict, voters: Sequence[int]) -> None:
        """A step of these workers does not count: find out whose fault it is, if anybody's."""
        self.voids += 1
        alarm, found, unseen = verdict.alarm, None, False
        disputed = self._again.disputed
        if alarm is not None and self._again.wanted and self._reducer is not None:
            told = self._roll_call(
                OperationKind.SUSPECTS, self._again.largest(self._reducer.sums())
            )
            self._again.suspect(told, alarm, self.slices.in_hand.draw)
            alarm = None  # not yet
        elif disputed and verdict.agreed.equal and self._reducer is not None:
            alarm = self._again.alarm
            mine = self._again.numbers(self._reducer.sums())
            found = self._again.settle(told := self._roll_call(OperationKind.SLICES, mine))
            if found is not None and (found.apart or found.code):
                alarm = None  # it was not the batch
            if found is not None and found.apart and not found.code and self._unseen:
                unseen = self._hold_otherwise(told)
        self._take_back(alarm)
        if not verdict.agreed.equal:
            self._have_parted(voters)
        elif verdict.disputed:
            self._again.dispute(verdict.agreed.doubted)
        elif found is not None:
            self._settle(disputed, found, tuple(told), unseen=unseen)

    def _take_back(self, alarm: Alarm | None) -> None:
        """The step is void: its batches come again, unless it is for them that it is.

        Raises:
            TrainingUnstable: it was once too often.
        """
        self.window.void()
        self.slices.step = None
        if not (self.rewind.marked or self._unmarked) and self._driver.rank == 0:
            logger.warning(refusals.UNMARKED_STEP, self.step + 1)
        self._unmarked = True
        changed = self._keep_for_rewind(again=self._settings.exact and alarm is None)
        self._tracked.void = True
        if self._reducer is not None:
            overflow = self._tracked.scaler is not None  # which is what it takes them for
            self._tracked.spared = self._reducer.stand_in(math.inf if overflow else 0.0)
        for loader in self._tracked.loaders:
            if alarm is None:
                loader.commit(())
            elif spans := loader.leave_out():
                self._replicated.emit(
                    SamplesLeftOut(loader=loader.number, spans=spans, step=self.step)
                )
        if alarm is not None:
            self._replicated.emit(StepVoided(step=self.step + 1, why=str(alarm)))
            error = self.checks.voided(self.step + 1, alarm, again=self._bad_batch)
            self._bad_batch = self.rewind.marked  # else nobody knows where the next one begins
            if error is not None:
                self._end(error)
        if changed is not None:
            self._end(refusals.would_change_twice(changed, self.step + 1))

    def _keep_for_rewind(self, *, again: bool) -> str | None:
        """What was changed since the boundary and cannot be put back to what it was; None: nothing.

        Args:
            again: slices are computed again.
        """
        if not self.rewind.first:
            return None  # a further pass on a batch: the loop goes on, and does nothing again
        others, changed = self._tracked.others, None
        if not self._settings.rewinds_exactly:
            changed = self.rewind.fill_in(others)
        if not self.rewind.keep_tensors(others.values(), again=again):
            changed = changed or "a parameter of the model"
        self.rewind.due, self.rewind.first = True, False
        return changed

    def _check_beginning(self) -> None:
        """The slices of a step are about to be computed: from the tensors of the first time.

        Raises:
            TrainError: they are others.
        """
        if self._settings.exact:
            self._effects.begin(self._tracked.others)
        if self.rewind.begins_otherwise():
            self._end(
                TrainError(
                    f"with exact=True, in step {self.step + 1}, which has to be done again, "
                    "parameters, or what an optimizer has of them, were changed between the step's "
                    "beginning and the loop over its slices, so they have been changed twice. The "
                    "step does not count, and the run was stopped. Calling fit() again goes on "
                    "from the last stored State. Change them after that loop."
                )
            )

    def _check_end(self) -> None:
        """This worker's slices are computed: they have changed nothing that all must have alike.

        Raises:
            ConfigError: they have.
        """
        if self._settings.exact:
            self._effects.check(self._tracked.others)

    def _have_parted(self, voters: Sequence[int]) -> None:
        """Find out who of these holds another State than most, and wait for a group without."""
        fingerprints = self.checks.fingerprints
        if fingerprints is None or self._reducer is None:
            return
        self._reducer.check(True)  # a parameter that nobody averages has an error of its own
        mine = [self.processor, self.checks.vouches_for(self._me), *fingerprints.numbers()]
        numbers = self._roll_call(OperationKind.FINGERPRINTS, mine)
        held = {w: (kind, fingerprints.named(row)) for w, (kind, _, *row) in numbers.items()}
        donors = {w: donor for w, (_, donor, *_) in numbers.items()}
        found = compare_kinds(self.step, "step", held, donors)
        workers = tuple(sorted(held))
        if found is not None and not found.equal:
            # Where nobody can say who is right, no more can be said of what they have stored alone.
            undecided = self._settings.exact and len(found.apart) == len(workers)
            unseen = self._unseen or undecided
            self._part(workers, found.apart, found.parts, diverged(found), unseen=unseen)
        elif self._settings.exact and (self._unseen or found is None):
            # It was somebody who has been lost since; or the only one who is left.
            gone = [voter for voter in voters if voter not in held]
            self._part(workers, gone, (), parted_from_lost(self.step, workers), unseen=True)
        # Else it was somebody who has been lost since. In any case the batch is to be split over
        # those who are left, and they must know of each other.
        self._driver.step_left(self._driver.run(Regroup()), 0)

    @property
    def _unseen(self) -> bool:
        """Whether steps of an exact run count that may be of another State than most hold.

        That is so if what is found to differ now was not compared in the step before.
        """
        return self._settings.exact and not self.checks.compared_whole

    def _part(
        self,
        workers: Sequence[int],
        apart: Sequence[int],
        parts: Sequence[str],
        error: TrainError,
        *,
        unseen: bool,
    ) -> None:
        """Have workers taken out, and wait for a group without them; or have all go back."""
        if self._driver.watching and not (unseen and self._driver.shadow):
            return  # the others see to it
        of_whom = {"workers": tuple(workers), "apart": tuple(apart)}
        self._link.send(
            Diverged(step=self.step, parts=tuple(parts), error=error, unseen=unseen, **of_whom)
        )
        if self._driver.watching:  # they may be lost before they have said so
            self._driver.differs()
            return
        self._driver.stand_by(workers if unseen else apart)

    def _hold_otherwise(self, workers: Collection[int]) -> bool:
        """Whether these hold different States, all of which is compared, or nobody can say.

        Who computes a slice from another State than the others does not miscalculate.
        """
        fingerprints = self.checks.fingerprints
        if fingerprints is None:
            return False
        fingerprints.take(whole=True)
        held = self._roll_call(OperationKind.FINGERPRINTS, fingerprints.numbers())
        return not held.keys() >= set(workers) or len(set(map(tuple, held.values()))) > 1

    def _settle(
        self,
        disputed: Sequence[int],
        found: SliceFault,
        workers: Sequence[int],
        *,
        unseen: bool,
    ) -> None:
        """All of these have computed the disputed slices again: whoever is at fault goes.

        Raises:
            TrainError: it is the train function that is.
        """
        if found.code:
            self._end(unrepeatable(self.step + 1, disputed, found))
        if not found.apart:
            return  # it is the batch, or somebody who has been lost since
        if len(workers) == 1:
            self._faults = self._faults + 1 if self._faulty == self.step else 1
            self._faulty = self.step
            if self._faults > _FAULTS:
                self._end(miscalculated(self.step + 1, found))
            logger.warning(
                "step %d was void: slice %s gave another result than before (%s), and gave the "
                "same twice when it was computed again. Nothing wrong was taken over. The "
                "processor or the memory may be faulty.",
                *(self.step + 1, ", ".join(map(str, disputed)), ", ".join(found.parts)),
            )
            return
        error = miscalculated(self.step + 1, found)
        self._part(workers, found.apart, found.parts, error, unseen=unseen)
        self._driver.step_left(self._driver.run(Regroup()), 0)

    def _roll_call(self, kind: OperationKind, mine: Sequence[int]) -> dict[int, list[int]]:
        """By worker, what each tells all others. Collective."""
        return told(self._driver.run(RollCall(kind, self._me, mine)).result)

    def _end(self, error: TrainError) -> NoReturn:
        """The run cannot go on, whatever user code catches."""
        self.ended = error
        raise error

    def voided(self, result: torch.Tensor) -> bool:
        """Whether a step that was left with this result does not count."""
        return self.checks.verdict(result).void

    @property
    def further(self) -> bool:
        """See Steps. Without boundaries any pass may be one."""
        return not self.rewind.first

    @property
    def undone(self) -> bool:
        """See Steps."""
        return self.rewind.due

    def look_at_turn(self, loader: int) -> None:
        """Say so if the run goes on with another loader than it would have without a stop."""
        wanted = loader_order.expected(self._turns) if self._turns_from_before else None
        self._turns_from_before = False
        if wanted not in (None, loader):
            logger.warning(refusals.OTHER_TURN, self.step, wanted, loader)
