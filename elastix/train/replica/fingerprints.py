"""Digests of a part of what a worker holds, to be compared with those of the others.

Looked at are parameters, persistent buffers as they were when the step began, and the tensors of
optimizers; what else was tracked is compared at checkpoints only. Taken when the step's gradient is
reduced and not agreed on: so a worker whose parameters have changed since the step before, even
while it computed, has no part in the step.

Not here: which bytes (sentinel), and what follows (step_commits).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from blake3 import blake3

from elastix.comm.gradients.slice_digests import number
from elastix.state import raw_bytes
from elastix.train.replica.sentinel import Rotation, all_of
from elastix.train.replica.tracked_objects import TrackedObjects


class Fingerprints:
    """One worker's.

    Args:
        tracked: its objects.
        buffers: as they were when the step began.
        rotation: whose turn it is.

    Attributes:
        parts: the digests that were taken last, by part of the State: 62 bits each.
    """

    def __init__(
        self,
        tracked: TrackedObjects,
        buffers: Callable[[], Sequence[torch.Tensor]],
        rotation: Rotation,
    ) -> None:
        self.parts: dict[str, int] = {}
        self._tracked = tracked
        self._buffers = buffers
        self._rotation = rotation
        self._sizes: list[int] = []  # of all tensors, in the step in hand; not known yet
        self._parameters = [
            (prefix.strip("@/") or "model", parameter)
            for prefix, module in tracked.modules.items()
            for parameter in module.parameters()
        ]
        self._of_modules = {"buffers", *(part for part, _ in self._parameters)}

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """With the part that each belongs to, in an order that all workers have."""
        found = [*self._parameters, *(("buffers", buffer) for buffer in self._buffers())]
        for name, other in self._tracked.others.items():
            if isinstance(other, torch.optim.Optimizer):
                found += [(name, tensor) for tensor in _slots(other)]
        return found

    def take(self, *, whole: bool = False) -> int:
        """Digest of the part whose turn it is, as a number that fits an int64 with either sign.

        Args:
            whole: of all there is, whosever turn it is.
        """
        tensors = self._tensors()
        self._sizes = _sizes(tensors)
        hashes = {part: blake3() for part in self._names()}
        pieces = all_of(self._sizes) if whole else self._rotation.pieces(self._sizes)
        for piece in pieces:
            part, tensor = tensors[piece.place]
            hashes[part].update(raw_bytes(tensor, piece.start, piece.stop).numpy().data)
        self.parts = {part: number(found) for part, found in hashes.items()}
        return number(blake3(repr(sorted(self.parts.items())).encode()))

    def over(self, step_us: int | None) -> None:
        """The step in hand is over.

        Args:
            step_us: how long it took the slowest worker; None if it does not count.
        """
        if step_us is not None:
            self._rotation.committed(self._sizes or _sizes(self._tensors()), step_us)
        self._sizes = []

    def numbers(self) -> list[int]:
        """What was taken last, by part, in an order that all workers have."""
        return [self.parts.get(part, 0) for part in self._names()]

    def named(self, numbers: Sequence[int]) -> Mapping[str, str]:
        """The digest of each part, from what `numbers` gave some worker."""
        return dict(zip(self._names(), map(str, numbers), strict=True))

    def _names(self) -> list[str]:
        optimizers = (
            name
            for name, other in self._tracked.others.items()
            if isinstance(other, torch.optim.Optimizer)
        )
        return sorted({*self._of_modules, *optimizers})


def _sizes(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
    return [tensor.nbytes for _, tensor in tensors]


def _slots(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer has gathered; one that came from a State may have another order in it."""
    return [
        slot[key]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (slot := optimizer.state.get(parameter))
        for key in sorted(slot)
        if isinstance(slot[key], torch.Tensor)
    ]
