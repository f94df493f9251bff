"""A bucket of buffers of modules: what a step has changed in them, averaged over workers."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.network.process_group import Reduce
from elastix.errors import ConfigError

WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Buffers of other types are carried as one that holds all their values."""


class BufferBucket(Bucket):
    """Buffers of modules: floating ones take the weighted mean, others the maximum.

    That is over those who had samples, and over slices: what they began with is not in it.

    What is averaged is the change since the last step, so that constants stay what they are to
    the last bit. In a step of several ratios it is the sum of the changes under each. What was
    infinite or not a number has no change that could be added up: it is averaged by its value.

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
        self._remembered = torch.empty(0, device="cpu")
        self._kept: list[torch.Tensor] = []  # the places in it
        self._seen = torch.empty(0, device="cpu")
        self._seen_places: list[torch.Tensor] = []
        tensors: list[Any] = [module._buffers[name] for module, name in self._places]
        super().__init__(tensors, reduce, WIDER.get(tensors[0].dtype, tensors[0].dtype))
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._known = tensors  # as they were when last looked at: of these kinds
        self._ends = torch.tensor([0, *(t.numel() for t in tensors)], device=tensors[0].device)
        self._ends = self._ends.cumsum(0)
        self._base = torch.empty(0, device="cpu")
        self._unbounded: torch.Tensor | None = None  # where these are not finite; None: nowhere
        self._sliced = False  # the step is one in slices
        self._since = self._base  # the values when the ratio of now began
        self._moved: dict[int, torch.Tensor] = {}  # changes under earlier ones
        self._highest: torch.Tensor | None = None  # over slices, of what takes the maximum
        self._versions: list[int] = []
        self._filled_with = self._base  # the values that were copied in
        self._over: torch.Tensor | None = None  # the values at the end of backward

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
        self._sliced, self._unbounded = False, None
        if self.reduce == "sum":
            finite = torch.isfinite(self._base)
            self._unbounded = None if bool(finite.all()) else ~finite

    def begin_slices(self) -> None:
        """A step in slices begins: each of them starts from the values of now."""
        self._held = self._since = self._flat()
        self._sliced = True

    def count_from_now(self) -> None:
        """Whatever changed the values since the last step has done so on all workers alike."""
        self._base = self._flat()
        self._from_base()

    def end_slice(self, ratio: int, counts: bool) -> None:
        """A slice was computed: keep what it has changed, if it counts, and put back the rest."""
        if counts and self.reduce == "sum":
            now = self._flat()
            change = self._change(now, self._base)
            if self._unbounded is not None:
                change = torch.where(self._unbounded, now, change)
            self._add_moved(ratio, change)
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
        tensors = self._tensors()
        if [tensor.numel() for tensor in tensors] != self._sizes:  # resized where they were
            for place, tensor in enumerate(tensors):
                self._check(place, tensor)
        _copy(self._seen_places, tensors)
        return self._seen

    def _flat(self) -> torch.Tensor:
        """A copy of the values of now, in the order of the bucket and apart from its memory."""
        return self._look().clone()

    def turn_from(self, ratio: int) -> None:
        """The passes of `ratio` are over for now."""
        if self.reduce != "sum":
            return
        now = self._flat()
        self._add_moved(ratio, self._change(now, self._since))
        self._since = now

    def _add_moved(self, ratio: int, change: torch.Tensor) -> None:
        self._moved[ratio] = self._moved[ratio] + change if ratio in self._moved else change

    def _change(
        self, now: torch.Tensor, since: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """From these values to those; 0 where there is none to speak of."""
        change = torch.sub(now, since, out=out).masked_fill_(now == since, 0)  # also inf - inf
        return change if self._unbounded is None else change.masked_fill_(self._unbounded, 0)

    def hold(self) -> None:
        """Remember the values before a forward pass that does not count."""
        self._held = self._flat()

    def let_go(self) -> None:
        """The forward pass counts after all."""
        self._held, self._sliced = None, False

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
        if self.reduce == "sum":
            scale = scales[ratio]
            self._change(now, self._since, out=self._values).mul_(scale)
            if not scale:
                self._values.zero_()  # 0 * inf is no number
            elif self._unbounded is not None and not self._sliced:
                torch.where(self._unbounded, now * scale, self._values, out=self._values)
            for of, change in self._moved.items():
                if scales[of]:
                    self._values.add_(change, alpha=scales[of])
        elif self._highest is not None:
            self._values.copy_(self._highest)
        elif self._sliced or not any(scales):
            self._values.fill_(torch.iinfo(self._values.dtype).min)
        else:
            self._values.copy_(now)
        self.missing = 0

    def moved(self) -> torch.Tensor:
        """At the end of backward: whether buffers have changed since they were copied in.

        On their device, as nobody here has to know: to read it would be to wait for a GPU.
        """
        self._over = self._look()
        return (self._over != self._filled_with).any()

    def accept(self, factor: float) -> None:
        """The step is agreed: buffers change in place."""
        if self.reduce == "sum":
            known = self._base
            if self._unbounded is not None:
                known = known.masked_fill(self._unbounded, 0)
            self._values.mul_(factor).add_(known)
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

    def holds(self) -> set[int]:
        """The ids of the buffers as they are now."""
        return set(map(id, self._tensors()))

    def _tensors(self) -> list[torch.Tensor]:
        # One may have been given to its module anew; get_buffer takes ten times as long.
        tensors: list[Any] = [module._buffers.get(name) for module, name in self._places]
        if not all(map(operator.is_, tensors, self._known)):
            for place, (tensor, known) in enumerate(zip(tensors, self._known, strict=True)):
                if tensor is not known:
                    self._check(place, tensor)
            self._known = tensors
        return tensors

    def _check(self, place: int, tensor: torch.Tensor | None) -> None:
        """That it can be averaged as the buffer that was prepared.

        Raises:
            ConfigError: it cannot; names it.
        """
        dtype, shape = self._kinds[place]
        if tensor is None:
            now = "gone"
        elif (tensor.dtype, tensor.shape) != (dtype, shape):
            now = f"{tensor.dtype}{list(tensor.shape)} now"
        elif tensor.is_inference():
            now = "a tensor of inference mode now"
        elif overlaps(tensor):
            now = "expanded from fewer elements now"
        else:
            return
        module, name = self._places[place]
        raise ConfigError(
            f"buffer {name} of {type(module).__name__} was {dtype}{list(shape)} at ctx.prepare "
            f"and is {now}, so workers cannot average it. The step was not taken; the run ends. "
            "Give buffers their type and shape before ctx.prepare, by a forward pass if need be, "
            "and clone what is expanded or computed in inference mode."
        )

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


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that they cannot be written one by one."""
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(into, tensors)
