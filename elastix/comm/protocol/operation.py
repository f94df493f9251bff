"""What a group does together: numbered operations, equal on all workers.

The protocol carries them through; the reducer's step, an evaluation and the end of the run are
such. Pure: results are passed on, and never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from elastix.comm.network.pending import Pending
    from elastix.comm.network.process_group import Group, Reduce
    from elastix.comm.protocol.catch_up_messages import Watched


@dataclass(frozen=True)
class OperationOutcome:
    """How an operation ended: the same on all workers.

    Attributes:
        result: the reduced payload.
        complete: generation whose members contributed to the buckets.
        generation: the generation in which its round was left.
        contributors: the members of `complete`.
    """

    result: torch.Tensor
    complete: int
    generation: int
    contributors: tuple[int, ...] = ()


class Operation(Protocol):
    """One kind of operation. All its methods may be called again in a newer group."""

    @property
    def kind(self) -> int:
        """A positive number; differs between kinds, equal on all workers."""
        ...

    @property
    def reduce(self) -> Reduce:
        """How the payloads of the round add up."""
        ...

    @property
    def together(self) -> bool:
        """Whether all processes of a worker have to call `payload`, if it is several."""
        ...

    def lacks(self, members: Sequence[int]) -> bool:
        """Whether the train function has more to compute for it, if these members do it.

        Never what another of them has computed, whichever members did it before.
        """
        ...

    def prepare(self, generation: int) -> None:
        """Do what can be done alone before the members of `generation` have met."""
        ...

    def launch(self, group: Group) -> Iterable[Pending]:
        """Start what is not yet started in `group`; give all that must be over first.

        Waited for one after the other: an iterator may go on from what has ended.
        """
        ...

    def payload(self, group: Group) -> torch.Tensor:
        """What this worker adds to the round; of the same shape on all.

        Of `group` followers know members, rank and size alone.
        """
        ...

    def detail(self) -> int | None:
        """After `payload`: what has to be equal on all workers before the round, as a number.

        None for an operation with buckets: they can only be of the same step.
        """
        ...

    def accept(self, outcome: OperationOutcome) -> None:
        """The operation was left: take over what was agreed."""
        ...

    def parts(self) -> Sequence[torch.Tensor]:
        """After `accept`: flat copies of what an onlooker needs to do the same."""
        ...

    def imitate(self, watched: Watched) -> None:
        """Instead of all of the above: take over what the others agreed on."""
        ...


class RoundAlone:
    """The base of an operation without buckets: its round, and the result of it, are all."""

    together = False

    def lacks(self, members: Sequence[int]) -> bool:
        """Nothing."""
        del members
        return False

    def prepare(self, generation: int) -> None:
        """Nothing."""

    def launch(self, group: Group) -> Iterable[Pending]:
        """Nothing but the round."""
        del group
        return ()

    def detail(self) -> int | None:
        """Nothing but the kind."""
        return 0

    def accept(self, outcome: OperationOutcome) -> None:
        """The result of the round is all there is."""

    def parts(self) -> Sequence[torch.Tensor]:
        """Nothing beside the result."""
        return ()

    def imitate(self, watched: Watched) -> None:
        """Nothing."""
