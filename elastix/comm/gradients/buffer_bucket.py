"""A bucket of buffers of modules: what a step has changed in them, averaged over workers."""

from collections.abc import Sequence

import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.network.process_group import Reduce

WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Buffers of other types are carried as one that holds all their values."""


class BufferBucket(Bucket):
    """Buffers of modules: floating ones take the weighted mean, others the maximum.

    What is averaged is the change since the last step, so that constants stay what they are to
    the last bit. In a step of several ratios it is the sum of the changes under each.

    A buffer is written only if it has another value than it should, and in the way in which it was
    changed. Batch norm updates its statistics past their version counters, for a graph that was
    built before may still be used (a generator's, after the discriminator's step); a write that
    counts would make autograd refuse that graph. Where the counter has moved, ours moves it too.
    """

    def __init__(self, places: Sequence[tuple[torch.nn.Module, str]], reduce: Reduce) -> None:
        self._places = list(places)
        persistent = [name not in module._non_persistent_buffers_set for module, name in places]
        self._persistent = persistent
        self._held: torch.Tensor | None = None
        self._remembered = torch.empty(0)
        self._kept: list[torch.Tensor] = []  # the places in it
        self._seen = torch.empty(0)
        self._seen_places: list[torch.Tensor] = []
        tensors = self._tensors()
        super().__init__(tensors, reduce, WIDER.get(tensors[0].dtype, tensors[0].dtype))
        self._ends = torch.tensor([0, *(t.numel() for t in tensors)], device=tensors[0].device)
        self._ends = self._ends.cumsum(0)
        self._base = torch.empty(0)
        self._since = self._base  # the values when the ratio of now began
        self._moved: dict[int, torch.Tensor] = {}  # changes under earlier ones
        self._highest: torch.Tensor | None = None  # over slices, of what takes the maximum
        self._versions: list[int] = []
        self._filled_with = self._base  # the values that were copied in
        self._filled_at: list[int] = []  # their versions then
        self._over: torch.Tensor | None = None  # the values at the end of backward
        self._counted = all(_counts_passes(module) for module, _ in places)

    def begin(self) -> None:
        """See Bucket."""
        super().begin()
        self._over = None

    def rebase(self) -> None:
        """All workers hold the same values now: changes count from here."""
        tensors = self._tensors()
        _copy(self.views, tensors)
        self._base = self._values.clone()
        self._from_base()
        self._versions = [tensor._version for tensor in tensors]

    def _from_base(self) -> None:
        self._since, self._moved, self._highest = self._base, {}, None

    def begin_slices(self) -> None:
        """A step in slices begins: each of them starts from the values of now."""
        self._held = self._since = self._flat()

    def count_from_now(self) -> None:
        """Whatever changed the values since the last step has done so on all workers alike."""
        self._base = self._flat()
        self._from_base()

    def end_slice(self, ratio: int, counts: bool) -> None:
        """A slice was computed: keep what it has changed, if it counts, and put back the rest."""
        if counts and self.reduce == "sum":
            self._add_moved(ratio, self._flat(), self._base)
        elif counts:
            now, before = self._flat(), self._highest
            self._highest = now if before is None else torch.maximum(now, before)
        if self._held is not None:
            self._write(self._held)

    def _look(self) -> torch.Tensor:
        """The values of now, in the order of the bucket, where the next call writes as well."""
        if not self._seen_places:
            self._seen = torch.empty_like(self._values)
            self._seen_places = self._views_of(self._seen)
        _copy(self._seen_places, self._tensors())
        return self._seen

    def _flat(self) -> torch.Tensor:
        """A copy of the values of now, in the order of the bucket and apart from its memory."""
        return self._look().clone()

    def turn_from(self, ratio: int) -> None:
        """The passes of `ratio` are over for now."""
        if self.reduce != "sum":
            return
        now = self._flat()
        self._add_moved(ratio, now, self._since)
        self._since = now

    def _add_moved(self, ratio: int, now: torch.Tensor, since: torch.Tensor) -> None:
        change = (now - since).masked_fill_(now == since, 0)  # also where both are infinite
        self._moved[ratio] = self._moved[ratio] + change if ratio in self._moved else change

    def hold(self) -> None:
        """Remember the values before a forward pass that does not count."""
        self._held = self._flat()

    def let_go(self) -> None:
        """The forward pass counts after all."""
        self._held = None

    def undo(self) -> None:
        """Put back what was held. After backward, which may still need what forward left."""
        if self._held is not None:
            self._write(self._held)
        self._held = None

    def remember(self) -> None:
        """The values of now may have to be put back."""
        self._make_room()
        _copy(self._kept, self._tensors())

    def remember_accepted(self) -> None:
        """The same after `accept` or `imitate`, when buffers have the values of the bucket."""
        self._make_room()
        self._remembered.copy_(self._values)

    def _make_room(self) -> None:
        if not self._kept:
            self._remembered = torch.empty_like(self._values)
            self._kept = self._views_of(self._remembered)

    @property
    def remembered(self) -> list[torch.Tensor]:
        """What would be put back, of those that are part of a State."""
        pairs = zip(self._kept, self._persistent, strict=False)
        return [tensor for tensor, persistent in pairs if persistent]

    def put_back(self) -> None:
        """Put back what was remembered."""
        if self._kept:
            self._write(self._remembered)
        self._from_base()

    def fill_missing(self, scales: Sequence[float], ratio: int) -> None:
        """Copy all buffers in; those of floating point as their change, times its scale."""
        if self.missing:
            self._fill(self._look(), scales, ratio)

    def fill_early(self, scales: Sequence[float], ratio: int) -> None:
        """The same while backward goes on: what a pass that does not count will be put back to."""
        self._fill(self._look() if self._held is None else self._held, scales, ratio)

    def _fill(self, now: torch.Tensor, scales: Sequence[float], ratio: int) -> None:
        self._over = None
        self._filled_with = now.clone()
        self._filled_at = [tensor._version for tensor in self._tensors()]
        if self.reduce == "sum":
            torch.sub(now, self._since, out=self._values).mul_(scales[ratio])
            same = now == self._since  # also where both are infinite, as in a mask
            self._values.masked_fill_(same, 0)
            for of, change in self._moved.items():
                self._values.add_(change, alpha=scales[of])
        elif self._highest is not None:
            torch.maximum(now, self._highest, out=self._values)
        else:
            self._values.copy_(now)
        self.missing = 0

    def moved(self) -> bool:
        """At the end of backward: whether buffers have changed since they were copied in.

        Statistics of batch norm have done so if a count of batches has, in a bucket of its own.
        """
        tensors = self._tensors()
        if self._counted and self._filled_at == [tensor._version for tensor in tensors]:
            self._over = self._filled_with
            return False
        self._over = self._look()
        return not torch.equal(self._over, self._filled_with)

    def accept(self, factor: float) -> None:
        """The step is agreed: buffers change in place."""
        if self.reduce == "sum":
            self._values.mul_(factor).add_(self._base)
            self._base.copy_(self._values)
        self._from_base()
        self._write(self._values, self._over)

    def imitate(self, flat: torch.Tensor) -> None:
        """Buffers become those of the other replica."""
        super().imitate(flat)
        if self.reduce == "sum":
            self._base.copy_(self._values)
        self._from_base()
        self._write(self._values)

    def _tensors(self) -> list[torch.Tensor]:
        try:  # one may have been given to its module anew; get_buffer takes ten times as long
            return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]
        except KeyError:
            return [module.get_buffer(name) for module, name in self._places]

    def _write(self, values: torch.Tensor, now: torch.Tensor | None = None) -> None:
        """Buffers take these values, as the class says.

        Args:
            values: laid out as the bucket is.
            now: likewise what they have now, if that is known.
        """
        tensors = self._tensors()
        differ = (self._look() if now is None else now) != values
        if bool(differ.any()):
            up_to = torch.nn.functional.pad(differ.cumsum(0), (1, 0))[self._ends]
            places = (up_to[1:] != up_to[:-1]).nonzero().flatten().tolist()
            wanted = self.views if values is self._values else self._views_of(values)
            moved = {p for p in places if tensors[p]._version != self._versions[p]}
            silent = [p for p in places if p not in moved]
            with torch.no_grad():
                for place in moved:
                    tensors[place].copy_(wanted[place])
                if silent:
                    into = [tensors[p].data for p in silent]
                    torch._foreach_copy_(into, [wanted[p] for p in silent])
        self._versions = [tensor._version for tensor in tensors]


def _counts_passes(module: torch.nn.Module) -> bool:
    """Whether no forward pass changes buffers unless it changes the version of one of them.

    Batch norm does not move the versions of its statistics, but that of its count of batches.
    """
    batch_norm = type(module).forward is torch.nn.modules.batchnorm._BatchNorm.forward
    return batch_norm and module._buffers.get("num_batches_tracked") is not None


def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(into, tensors)
