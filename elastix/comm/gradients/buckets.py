"""Flat buffers that carry gradients and module buffers through a reduction, out of place.

A bucket copies its tensors in, is reduced, and only when the step is agreed hands the result
back. What it copied from stays as it was, so it can be filled again for another group.
"""

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastix.comm.network import shared_memory
from elastix.comm.network.process_group import Group, Pending, Reduce
from elastix.errors import ConfigError
from elastix.sharding import is_sharded, like, local

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that reducing starts early."""

BUCKET_BYTES = 25 << 20
"""A bucket is closed when it holds so many bytes of gradients."""

_HUGE_FROM_BYTES = 4 << 20
_EXACT = (torch.float32, torch.float64)  # count samples without rounding
_REDUCED = (
    *_EXACT,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
"""What backends can add up, or take the maximum of."""

_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Buffers of other types are carried as one that holds all their values."""


class Bucket:
    """Room for some tensors, a flag for each, and a count of samples.

    Flags are for gradients: set by whoever has one that counts, so that their sum tells whether
    anybody has. The count adds up the samples of all who took part.

    Attributes:
        missing: how many places are not filled yet.
        counts: whether the count is used; a bucket of low precision cannot count.
        pending: the reduction, once launched.
        shared: a large one lies where other workers of this host can see it.
        measured: the norm of the values is going to be asked for.
        views: the places, in the shapes of their tensors.
    """

    def __init__(self, like: Sequence[torch.Tensor], reduce: Reduce, dtype: torch.dtype) -> None:
        self.reduce = reduce
        self.dtype = dtype
        self.counts = False
        self.pending: Pending | None = None
        self.shared = False
        self.measured = False
        self.room: shared_memory.SharedBuffer | None = None
        self._rooms: list[shared_memory.SharedBuffer] = []
        self._like = [local(tensor.detach()) for tensor in like]
        self.missing = len(like)

    def renew(self) -> None:
        """Take fresh memory, unfilled. The old may still be written by an abandoned operation."""
        elements = sum(tensor.numel() for tensor in self._like) + len(self._like) + 1
        self.flat = self._values = self._flags = self._count = torch.empty(0, dtype=self.dtype)
        self.views: list[torch.Tensor] = []
        self.room, self.flat = self._memory(elements)
        self._lay_out()
        self._forget()
        self.pending = None

    def _lay_out(self) -> None:
        """Find the places in `flat`."""
        sizes = [tensor.numel() for tensor in self._like]
        self._values, self._flags, self._count = torch.split(self.flat, [sum(sizes), len(sizes), 1])
        self.views = self._views_of(self._values)

    def _views_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The places in flat memory, in the shapes of their tensors."""
        places = torch.split(values, [tensor.numel() for tensor in self._like])
        return [_shaped(piece, like) for piece, like in zip(places, self._like, strict=True)]

    def exchange(self, other: torch.Tensor | None) -> torch.Tensor:
        """Give the memory away, as it is, and go on in other memory of the same kind.

        It must not be in use by a reduction, nor by gradients that were handed back.

        Args:
            other: what an earlier call gave; None: new memory.

        Returns:
            The memory: a flat tensor.
        """
        given, self.room = self.flat, None
        self.flat = _memory(len(given), self.dtype, given.device) if other is None else other
        self._lay_out()
        return given

    def _memory(self, elements: int) -> tuple[shared_memory.SharedBuffer | None, torch.Tensor]:
        """Memory that nobody uses, and its room if other workers can see it."""
        device = self._like[0].device if self._like else torch.device("cpu")
        size = elements * self.dtype.itemsize
        if not self.shared or device.type != "cpu" or size < shared_memory.FROM_BYTES:
            return None, _memory(elements, self.dtype, device)
        room = next((room for room in self._rooms if room.free), None)
        if room is None:
            room = shared_memory.SharedBuffer(size)
            self._rooms.append(room)
        return room, room.tensor(self.dtype)

    def begin(self) -> None:
        """A new step: nothing is filled."""
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
        self._count.fill_(share if self.counts else 0)

    def launch(self, group: Group, share: int) -> None:
        """Start the reduction; `share` is this worker's number of samples."""
        self.close(share)
        measured = self.elements if self.measured else 0
        self.pending = group.all_reduce(self.flat, self.reduce, self.room, measured)

    @property
    def elements(self) -> int:
        """Of the values, which come before the flags and the count."""
        return self._values.numel()

    def samples(self) -> float:
        """After the reduction: how many samples took part. Only where `counts`."""
        return float(self._count.item())

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


