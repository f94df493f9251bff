"""What a member has in hand: an operation, and a change of its group. Data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.recovery import STATELESS

if TYPE_CHECKING:
    import torch

    from elastix.comm.protocol.operation import Operation


@dataclass
class InHand:
    """The operation in hand, or between two operations what is known of the next.

    Attributes:
        number: of it; STATELESS without the State.
        operation: None between operations.
        complete: the generation in which every bucket of it was had; 0 for none.
        payload: what this member added to its round; None before.
        passed: how it ended, from a peer that left it.
        begun: somebody else is in it already, so nobody may wait before it.
        void: it is done for nothing, since its step will be done again.
        next_void: those ahead have found the operation after this one void.
    """

    number: int = STATELESS
    operation: Operation | None = None
    complete: int = 0
    payload: torch.Tensor | None = None
    passed: OperationOutcome | None = None
    begun: bool = False
    void: bool = False
    next_void: bool = False

    @property
    def has_state(self) -> bool:
        """Whether this member has the State."""
        return self.number != STATELESS

    @property
    def kind(self) -> int:
        """Of the operation; 0 between operations."""
        return self.operation.kind if self.operation is not None else 0

    def after(self) -> InHand:
        """What is known of the next when this one was left."""
        # Whoever passed the result on has said, too, whether somebody is in the next.
        begun = self.passed is not None and self.begun
        return InHand(self.number + 1, begun=begun, void=self.next_void)


@dataclass
class Recovering:
    """A change of the group that this member is on its way through.

    Attributes:
        since: the generation with whose news it began; 0 if there is none.
        outcome: what became of the operation in hand.
    """

    since: int = 0
    outcome: str = ""
