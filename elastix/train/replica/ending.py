"""The last operation of a run."""

from collections.abc import Callable

import torch

from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.protocol.operation import RoundAlone


class Finish(RoundAlone):
    """A round in which all show that they have come to the end.

    Args:
        before: what rank 0 does before anybody leaves.
    """

    kind = 3
    reduce: Reduce = "max"

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before

    def payload(self, group: Group) -> torch.Tensor:
        """Nothing to tell; that all are here is enough."""
        if group.rank == 0:
            self._before()
        return torch.zeros(1)
