"""What goes into the commit round of a step, reduced by maximum, and what comes out. Pure.

A value that all must agree on travels with both signs: equal extremes mean that all have the same.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """One worker's part.

    Attributes:
        proposal: generation of the proposed group that this worker could enter, 0 for none.
        journaled: how far the journal has got, as rank 0 knows; -1 from others.
        store: rank 0 finds it time for a checkpoint.
        compare: rank 0 finds it time to compare the replicas.
        drawn: hash of the batches of this step (draws).
        void: the step is done for nothing, since it will be done again.
    """

    proposal: int
    journaled: int
    store: bool
    compare: bool
    drawn: int
    void: bool

    def encode(self) -> torch.Tensor:
        """As the round reduces it."""
        agreed = [self.proposal, -self.proposal, self.drawn, -self.drawn]
        told = [self.journaled, self.store, self.compare, self.void]
        return torch.tensor([*agreed, *told], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the round gave: the same for all.

    Attributes:
        proposal: generation of the proposed group that all could enter; 0 if they know different
            ones, or none.
        journaled: how far the journal has got.
        store, compare: as soon as this step is behind.
        alike: all have drawn the same batches.
        void: the step is to be done again.
    """

    proposal: int
    journaled: int
    store: bool
    compare: bool
    alike: bool
    void: bool


def decode(result: torch.Tensor) -> Verdict:
    """The verdict from what was reduced."""
    proposal, lowest, drawn, other, journaled, store, compare, void = map(int, result.tolist())
    return Verdict(
        proposal=proposal if proposal == -lowest else 0,
        journaled=journaled,
        store=store > 0,
        compare=compare > 0,
        alike=drawn == -other,
        void=void > 0,
    )
