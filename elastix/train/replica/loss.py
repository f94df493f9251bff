"""The group's loss, for optimizers that decide by it: LBFGS, when it stops and how far it goes.

Each worker's closure gives the loss of its own share. Were decisions made by that, replicas would
part; so the optimizer is given the mean over the group. No Ray.
"""

from collections.abc import Callable
from typing import Any

import torch

from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.protocol.operation import RoundAlone


class MeanLoss(RoundAlone):
    """An operation: the mean of the workers' losses, weighed by their samples.

    Args:
        loss: of this worker's share.
        samples: how many it has; its loss counts for nothing if it has none.
    """

    kind = 5
    reduce: Reduce = "sum"

    def __init__(self, loss: float, samples: int) -> None:
        self._loss = loss
        self._samples = samples

    def payload(self, group: Group) -> torch.Tensor:
        """The sum over the share, and its size."""
        del group
        total = self._loss * self._samples if self._samples else 0.0
        return torch.tensor([total, self._samples], dtype=torch.float64)


def share_loss(optimizer: torch.optim.Optimizer, mean: Callable[[float], float]) -> None:
    """From now on the closures of an LBFGS optimizer return `mean(loss)`; others do not use it."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return

    def before_step(_optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
        closure = kwargs["closure"] if "closure" in kwargs else args[1]
        return args[:1], {"closure": lambda: mean(torch.as_tensor(closure()).item())}

    optimizer.register_step_pre_hook(before_step)
