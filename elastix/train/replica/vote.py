"""What goes into the commit round of a step, and what comes out. Pure.

A vote is a row of numbers, which the round reduces by maximum. So a field has one of two rules:

- *unanimous*: it counts if all say the same. It travels with both signs: equal extremes mean that;
- *highest*: the largest counts, which for a flag is that anybody has raised it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One worker's part.

    Attributes:
        proposal: generation of the proposed group that this worker could enter, 0 for none;
            unanimous.
        drawn: hash of the batches of this step (draws); unanimous.
        journaled: how far the journal has got, as rank 0 knows, -1 from others; highest.
        store: rank 0 finds it time for a checkpoint; highest.
        compare: rank 0 finds it time to compare the replicas; highest.
        void: the step is done for nothing, since it will be done again; highest.
    """

    proposal: int
    drawn: int
    journaled: int
    store: bool
    compare: bool
    void: bool

    def encode(self) -> tuple[int, ...]:
        """As the round reduces it; `decode` has the same order."""
        unanimous = self.proposal, -self.proposal, self.drawn, -self.drawn
        return *unanimous, self.journaled, int(self.store), int(self.compare), int(self.void)


@dataclass(frozen=True, kw_only=True)
class VoteResult:
    """What the round gave: the same for all.

    Attributes:
        proposal: generation of the proposed group that all could enter; 0 if they know different
            ones, or none.
        alike: all have drawn the same batches.
        journaled: how far the journal has got.
        store, compare: as soon as this step is behind.
        void: the step is to be done again.
    """

    proposal: int
    alike: bool
    journaled: int
    store: bool
    compare: bool
    void: bool


def decode(reduced: Sequence[int]) -> VoteResult:
    """The verdict from what was reduced."""
    proposal, lowest, drawn, other, journaled, store, compare, void = reduced
    return VoteResult(
        proposal=proposal if proposal == -lowest else 0,
        alike=drawn == -other,
        journaled=journaled,
        store=store > 0,
        compare=compare > 0,
        void=void > 0,
    )
