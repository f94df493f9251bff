"""Operations that are a round and nothing else: roll calls, the end of a run, means of numbers.

The mean loss is for optimizers that decide by it: LBFGS, when it stops and how far it goes. Each
worker's closure gives the loss of its own share. Were decisions made by that, replicas would part;
so the optimizer is given the mean over the group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.operation import RoundAlone


class Finish(RoundAlone):
    """A round in which all show that they have come to the end.

    Args:
        before: what rank 0 does before anybody leaves.
    """

    kind = OperationKind.END
    reduce: Reduce = "max"

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before

    def payload(self, group: Group) -> torch.Tensor:
        """Nothing to tell; that all are here is enough."""
        if group.rank == 0:
            self._before()
        return torch.zeros(1, device="cpu")


class RollCall(RoundAlone):
    """A round in which each tells all others some numbers; see `told`.

    Args:
        kind: what they are about; a roll call of one kind does not meet one of another.
        worker: this one.
        numbers: each fits an int64; if others have more or fewer, the run ends with an error.
    """

    reduce: Reduce = "max"

    def __init__(self, kind: OperationKind, worker: int, numbers: Sequence[int]) -> None:
        self.kind = kind
        self._row = [worker, *numbers]

    def detail(self) -> int:
        """How many numbers, on which the size of the payload depends."""
        return len(self._row)

    def payload(self, group: Group) -> torch.Tensor:
        """One row for each member, of which this worker fills its own."""
        table = torch.full((group.size, len(self._row)), torch.iinfo(torch.int64).min, device="cpu")
        table[group.rank] = torch.tensor(self._row, device="cpu")
        return table


def told(result: torch.Tensor) -> dict[int, list[int]]:
    """By worker, the numbers that it gave in a roll call with this result."""
    return {worker: numbers for worker, *numbers in result.tolist()}


class Regroup(RoundAlone):
    """A round that tells nothing: whoever leaves it knows which generation all have come to."""

    kind = OperationKind.REGROUP
    reduce: Reduce = "max"

    def payload(self, group: Group) -> torch.Tensor:
        """A number that nobody looks at."""
        del group
        return torch.zeros(1, dtype=torch.int64, device="cpu")


class GroupMean(RoundAlone):
    """An operation: the means of the workers' numbers, weighed by their samples.

    Args:
        kind: who asks; a mean of one kind does not meet one of another.
        values: by name, over this worker's share; the same names on all workers.
        samples: how many it has; its numbers count for nothing if it has none. None if that is not
            known, of a newcomer say: then they count if nobody knows more of its own, all alike.
    """

    reduce: Reduce = "sum"

    def __init__(
        self, kind: OperationKind, values: Mapping[str, float], samples: int | None
    ) -> None:
        self.kind = kind
        self._values = dict(sorted(values.items()))
        self._samples = samples

    def payload(self, group: Group) -> torch.Tensor:
        """The size of the share, and the sums over it; the same of those who know no size."""
        del group
        rows = [
            [weight, *(v * weight if weight else 0.0 for v in self._values.values())]
            for weight in (self._samples or 0, int(self._samples is None))
        ]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def detail(self) -> int:
        """The names."""
        return int.from_bytes(blake3(repr(list(self._values)).encode()).digest(8)) >> 2

    def means(self, result: torch.Tensor, empty: float = float("nan")) -> dict[str, float]:
        """By name; `empty` if nobody is left who had samples: still the same on all."""
        known, unknown = result.tolist()
        samples, *sums = known if known[0] else unknown
        means = [total / samples if samples else empty for total in sums]
        return dict(zip(self._values, means, strict=True))


def share_loss(optimizer: torch.optim.Optimizer, mean: Callable[[float], float]) -> None:
    """From now on the closures of an LBFGS optimizer return `mean(loss)`; others do not use it."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return

    def before_step(_optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
        closure = kwargs["closure"] if "closure" in kwargs else args[1]
        return args[:1], {"closure": lambda: mean(torch.as_tensor(closure()).item())}

    optimizer.register_step_pre_hook(before_step)
