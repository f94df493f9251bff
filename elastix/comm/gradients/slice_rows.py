"""Where the gradients of a slice, or sums of those of a few slices, lie: of one worker and bucket.

Autograd gives each slice gradients in memory of their own. Copied to flat memory (`FlatRow`) they
are written, and read again when those of the next slice are added. Left where they are
(`KeptGradients`) they are read once, when there are two to add up.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.errors import ConfigError

Combine = Callable[..., torch.Tensor]


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
        into.zero_() if gradient is None else into.copy_(gradient)

    def add(
        self, place: int, gradient: torch.Tensor | None, combine: Combine, *, before: bool
    ) -> torch.Tensor:
        """Add one to what is there.

        Args:
            place: which.
            gradient: None for zeros.
            combine: the operator.
            before: what is there is its left operand.

        Returns:
            The sum.
        """
        return _added(self.views[place], gradient, combine, self.views[place], before=before)


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
                self._set(place, self._get(place).clone())

    def add(
        self, place: int, gradient: torch.Tensor | None, combine: Combine, *, before: bool
    ) -> torch.Tensor:
        """See FlatRow. What was there is not needed any more."""
        total = _added(self._get(place), gradient, combine, self.into.views[place], before=before)
        self._gradients[place] = None
        return total

    def copy_into(self, row: FlatRow) -> None:
        """All of them, and the tail."""
        for place, view in enumerate(row.views):
            view.copy_(self._get(place))
        row.tail.copy_(self.tail)

    def _set(self, place: int, gradient: torch.Tensor) -> None:
        self._gradients[place], self._versions[place] = gradient, gradient._version

    def _get(self, place: int) -> torch.Tensor:
        gradient = self._gradients[place]
        if gradient is None:
            raise RuntimeError(f"the gradient at place {place} was added to a sum before")
        if gradient._version != self._versions[place]:
            raise ConfigError(
                "a gradient of a slice was changed in place after the next slice was asked for. "
                "The step was not taken; the run ends. Change a copy: parameter.grad.clone()."
            )
        return gradient


def _added(
    mine: torch.Tensor,
    gradient: torch.Tensor | None,
    combine: Combine,
    out: torch.Tensor,
    *,
    before: bool,
) -> torch.Tensor:
    if gradient is None:
        return torch.add(mine, 0, out=out)  # -0.0 becomes 0.0
    left, right = (mine, gradient) if before else (gradient, mine)
    return combine(left, right, out=out)


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
