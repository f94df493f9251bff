"""Where the gradients of a slice, or sums of those of a few slices, lie: of one worker and bucket.

Autograd gives each slice gradients in memory of their own. Copied to flat memory (`FlatRow`) they
are written, and read again when those of the next slice are added. Left where they are
(`KeptGradients`) they are read once, when there are two to add up. What is added to several sums
in turn (`add_up`) goes through all of them in pieces, which stay in a core's cache.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.errors import ConfigError

Combine = Callable[..., torch.Tensor]

_PIECE = 1 << 18
"""Elements: what is between two sums fits into a core's cache beside what is read."""


class FlatRow:
    """Memory like that of a bucket.

    Attributes:
        beside: it is the bucket's.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, *, beside: bool = False) -> None:
        self.flat = flat
        self.beside = beside
        self._bucket = bucket

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """The places of gradients, in the shapes of these."""
        return self._bucket.views_in(self.flat)

    @property
    def tail(self) -> torch.Tensor:
        """What comes after the values."""
        return self.flat[self._bucket.elements :]

    @property
    def into(self) -> "FlatRow":
        """Where the sum goes if something is added."""
        return self

    def put(self, place: int, gradient: torch.Tensor | None) -> None:
        """The first for that place; None for zeros."""
        into = self.views[place]
        into.zero_() if gradient is None else into.copy_(gradient.detach())

    def read(self, place: int) -> torch.Tensor:
        """What is there."""
        return self.views[place]

    def forget(self, place: int) -> None:
        """What is there is not needed any more."""


class KeptGradients:
    """Gradients of one slice, as autograd has left them. They are read, and never written to.

    Attributes:
        tail: what comes after the values, as in FlatRow.
        into: where the sum goes if something is added.
    """

    into: FlatRow

    def __init__(self, bucket: Bucket) -> None:
        self.tail = torch.empty_like(bucket.flat[bucket.elements :])
        self._bucket = bucket
        self._gradients: list[torch.Tensor | None] = [None] * len(bucket.views)
        self._versions = [0] * len(bucket.views)

    def put(self, place: int, gradient: torch.Tensor | None) -> None:
        """See FlatRow."""
        if gradient is None:
            gradient = torch.zeros_like(self._bucket.views[place])
        self._set(place, gradient.detach().clone() if gradient.requires_grad else gradient)

    def own(self) -> None:
        """Copy what others can write to, or could read. They are in `param.grad` still, too."""
        for place in range(len(self._gradients)):
            if not _is_sole(self._gradients, place):
                self._set(place, self.read(place).clone())

    def read(self, place: int) -> torch.Tensor:
        """See FlatRow.

        Raises:
            ConfigError: somebody has changed it.
        """
        gradient = self._gradients[place]
        if gradient is None:
            raise RuntimeError(f"the gradient at place {place} was added to a sum before")
        if gradient._version != self._versions[place]:
            raise ConfigError(
                "a gradient of a slice was changed in place after the next slice was asked for. "
                "The step was not taken; the run ends. Change a copy: parameter.grad.clone()."
            )
        return gradient

    def forget(self, place: int) -> None:
        """See FlatRow."""
        self._gradients[place] = None

    def copy_into(self, row: FlatRow) -> None:
        """All of them, and the tail."""
        for place, view in enumerate(row.views):
            view.copy_(self.read(place))
        row.tail.copy_(self.tail)

    def _set(self, place: int, gradient: torch.Tensor) -> None:
        self._gradients[place], self._versions[place] = gradient, gradient._version


Row = FlatRow | KeptGradients


def add_up(
    path: Sequence[tuple[Row, bool]], place: int, gradient: torch.Tensor | None, combine: Combine
) -> None:
    """Add a gradient to one sum, what comes of it to the next one, and so on.

    What comes of the last one goes into its `into`; what the others have there is not needed any
    more, and may be anything.

    Args:
        path: the sums, at least one; and of each, whether it is the left operand.
        place: of the gradient.
        gradient: None for zeros.
        combine: the operator, of single elements.

    Raises:
        ConfigError: somebody has changed one that was kept.
    """
    into = path[-1][0].into.views[place]
    new = torch.zeros_like(into) if gradient is None else gradient.detach()
    tensors = [new, *(row.read(place) for row, _ in path), into]
    last = len(path) - 1
    for total, *sums, out in _pieces(tensors) if last else [tensors]:
        for at, (there, (_, before)) in enumerate(zip(sums, path, strict=True)):
            left, right = (there, total) if before else (total, there)
            total = combine(left, right, out=out if at == last else None)
    for row, _ in path:
        row.forget(place)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """These, of one shape, piece by piece; in one if not all of them are contiguous."""
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(tensor.view(-1).split(_PIECE) for tensor in tensors), strict=True)


def _is_sole(gradients: Sequence[Any], place: int) -> bool:
    """Whether its memory is torch's, and but for `param.grad` nobody has it or a view of it."""
    if gradients[place] is None:
        return True
    memory, itself = _holders(gradients, place)
    known = gradients[place].untyped_storage().resizable()
    return known and memory <= _OWN_MEMORY and itself <= _OWN


def _holders(gradients: Sequence[Any], place: int) -> tuple[int, int]:
    """How many refer to a gradient's memory, and to itself."""
    gradient = gradients[place]
    memory = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return int(memory), sys.getrefcount(gradient) + gradient._use_count()


def _holders_of_sole() -> tuple[int, int]:
    parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
    gradients = [torch.empty(1, device="cpu")]
    parameter.grad = gradients[0]
    return _holders(gradients, 0)


_OWN_MEMORY, _OWN = _holders_of_sole()
