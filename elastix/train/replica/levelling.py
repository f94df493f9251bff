"""An operation: all workers go on from the State of one, where their processors differ.

Workers whose processors differ round differently, so their States part although nothing is wrong.
Now and then all are given that of one worker whose kind most have. It comes into memory of its own,
and is taken over when all have it, as with a step.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from blake3 import blake3

from elastix.comm.network import transfer
from elastix.comm.network.pending import Pending
from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.catch_up_messages import Watched
from elastix.comm.protocol.operation import OperationOutcome, RoundAlone
from elastix.state import State


class Levelling(RoundAlone):
    """One worker's part.

    Args:
        worker: this one.
        state: what it holds.
        adopt: takes the source's tensors over.
        processors: by member of the group, the kind of its processor.
        device: where the backend wants its buffers.
    """

    kind = OperationKind.LEVEL
    reduce: Reduce = "max"

    def __init__(
        self,
        worker: int,
        state: State,
        adopt: Callable[[State], None],
        processors: Callable[[], Mapping[int, int]],
        device: torch.device,
    ) -> None:
        self._worker = worker
        self._adopt = adopt
        self._processors = processors
        self._device = device
        shared = {n: t for n, t in state.tensors.items() if not n.startswith("@rng")}
        self._state = State(shared, state.meta)
        self._body, self._tensors = transfer.describe(self._state)
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._source = -1

    def launch(self, group: Group) -> Iterator[Pending]:
        """The source sends what it holds, piece by piece."""
        source = source_of(self._processors())
        received = []
        for chunk in transfer.chunks(self._tensors, self._device):
            yield group.broadcast(chunk, group.members.index(source))
            received.append(chunk.cpu())
        self._flat, self._source = torch.cat(received), source

    def payload(self, group: Group) -> torch.Tensor:
        """Whose State it is."""
        del group
        return torch.tensor([self._source], dtype=torch.int64, device="cpu")

    def detail(self) -> int:
        """What a State consists of."""
        told = repr(self._body["index"])
        return int.from_bytes(blake3(told.encode()).digest(8)) >> 2

    def accept(self, outcome: OperationOutcome) -> None:
        """All have it."""
        if int(outcome.result[0]) != self._worker:
            self._take_over(self._flat)

    def parts(self) -> list[torch.Tensor]:
        """What was sent."""
        return [self._flat]

    def imitate(self, watched: Watched) -> None:
        """Go on from it as well."""
        self._take_over(watched.parts[0])

    def _take_over(self, flat: torch.Tensor) -> None:
        tensors, rooms = transfer.rooms(self._body)
        for room, received in zip(rooms, flat.split([r.numel() for r in rooms]), strict=True):
            room.copy_(received)
        self._adopt(State(tensors, self._state.meta))


def source_of(processors: Mapping[int, int]) -> int:
    """Whose State all go on from: the first member's, of those whose kind most have.

    Args:
        processors: by member, in rank order.
    """
    ranks = list(processors.values())
    most = max(Counter(ranks).items(), key=lambda kind: (kind[1], -ranks.index(kind[0])))[0]
    return next(member for member, kind in processors.items() if kind == most)