class GradientBucket(Bucket):
    """Gradients of some parameters. They come back as views of the bucket, not as copies.

    If they travel in a narrower type than theirs, they come back in memory of their own type, which
    is used again in the next step. What they are is told by the narrow values alone, so whoever is
    sent these, or has reduced them, has the same gradients to the last bit.

    Those of passes with different ratios are kept apart: `param.grad` is of the ratio of the last
    pass that used the parameter, and earlier ones are moved aside. A gradient that was dropped or
    zeroed by the user takes with it what was moved aside before.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], wire: torch.dtype | None = None
    ) -> None:
        own = parameters[0].dtype
        self._narrow = wire is not None and own in _EXACT
        super().__init__(parameters, "sum", wire if wire is not None and self._narrow else own)
        self.parameters = list(parameters)
        self._home = torch.empty(0)  # where gradients come back
        self._homes: list[torch.Tensor] = []  # the places in it
        self._sharded = any(map(is_sharded, parameters))
        self._parts: list[_Parts] = []  # only in a step of several ratios
        self._before: list[torch.Tensor | None] = []  # gradients that a step in slices began with
        self._versions: dict[int, int] = {}  # in such a step: of gradients, when last added to
        self._used = [False] * len(parameters)
        self._filled = [False] * len(parameters)
        self._spent: list[torch.Tensor | None] = []
        self._given: list[weakref.ref[torch.Tensor] | None] = []  # gradients, as handed back
        self._given_at = 0  # version of our memory then
        self._left = False  # they are the user's still, as they were
        # While a step is added up: local gradients, as autograd has left them, and the version of
        # the memory that they lie in. Some share it.
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._noted_at: dict[int, int] = {}
        self._idle = 0

    def _lay_out(self) -> None:
        """See Bucket."""
        super()._lay_out()
        self._make_home()

    def _make_home(self) -> None:
        """From now on whoever else refers to where gradients come back is a user."""
        self._home, self._homes = self.flat, self.views
        if self._narrow:
            own = self.parameters[0]
            self._home = _memory(self.elements, own.dtype, self.flat.device)
            self._homes = self._views_of(self._home)
        self._idle = self._references()

    def _references(self) -> int:
        """How many refer to that memory: we do, gradients do, and what users made of those."""
        storage = torch._C._storage_Use_Count(self._home.untyped_storage()._cdata)
        views: list[Any] = self._homes
        return int(storage + sum(sys.getrefcount(v) + v._use_count() for v in views))

    def begin(self) -> None:
        """A new step. Gradients that somebody still holds live in our memory: it is theirs now."""
        super().begin()
        if self._references() != self._idle:
            self._make_home() if self._narrow else self.renew()
        # Local gradients of the step before are freed here, where backward is about to take as
        # much memory again; freed at its end, the memory goes back to the system and costs faults.
        self._spent = []

    def note(self, place: int) -> None:
        """A gradient was added to `param.grad`, and the step is not over."""
        gradient = self.parameters[place].grad
        if gradient is not None and not is_sharded(gradient) and not gradient.is_sparse:
            memory = _memory_of(gradient)
            self._noted[place] = weakref.ref(gradient), memory
            self._noted_at[memory] = gradient._version

    def changed(self, but: int | None = None) -> bool:
        """Whether somebody has changed such a gradient since. To drop or zero it is allowed.

        Args:
            but: a place to which autograd has just added.
        """
        added = None if but is None else self.parameters[but].grad
        since = None if added is None or added.is_sparse else _memory_of(added)
        for place, (noted, memory) in self._noted.items():
            gradient = self.parameters[place].grad
            if gradient is None or place == but:
                continue
            version = self._noted_at[memory] + (memory == since)
            same = noted() is gradient and gradient._version == version
            if not same and bool(local(gradient).any()):
                return True
        return False

    def look_for_left(self, place: int | None) -> None:
        """A step begins: find out whether gradients are those that were handed back in the last.

        Args:
            place: to whose gradient autograd has just added; None for none in this bucket.
        """
        added = place is not None and self._is_given(place)
        self._left = bool(self._given) and self._home._version == self._given_at + added

    def adds_to_left(self, place: int) -> bool:
        """Whether autograd has just added to a gradient of the last step, with no trace of a zero.

        By way of .data it may have been zeroed all the same.
        """
        return self._left and self._is_given(place)

    def still_left(self, but: int | None) -> bool:
        """Whether there is a gradient of the last step that is not zero, at another place."""
        places = (place for place in range(len(self._given) * self._left) if place != but)
        given = (self.parameters[place].grad for place in places if self._is_given(place))
        return any(bool(local(gradient).any()) for gradient in given if gradient is not None)

    def forget_left(self) -> None:
        """They were zeroed."""
        self._left = False

    def _is_given(self, place: int) -> bool:
        given = self._given[place] if self._given else None
        return given is not None and given() is self.parameters[place].grad

    def keep_apart(self, ratio: int) -> None:
        """Gradients of this step so far are of `ratio`, and there will be some of others."""
        if not self._parts:
            self._parts = [_Parts(ratio) for _ in self.parameters]

    def turn_to(self, place: int, ratio: int) -> None:
        """A gradient of `ratio` is about to be added to `param.grad`: move aside what is not."""
        self._parts[place].turn_to(ratio, self.parameters[place])

    def added(self, place: int) -> None:
        """A gradient was added to `param.grad`."""
        gradient = self.parameters[place].grad
        self._parts[place].version = None if gradient is None else gradient._version

    def forget_parts(self) -> None:
        """What was added up counts no more."""
        self._parts, self._noted, self._noted_at = [], {}, {}

    def begin_slices(self) -> None:
        """A step in slices begins: what gradients there are belong to none of them."""
        self._before, self._versions = [], {}
        if any(parameter.grad is not None for parameter in self.parameters):
            self._before = [_unless_zero(parameter.grad) for parameter in self.parameters]
        self.forget_slice()

    def forget_slice(self) -> None:
        """What was added to gradients in this step counts for nothing."""
        self._versions = {}
        for parameter in self.parameters:
            parameter.grad = None

    def added_in_slice(self, place: int) -> None:
        """A gradient was added to `param.grad`."""
        gradient = self.parameters[place].grad
        if gradient is not None:
            self._versions[place] = gradient._version

    @property
    def carried(self) -> list[torch.nn.Parameter]:
        """With whose gradients of the step before a step in slices has begun."""
        places = zip(self.parameters, self._before, self._homes, strict=False)
        return [p for p, before, view in places if before is not None and before is view]

    @property
    def meddled(self) -> bool:
        """Whether somebody else than autograd has changed a gradient since."""
        gradients = ((self.parameters[place].grad, v) for place, v in self._versions.items())
        return any(g is None or g._version != version for g, version in gradients)

    def fill(self, place: int, scales: Sequence[float], ratio: int) -> None:
        """Copy one gradient in, times its scale; zeros if there is none or it counts for nothing.

        Args:
            place: which.
            scales: by ratio of the step.
            ratio: what `param.grad` is of, in a step with one.
        """
        parameter = self.parameters[place]
        found = self._parts[place].all(parameter) if self._parts else {ratio: parameter.grad}
        view, used = self.views[place], False
        for of, gradient in found.items():
            scale = scales[of]
            if gradient is None or scale == 0:  # not 0 * gradient: NaN for one that overflowed
                continue
            mine = local(gradient) if self._sharded else gradient
            dense = mine.to_dense() if mine.is_sparse else mine
            if used:
                view.add_(dense, alpha=scale)
            else:
                torch.mul(dense, scale, out=view)
            used = True
        if not used:
            view.zero_()
        self._used[place] = used
        self.missing -= not self._filled[place]
        self._filled[place] = True

    def fill_missing(self, scales: Sequence[float], ratio: int) -> None:
        """Copy in whatever is not copied yet, times its scale."""
        for place, filled in enumerate(self._filled):
            if not filled:
                self.fill(place, scales, ratio)

    def accept(self, factor: float) -> None:
        """`param.grad` becomes the average, or None where nobody has one that counts."""
        self._spent = [p.grad for p in self.parameters]
        self.forget_parts()
        if factor != 1:
            self._values.mul_(factor)
        if self._narrow:
            self._home.copy_(self._values)
        everywhere = all(self._used)
        used = self._used if everywhere else [flag > 0 for flag in self._flags.tolist()]
        views = self._homes
        if self._sharded:
            views = [like(view, p) for view, p in zip(views, self.parameters, strict=True)]
        for parameter, view, anybody in zip(self.parameters, views, used, strict=True):
            parameter.grad = view if anybody else None
        for parameter, before in zip(self.parameters, self._before, strict=False):
            if before is not None:  # not in place: joiners are told what is in the bucket
                parameter.grad = before if parameter.grad is None else parameter.grad + before
        self._before = []
        gradients = [parameter.grad for parameter in self.parameters]
        self._given = [None if g is None else weakref.ref(g) for g in gradients]
        self._given_at, self._left = self._home._version, False

    def norm(self) -> float:
        """After the reduction: of all that is in it. Not finite where a gradient is not."""
        norm = self.pending.norm if self.pending is not None else None
        if norm is None:
            norm = shared_memory.norm_of(self._values)
        if math.isfinite(norm):
            return norm
        # A square may be too large where its root is not.
        largest = float(self._values.abs().max())
        if not math.isfinite(largest):
            return largest
        return largest * shared_memory.norm_of(self._values / largest)

    def drop(self) -> None:
        """Nobody with samples is left in this step: no gradients, so that nothing is updated."""
        self.forget_parts()
        self._before = []
        for parameter in self.parameters:
            parameter.grad = None

    def imitate(self, flat: torch.Tensor) -> None:
        """`param.grad` becomes that of the other replica, whatever was computed here."""
        super().imitate(flat)
        before = self._before
        self.drop()
        self._before = before
        self.accept(1.0)

    def _flag(self) -> None:
        if all(self._used):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self._used, dtype=self.dtype))

    def _forget(self) -> None:
        super()._forget()
        self._filled = [False] * len(self.parameters)
        self._used = [False] * len(self.parameters)


class _Parts:
    """The local gradients of one parameter, by ratio.

    Attributes:
        ratio: of what `param.grad` holds.
        version: of that tensor, when autograd had last added to it.
    """

    def __init__(self, ratio: int) -> None:
        self.ratio = ratio
        self.version: int | None = None
        self._aside: dict[int, torch.Tensor] = {}

    def turn_to(self, ratio: int, parameter: torch.nn.Parameter) -> None:
        """Have `param.grad` be what there is of `ratio`."""
        self._aside = self.all(parameter)
        parameter.grad = self._aside.pop(ratio, None)
        self.ratio = ratio

    def all(self, parameter: torch.nn.Parameter) -> dict[int, torch.Tensor]:
        """Whatever counts."""
        gradient = parameter.grad
        if gradient is None:
            return {}
        changed = self.version is not None and gradient._version != self.version
        if changed and not gradient.is_sparse and not bool(gradient.any()):
            return {self.ratio: gradient}  # zeroed in place
        return {**self._aside, self.ratio: gradient}


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
        self._remembered: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []  # the places in it
        self._seen: torch.Tensor | None = None
        self._seen_places: list[torch.Tensor] = []
        tensors = self._tensors()
        super().__init__(tensors, reduce, _WIDER.get(tensors[0].dtype, tensors[0].dtype))
        self._ends = torch.tensor([0, *(t.numel() for t in tensors)], device=tensors[0].device)
        self._ends = self._ends.cumsum(0)
        self._base = torch.empty(0)
        self._since = self._base  # the values when the ratio of now began
        self._moved: dict[int, torch.Tensor] = {}  # changes under earlier ones
        self._highest: torch.Tensor | None = None  # over slices, of what takes the maximum
        self._versions: list[int] = []

    def rebase(self) -> None:
        """All workers hold the same values now: changes count from here."""
        tensors = self._tensors()
        self._copy_in(tensors)
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
            now = self._flat()
            change = (now - self._base).masked_fill_(now == self._base, 0)
            self._moved[ratio] = self._moved[ratio] + change if ratio in self._moved else change
        elif counts:
            now, before = self._flat(), self._highest
            self._highest = now if before is None else torch.maximum(now, before)
        if self._held is not None:
            self._write(self._held)

    def _look(self) -> torch.Tensor:
        """The values of now, in the order of the bucket, where the next call writes as well."""
        if self._seen is None:
            self._seen = torch.empty_like(self._values)
            self._seen_places = self._views_of(self._seen)
        with torch.no_grad():
            torch._foreach_copy_(self._seen_places, self._tensors())
        return self._seen

    def _flat(self) -> torch.Tensor:
        """A copy of the values of now, in the order of the bucket and apart from its memory."""
        return self._look().clone()

    def turn_from(self, ratio: int) -> None:
        """The passes of `ratio` are over for now."""
        if self.reduce != "sum":
            return
        tensors = self._tensors()
        self._copy_in(tensors)
        now = self._values.clone()
        change = (now - self._since).masked_fill_(now == self._since, 0)
        self._moved[ratio] = self._moved[ratio] + change if ratio in self._moved else change
        self._since = now

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
        if self._remembered is None:
            self._remembered = torch.empty_like(self._values)
            self._kept = self._views_of(self._remembered)
        self._remembered.copy_(self._look())

    @property
    def remembered(self) -> list[torch.Tensor]:
        """What would be put back, of those that are part of a State."""
        pairs = zip(self._kept, self._persistent, strict=False)
        return [tensor for tensor, persistent in pairs if persistent]

    def put_back(self) -> None:
        """Put back what was remembered."""
        if self._remembered is not None:
            self._write(self._remembered)
        self._from_base()

    def fill_missing(self, scales: Sequence[float], ratio: int) -> None:
        """Copy all buffers in; those of floating point as their change, times its scale."""
        if not self.missing:
            return
        self._copy_in(self._tensors())
        if self.reduce == "sum":
            same = self._values == self._since  # also where both are infinite, as in a mask
            self._values.sub_(self._since).mul_(scales[ratio]).masked_fill_(same, 0)
            for of, change in self._moved.items():
                self._values.add_(change, alpha=scales[of])
        elif self._highest is not None:
            torch.maximum(self._values, self._highest, out=self._values)
        self.missing = 0

    def accept(self, factor: float) -> None:
        """The step is agreed: buffers change in place."""
        if self.reduce == "sum":
            self._values.mul_(factor).add_(self._base)
            self._base.copy_(self._values)
        self._from_base()
        self._write(self._values)

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

    def _copy_in(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.views, tensors)

    def _write(self, values: torch.Tensor) -> None:
        """Buffers take these values, as the class says; `values` is laid out as the bucket is."""
        tensors = self._tensors()
        differ = self._look() != values
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


def build_buckets(
    modules: Sequence[torch.nn.Module], wire: torch.dtype | None = None
) -> list[Bucket]:
    """Buckets for everything that replicas must agree on, in the order in which they are launched.

    Gradients in reverse order of parameters, a small first bucket so that reducing starts early,
    25 MiB each after it; then buffers, since backward runs forward again where activations are
    checkpointed. One bucket counts.

    Args:
        modules: whose parameters and buffers.
        wire: what gradients of float32 and float64 travel as, except for `keep_whole`; None: as
            they are.

    Raises:
        ConfigError: a tensor is of a type that no backend reduces; names it.
    """
    _check_types(modules)
    groups = _parameter_groups(modules)
    buckets: list[Bucket] = [
        GradientBucket(group, None if travels_whole(group[0]) else wire) for group in groups
    ]
    buckets += [BufferBucket(places, how) for how, places in _buffer_groups(modules)]
    counter = next((b for b in buckets if b.reduce == "sum" and b.dtype in _EXACT), None)
    if counter is None:
        counter = Bucket([], "sum", torch.float32)
        buckets.insert(0, counter)
    counter.counts = True
    for bucket in buckets:
        bucket.shared = shared_memory.available() and len(buckets) <= shared_memory.MOST
        bucket.renew()
        if isinstance(bucket, BufferBucket):
            bucket.rebase()
    return buckets


def keep_whole(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter, whose gradient always travels in its own type: it tells numbers that count."""
    parameter.travels_whole = True  # type: ignore[attr-defined]
    return parameter


