"""What goes into the commit round of a step, and what comes out. Pure.

A vote is a row of numbers, which the round reduces by maximum. So a field has one of two rules:

- *unanimous*: it counts if all say the same. It travels with both signs: equal extremes mean that;
- *highest*: the largest counts, which for a flag is that anybody has raised it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastix.train.replica.guard import ABSENT, Alarm, Watch, number


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One worker's part.

    Attributes:
        proposal: generation of the proposed group that this worker could enter, 0 for none;
            unanimous.
        drawn: hash of the batches of this step (draws); unanimous.
        held: hash of a part of the State (fingerprints); unanimous.
        journaled: how far the journal has got, as rank 0 knows, -1 from others; highest.
        store: rank 0 finds it time for a checkpoint; highest.
        compare: rank 0 finds it time to compare the replicas; highest.
        void: the step is done for nothing, since it will be done again; highest.
        step_us: since the step before; highest.
        norm, metric: what the guard judges, in the order of guard.ordered; highest.
        slice_us: how long a slice takes this worker, in its place; highest. Empty without slices.
    """

    proposal: int
    drawn: int
    held: int = 0
    journaled: int
    store: bool
    compare: bool
    void: bool
    step_us: int = 0
    norm: int = ABSENT
    metric: int = ABSENT
    slice_us: tuple[int, ...] = ()

    def encode(self) -> tuple[int, ...]:
        """As the round reduces it; `decode` has the same order."""
        unanimous = (self.proposal, self.drawn, self.held)
        flags = (int(self.store), int(self.compare), int(self.void))
        highest = (self.journaled, *flags, self.step_us, self.norm, self.metric)
        return *unanimous, *(-field for field in unanimous), *highest, *self.slice_us


@dataclass(frozen=True, kw_only=True)
class VoteResult:
    """What the round gave: the same for all.

    Attributes:
        proposal: generation of the proposed group that all could enter; 0 if they know different
            ones, or none.
        alike: all have drawn the same batches.
        equal: all hold the same, as far as it was hashed.
        journaled: how far the journal has got.
        store, compare: as soon as this step is behind.
        void: the step is to be done again.
        step_us: how long the step took the slowest.
        norm, metric, slice_us: as Vote has them.
    """

    proposal: int
    alike: bool
    equal: bool
    journaled: int
    store: bool
    compare: bool
    void: bool
    step_us: int
    norm: int
    metric: int
    slice_us: tuple[int, ...] = ()


def decode(reduced: Sequence[int]) -> VoteResult:
    """The result from what was reduced."""
    pairs = zip(reduced[:3], reduced[3:6], strict=True)
    proposal, drawn, held = (high if high == -low else None for high, low in pairs)
    journaled, store, compare, void, step_us, norm, metric, *slice_us = reduced[6:]
    return VoteResult(
        proposal=proposal or 0,
        alike=drawn is not None,
        equal=held is not None,
        step_us=step_us,
        norm=norm,
        metric=metric,
        slice_us=tuple(slice_us),
        journaled=journaled,
        store=store > 0,
        compare=compare > 0,
        void=void > 0,
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
    def void(self) -> bool:
        """The step does not count."""
        return self.agreed.void or not self.agreed.equal or self.alarm is not None


def judge(reduced: Sequence[int], watch: Watch | None) -> StepVerdict:
    """The verdict from what was reduced, by a guard that has seen the steps before."""
    agreed = decode(reduced)
    if watch is None or agreed.void or not agreed.equal:
        return StepVerdict(agreed, None)
    return StepVerdict(agreed, watch.judge(number(agreed.norm), number(agreed.metric)))
