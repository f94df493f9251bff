"""Where the gradients of a slice, or sums of those of a few slices, lie: of one worker and bucket.

Autograd gives each slice gradients in memory of their own. Copied to flat memory (`FlatRow`) they
are written, and read again when those of the next slice are added. Left where they are
(`KeptGradients`) they are read once, when there are two to add up.
"""

from collections.abc import Callable
from functools import cached_property

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
    """Gradients of one slice, as autograd has left them; or of a few slices, added up in them.

    One whose memory is somebody else's, too, is copied: autograd gives two parameters the same if
    it sends both the same gradient. Whoever still has a slice's gradient when the next slice has
    one sees the sum in it, as where autograd adds up.

    Attributes:
        tail: what comes after the values, as in FlatRow.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.tail = torch.empty_like(bucket.flat[bucket.elements :])
        self._bucket = bucket
        self._gradients: list[torch.Tensor | None] = [None] * len(bucket.views)
        self._versions = [0] * len(bucket.views)
        self._into: FlatRow | None = None

    @property
    def into(self) -> "FlatRow | KeptGradients":
        """See FlatRow."""
        return self if self._into is None else self._into

    @into.setter
    def into(self, row: FlatRow) -> None:
        """What is added next goes there, together with what there is."""
        self._into = row

    def put(self, place: int, gradient: torch.Tensor | None) -> None:
        """See FlatRow."""
        if gradient is None:
            gradient = torch.zeros_like(self._bucket.views[place])
        elif gradient.requires_grad or not _is_sole(gradient):
            gradient = gradient.detach().clone()
        self._set(place, gradient)

    def add(
        self, place: int, gradient: torch.Tensor | None, combine: Combine, *, before: bool
    ) -> torch.Tensor:
        """See FlatRow."""
        mine = self._get(place)
        out = mine if self._into is None else self._into.views[place]
        self._set(place, _added(mine, gradient, combine, out, before=before))
        return out

    def drop(self, place: int) -> None:
        """It was added to another sum."""
        self._gradients[place] = None

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
            raise RuntimeError(f"the gradient at place {place} was added to another sum before")
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


def _is_sole(gradient: torch.Tensor) -> bool:
    """Whether its memory is torch's, and nobody has another tensor in it."""
    return gradient.untyped_storage().resizable() and _referring_to(gradient) == _ONE


def _referring_to(gradient: torch.Tensor) -> int:
    storage = gradient.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


_ONE = _referring_to(torch.empty(1, device="cpu"))
