"""What goes into the commit round of a step, and what comes out. Pure.

A vote is a row of numbers, which the round reduces by maximum. So a field has one of two rules:

- *unanimous*: it counts if all say the same. It travels with both signs: equal extremes mean that.
  Where not all have something to say, those who have count;
- *highest*: the largest counts, which for a flag is that anybody has raised it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastix.train.replica.guard import ABSENT, Alarm, Watch, number


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One worker's part.

    Attributes:
        proposal: generation of the proposed group that this worker could enter, 0 for none;
            unanimous.
        drawn: hash of the batches of this step (draw_comparison); unanimous.
        held: hash of a part of the State (fingerprints), 0 for none; unanimous among those with
            processors of one kind.
        processor: the kind of this worker's (exactness.kind_number).
        processors: the kinds of the group's.
        journaled: how far the journal has got, as rank 0 knows, -1 from others; highest.
        sequence: number of the next event that all tell: one may have told some alone; highest.
        store: rank 0 finds it time for a checkpoint; highest.
        compare: rank 0 finds it time to compare the replicas; highest.
        void: the step is done for nothing, since it will be done again; highest.
        shadowed: rank 0 is followed by a shadow that can store States; highest.
        level: rank 0 finds it time that all kinds of processors go on from one State; highest.
        step_us: since the step before; highest.
        norm, metric: what the guard judges, in the order of guard.ordered; highest.
        seen: hash of what a slice gave that some have computed (recomputation), ABSENT from the
            others; unanimous.
        doubted: a slice, and 1, that this worker has computed with different results; highest.
        slice_us: how long a slice takes this worker, in its place; highest. Empty without slices.
    """

    proposal: int
    drawn: int
    held: int = 0
    processor: int = 0
    processors: tuple[int, ...] = (0,)
    journaled: int
    store: bool
    compare: bool
    void: bool
    shadowed: bool = False
    level: bool = False
    step_us: int = 0
    norm: int = ABSENT
    metric: int = ABSENT
    seen: int = ABSENT
    doubted: int = 0
    sequence: int = 0
    slice_us: tuple[int, ...] = ()

    def encode(self) -> tuple[int, ...]:
        """As the round reduces it; `decode` has the same order."""
        kinds = (len(self.processors), *self.processors)
        unanimous = (self.proposal, self.drawn, *self._said(1))
        against = (-self.proposal, -self.drawn, *self._said(-1))
        flags = tuple(map(int, (self.store, self.compare, self.void, self.shadowed, self.level)))
        unseen = self.seen if self.seen == ABSENT else -self.seen
        of_some = (self.seen, unseen, self.doubted)
        highest = (self.journaled, *flags, self.step_us, self.norm, self.metric, *of_some)
        return *kinds, *unanimous, *against, *highest, self.sequence, *self.slice_us

    def _said(self, sign: int) -> tuple[int, ...]:
        """What is held, by kind of processor: of the others' this worker says nothing."""
        own, kinds = self.processor, self.processors
        return tuple(sign * self.held if kind == own else ABSENT for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class VoteResult:
    """What the round gave: the same for all.

    Attributes:
        proposal: generation of the proposed group that all could enter; 0 if they know different
            ones, or none.
        alike: all have drawn the same batches.
        held: by kind of processor, the hash of what all with such a one hold; None if they hold
            different things.
        contested: a slice gave different results on different workers.
        doubted: as Vote has it.
        journaled: how far the journal has got.
        sequence: as Vote has it.
        store, compare: as soon as this step is behind.
        void: the step is to be done again.
        shadowed: States that are due can be left to a shadow.
        level: at the next boundary all kinds of processors go on from one State.
        step_us: how long the step took the slowest.
        norm, metric, slice_us: as Vote has them.
    """

    proposal: int
    alike: bool
    held: Mapping[int, int | None]
    contested: bool
    doubted: int
    journaled: int
    store: bool
    compare: bool
    void: bool
    shadowed: bool
    level: bool
    step_us: int
    norm: int
    metric: int
    sequence: int
    slice_us: tuple[int, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all with processors of one kind hold the same, as far as it was hashed."""
        return None not in self.held.values()


def decode(reduced: Sequence[int]) -> VoteResult:
    """The result from what was reduced."""
    kinds, reduced = reduced[1 : 1 + reduced[0]], reduced[1 + reduced[0] :]
    said = 2 + len(kinds)
    pairs = zip(reduced[:said], reduced[said : 2 * said], strict=True)
    proposal, drawn, *held = (high if high == -low else None for high, low in pairs)
    journaled, store, compare, void, shadowed, level, step_us, norm, metric, *rest = reduced[
        2 * said :
    ]
    seen, against, doubted, sequence, *slice_us = rest
    return VoteResult(
        proposal=proposal or 0,
        alike=drawn is not None,
        held=dict(zip(kinds, held, strict=True)),
        contested=seen != ABSENT and seen != -against,
        doubted=doubted,
        step_us=step_us,
        norm=norm,
        metric=metric,
        sequence=sequence,
        slice_us=tuple(slice_us),
        journaled=journaled,
        store=store > 0,
        compare=compare > 0,
        void=void > 0,
        shadowed=shadowed > 0,
        level=level > 0,
    )


@dataclass(frozen=True)
class StepVerdict:
    """What a worker makes of the result: the same on all.

    Attributes:
        agreed: the result.
        alarm: what the guard finds wrong with a step that could count.
    """

    agreed: VoteResult
    alarm: Alarm | None

    @property
    def disputed(self) -> bool:
        """A slice gave different results."""
        return self.agreed.contested or self.agreed.doubted > 0

    @property
    def void(self) -> bool:
        """The step does not count."""
        unsound = self.agreed.void or not self.agreed.equal or self.disputed
        return unsound or self.alarm is not None


def judge(reduced: Sequence[int], watch: Watch | None) -> StepVerdict:
    """The verdict from what was reduced, by a guard that has seen the steps before."""
    verdict = StepVerdict(agreed := decode(reduced), None)
    if watch is None or verdict.void:
        return verdict
    return StepVerdict(agreed, watch.judge(number(agreed.norm), number(agreed.metric)))
