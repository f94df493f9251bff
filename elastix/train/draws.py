"""What a worker has drawn for the step in hand, so that all can be seen to draw alike. Pure.

Counted are global batches and how they are split, not a worker's own share of them, which may be
empty. A hash goes into the commit round of the step (ballot). Only if it differs is the rest told.

Left out is how often backward ran: within `ctx.accumulate` a worker may leave out the pass of a
micro-batch that has nothing to learn from, which adds as little as a loss of zero. It must enter
`ctx.accumulate` all the same, which tells all alike that there may have been a pass between two
batches; how the second is split depends on that.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from blake3 import blake3

from elastix.comm.group import Group, Reduce
from elastix.comm.operation import RoundAlone
from elastix.data.cursor import count, merge
from elastix.data.loader import Loader

_NOBODY = -1


@dataclass(frozen=True)
class Drawn:
    """One worker's account.

    Attributes:
        batches, samples: drawn since the last step.
        first, stop: positions of the stream from the lowest that was drawn to above the highest.
        mark: a hash of all of it; equal for equal draws. Fits an int64, with either sign.
    """

    batches: int
    samples: int
    first: int
    stop: int
    mark: int

    def __str__(self) -> str:
        if not self.batches:
            return "no batch"
        number = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        return f"{number} ({self.samples} samples, positions {self.first} to {self.stop - 1})"


def drawn(loaders: Sequence[Loader]) -> Drawn:
    """The account of these loaders."""
    batches = [
        (loader.number, draw.epoch, merge(draw.spans), draw.members, [*map(count, draw.shares)])
        for loader in loaders
        for draw in loader.drawn
    ]
    spans = [span for _, _, batch, _, _ in batches for span in batch]
    return Drawn(
        batches=len(batches),
        samples=count(spans),
        first=min((start for start, _ in spans), default=0),
        stop=max((stop for _, stop in spans), default=0),
        mark=int.from_bytes(blake3(repr(batches).encode()).digest(8)) >> 2,
    )


class RollCall(RoundAlone):
    """A round in which each tells all others what it has drawn."""

    kind = 4
    reduce: Reduce = "max"

    def __init__(self, worker: int, mine: Drawn) -> None:
        self._row = [worker, *astuple(mine)]

    def payload(self, group: Group) -> torch.Tensor:
        """One row for each member, of which this worker fills its own."""
        table = torch.full((group.size, len(self._row)), _NOBODY)
        table[group.rank] = torch.tensor(self._row)
        return table


def called(result: torch.Tensor) -> dict[int, Drawn]:
    """By worker, what the roll call gave."""
    return {row[0]: Drawn(*row[1:]) for row in result.tolist()}