def travels_whole(parameter: torch.nn.Parameter) -> bool:
    """Whether `keep_whole` was said of it."""
    return getattr(parameter, "travels_whole", False)


def _check_types(modules: Sequence[torch.nn.Module]) -> None:
    for module in modules:
        named: list[tuple[str, torch.Tensor, torch.dtype]] = [
            *((name, p, p.dtype) for name, p in module.named_parameters() if p.requires_grad),
            *((name, b, _WIDER.get(b.dtype, b.dtype)) for name, b in module.named_buffers()),
        ]
        for name, tensor, dtype in named:
            if dtype not in _REDUCED or tensor.layout != torch.strided:
                raise ConfigError(
                    f"{name} of the prepared {type(module).__name__} is {tensor.dtype}, "
                    f"{tensor.layout}, which no backend can average over workers. Nothing was "
                    "prepared. Keep it in another type; a constant need not be a buffer."
                )


def _parameter_groups(modules: Sequence[torch.nn.Module]) -> list[list[torch.nn.Parameter]]:
    wanted = (p for module in modules for p in module.parameters() if p.requires_grad)
    parameters = list({id(p): p for p in wanted}.values())
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple[object, ...], tuple[list[torch.nn.Parameter], int]] = {}
    cap = FIRST_BUCKET_BYTES
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device, travels_whole(parameter))
        group, size = open_groups.get(key, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += local(parameter).nbytes
        if size >= cap:
            cap = BUCKET_BYTES
            open_groups.pop(key, None)
        else:
            open_groups[key] = (group, size)
    return groups


def _buffer_groups(
    modules: Sequence[torch.nn.Module],
) -> Iterable[tuple[Reduce, list[tuple[torch.nn.Module, str]]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[torch.nn.Module, str]]] = {}
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    groups.setdefault((buffer.dtype, buffer.device), []).append((module, name))
    for (dtype, _), places in groups.items():
        yield ("sum" if dtype.is_floating_point or dtype.is_complex else "max"), places


def _memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody uses, in huge pages.

    Ordinary pages are mapped in one by one when they are first written. For large buckets that
    takes the survivors of a loss longer than filling them.
    """
    size = elements * dtype.itemsize
    if device.type != "cpu" or size < _HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(elements, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _memory_of(gradient: torch.Tensor) -> int:
    """The same for gradients that lie in the same memory, while they do."""
    return int(gradient.untyped_storage()._cdata)


def _unless_zero(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or gradient.is_sparse:
        return gradient
    return gradient if bool(gradient.any()) else None


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat` in the shape of `like`, and in its memory layout if that is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)
