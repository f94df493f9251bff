"""A flat buffer that carries tensors through a reduction, out of place.

A bucket copies its tensors in, is reduced, and only when the step is agreed hands the result
back. What it copied from stays as it was, so it can be filled again for another group.

Not here: what is special about gradients (gradient_bucket) and buffers of modules (buffer_bucket).
"""

import contextlib
import mmap
from collections.abc import Sequence

import torch

from elastix.comm.network import shared_memory
from elastix.comm.network.pending import Pending
from elastix.comm.network.process_group import Group, Reduce
from elastix.sharding import local

_HUGE_FROM_BYTES = 4 << 20


class Bucket:
    """Room for some tensors, a flag for each, one more flag, and a count of samples.

    Flags are for gradients: set by whoever has one that counts, so that their sum tells whether
    anybody has. The one more is set by whoever finds that it has launched an earlier bucket too
    early. The count adds up the samples of all who took part.

    Attributes:
        missing: how many places are not filled yet.
        counts: whether the count is used; a bucket of low precision cannot count.
        pending: the reduction, once launched.
        shared: a large one lies where other workers of this host can see it.
        measured: the norm of the values is going to be asked for.
        views: the places, in the shapes of their tensors.
        room: the memory, where others can see it.
        rows: memory of the same length beside it in that room, for sums of slices.
    """

    def __init__(
        self, like: Sequence[torch.Tensor], reduce: Reduce, dtype: torch.dtype, aligned: int = 1
    ) -> None:
        """`aligned`: places begin at multiples of so many elements; between them are zeros."""
        self.reduce = reduce
        self.dtype = dtype
        self.counts = False
        self.pending: Pending | None = None
        self.shared = False
        self.measured = False
        self.room: shared_memory.SharedBuffer | None = None
        self.rows: list[torch.Tensor] = []
        self._rooms: list[shared_memory.SharedBuffer] = []
        self._like = [local(tensor.detach()) for tensor in like]
        self._lengths = [-(-tensor.numel() // aligned) * aligned for tensor in self._like]
        self.missing = len(like)

    def renew(self) -> None:
        """Take fresh memory, unfilled. The old may still be written by an abandoned operation."""
        elements = sum(self._lengths) + len(self._like) + 2
        self.flat = self._values = self._flags = torch.empty(0, dtype=self.dtype, device="cpu")
        self._stale = self._count = self.flat
        self.views: list[torch.Tensor] = []
        self._renew_memory(elements, len(self.rows))
        self._lay_out()
        self._forget()
        self.pending = None

    def _lay_out(self) -> None:
        """Find the places in `flat`."""
        pieces = torch.split(self.flat, [sum(self._lengths), len(self._like), 1, 1])
        self._values, self._flags, self._stale, self._count = pieces
        self.views = self._views_of(self._values)

    def _views_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The places in flat memory, in the shapes of their tensors."""
        places = torch.split(values, self._lengths)
        return [_shaped(piece, like) for piece, like in zip(places, self._like, strict=True)]

    def views_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The places in other memory as long as `flat`."""
        return self._views_of(flat[: self.elements])

    def provide(self, rows: int, *, anew: bool = False) -> None:
        """Have so many rows beside the memory, which is fresh then; if others can see it.

        Args:
            rows: how many.
            anew: even if there are as many.
        """
        if self.room is not None and (anew or rows != len(self.rows)):
            self.rows = [self.flat] * rows
            self.renew()

    def _renew_memory(self, elements: int, rows: int) -> None:
        """Memory that nobody uses, and its room if other workers can see it."""
        device = self._like[0].device if self._like else torch.device("cpu")
        size = elements * self.dtype.itemsize
        self.room, self.rows = None, []
        if not self.shared or device.type != "cpu" or size < shared_memory.FROM_BYTES:
            self.flat = fresh_memory(elements, self.dtype, device)
            return
        size *= 1 + rows
        self._rooms = [room for room in self._rooms if room.size == size or not room.free]
        self.room = next((r for r in self._rooms if r.size == size and r.free), None)
        if self.room is None:
            self.room = shared_memory.SharedBuffer(size)
            self._rooms.append(self.room)
        self.flat, *self.rows = self.room.tensors(self.dtype, 1 + rows)

    def begin(self) -> None:
        """A new step: nothing is filled."""
        if self.pending is not None and self.pending.writes:
            self.renew()  # the step before is void, and was under way in a group that was left
        self._forget()
        self.pending = None

    def restart(self) -> None:
        """The same step again, in another group: nothing is filled."""
        if self.pending is None or self.pending.let_go():
            self._forget()  # nothing writes here any more, and memory in use costs no page faults
        else:
            self.renew()
        self.pending = None

    def fill_missing(self, scales: Sequence[float], ratio: int) -> None:
        """Copy in whatever is not copied yet, times its ratio's scale; that of now is `ratio`."""

    def close(self, share: int) -> None:
        """Nothing more is filled in; it is about so many samples."""
        self._flag()
        self._stale.zero_()
        self._count.fill_(share if self.counts else 0)

    def launch(self, group: Group, share: int, stale: Sequence[torch.Tensor] = ()) -> None:
        """Start the reduction.

        Args:
            group: with whom.
            share: this worker's number of samples.
            stale: whether it has launched earlier buckets too early, each a bool.
        """
        self.close(share)
        for flag in stale:
            self._stale.logical_or_(flag.to(self._stale.device))
        measured = self.elements if self.measured else 0
        self.pending = group.all_reduce(self.flat, self.reduce, self.room, measured)

    @property
    def elements(self) -> int:
        """Of the values and what is between them, which come before the flags and the count."""
        return self._values.numel()

    def samples(self) -> float:
        """After the reduction: how many samples took part. Only where `counts`."""
        return float(self._count.item())

    def anybody_stale(self) -> bool:
        """After the reduction: whether anybody has launched an earlier bucket too early."""
        return bool(self._stale.item() != 0)

    def accept(self, factor: float) -> None:
        """The step is agreed: hand the values back, times `factor`."""

    def accepted(self) -> torch.Tensor:
        """After `accept`: a copy on the CPU of everything in the bucket."""
        return self.flat.detach().to("cpu", copy=True)

    def imitate(self, flat: torch.Tensor) -> None:
        """Accept what another replica has accepted; `flat` is what its `accepted` gave."""
        self.renew()
        self.flat.copy_(flat)

    def _flag(self) -> None:
        self._flags.fill_(1)

    def _forget(self) -> None:
        self.missing = len(self._like)


def fresh_memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody uses, all zeros, in huge pages.

    Ordinary pages are mapped in one by one when they are first written. For large buckets that
    takes the survivors of a loss longer than filling them.
    """
    size = elements * dtype.itemsize
    if device.type != "cpu" or size < _HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(elements, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first of `flat` in the shape of `like`, and in its memory layout if that is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat[: like.numel()].view(like.shape)
