"""The last operation of a run."""

from collections.abc import Callable, Sequence

import torch

from elastix.comm.feed import Watched
from elastix.comm.group import Group, Pending, Reduce
from elastix.comm.operation import Left


class Finish:
    """A round in which all show that they have come to the end.

    Args:
        before: what rank 0 does before anybody leaves.
    """

    kind = 3
    reduce: Reduce = "max"

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before

    def prepare(self, generation: int) -> None:
        """Nothing."""

    def launch(self, group: Group) -> Sequence[Pending]:
        """Nothing but the round."""
        del group
        return ()

    def payload(self, group: Group) -> torch.Tensor:
        """Nothing to tell; that all are here is enough."""
        if group.rank == 0:
            self._before()
        return torch.zeros(1)

    def accept(self, left: Left) -> None:
        """That all are through is all there is."""

    def parts(self) -> Sequence[torch.Tensor]:
        """Nothing."""
        return ()

    def imitate(self, watched: Watched) -> None:
        """Nothing."""
