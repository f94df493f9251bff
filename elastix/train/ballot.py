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
        void: the step is done for nothing, since it will be done again.
    """

    proposal: int
    journaled: int
    store: bool
    compare: bool
    void: bool

    def encode(self) -> torch.Tensor:
        """As the round reduces it."""
        values = [self.proposal, -self.proposal, self.journaled]
        return torch.tensor([*values, self.store, self.compare, self.void], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the round gave: the same for all.

    Attributes:
        proposal: generation of the proposed group that all could enter; 0 if they know different
            ones, or none.
        journaled: how far the journal has got.
        store, compare: as soon as this step is behind.
        void: the step is to be done again.
    """

    proposal: int
    journaled: int
    store: bool
    compare: bool
    void: bool


def decode(result: torch.Tensor) -> Verdict:
    """The verdict from what was reduced."""
    highest, lowest, journaled, store, compare, void = (int(value) for value in result)
    return Verdict(
        proposal=highest if highest == -lowest else 0,
        journaled=journaled,
        store=store > 0,
        compare=compare > 0,
        void=void > 0,
    )
