"""The worker around the reducer: what it says of its steps, and what it is told of them.

The reducer knows neither samples nor events. How much this worker's gradients count, what it votes,
and what follows from a step that counts, is with whoever implements Steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastix.comm.network.tree_reduction import Sharing
from elastix.comm.protocol.operation import OperationOutcome


@dataclass(frozen=True)
class Weights:
    """How much this worker's gradients of a step count.

    Attributes:
        scales: by ratio, what its gradients of such passes are multiplied by.
        share: its samples in the step, those of all ratios together.
        total: of these, how many all of the group have.
    """

    scales: Sequence[float]
    share: int
    total: int


class Steps(Protocol):
    """Whoever keeps count of steps and samples. Called in the training thread."""

    def weights(self, members: Sequence[int]) -> Weights:
        """Of the step in hand, if these take part."""
        ...

    def lacks(self, members: Sequence[int]) -> bool:
        """Whether slices fall to this worker that it has not computed, if these take part."""
        ...

    def carried(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A step adds to what the step before has left as their gradients."""
        ...

    def samples(self) -> Sequence[int]:
        """By slice of the step in hand; an epoch's last batch may have empty ones."""
        ...

    def sharing(self, members: Sequence[int]) -> Sharing:
        """Who of these, if they take part, has computed which slices of the step in hand."""
        ...

    def watched(self, result: torch.Tensor) -> None:
        """A step that others agreed on is about to be taken over; the result of its round."""
        ...

    def passed(self) -> None:
        """There was, or might have been, a backward pass that is no step."""
        ...

    def vote(self) -> torch.Tensor:
        """This worker's part of the commit round; reduced by maximum."""
        ...

    def voided(self, result: torch.Tensor) -> bool:
        """Whether a commit round with this result says that the step is to be done again."""
        ...

    @property
    def further(self) -> bool:
        """Whether the step in hand is a further pass on the batch of the one before it."""
        ...

    @property
    def undone(self) -> bool:
        """Whether what a step does is put back at the next boundary: its batch was left out."""
        ...

    def committed(self, outcome: OperationOutcome) -> None:
        """The step counts and gradients are in place; or it is void, and there are none."""
        ...
