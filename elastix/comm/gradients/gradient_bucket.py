"""A bucket of gradients: they come back as views of it, or in memory of their own type."""

import math
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from blake3 import blake3

from elastix.comm.gradients.bucket import Bucket, fresh_memory
from elastix.comm.network import shared_memory
from elastix.sharding import is_sharded, like, local
from elastix.state import raw_bytes

COUNTS = (torch.float32, torch.float64)
"""They count samples without rounding."""
_Mark = tuple[int, int] | bytes | None
_CHANGED = None
"""The mark that no gradient has."""

_ALIGNED_BYTES = {"cpu": 64, "cuda": 512}
"""As torch's allocators align memory. Kernels choose by it in which order they add up (the norm of
gradients on a GPU, say), so in gradients that lay otherwise they would give other last bits."""


class GradientBucket(Bucket):
    """Gradients of some parameters. They come back as views of the bucket, not as copies.

    If they travel in a narrower type than theirs, they come back in memory of their own type, which
    is used again in the next step. What they are is told by the narrow values alone, so whoever is
    sent these, or has reduced them, has the same gradients to the last bit.

    Those of passes with different ratios are kept apart: `param.grad` is of the ratio of the last
    pass that used the parameter, and earlier ones are moved aside. A gradient that was dropped or
    zeroed by the user takes with it what was moved aside before.

    Attributes:
        came: places of gradients that backward has brought in this step.
        left: gradients that were handed back are the user's still, as they were.
        unscaled: in an exact run: gradients are taken as they are, and the sum is scaled.
        collect: likewise: who takes each as it comes, with its place; None where there is none.
            The memory of the slice before is freed as the next one takes as much.
    """

    at_once = ("cuda",)
    """On these devices gradients are copied in when the last of them has come. For each by itself a
    kernel would be launched, which takes longer than it runs."""

    freed_late = ("cpu",)
    """On these devices local gradients that are not needed any more are kept until backward is
    about to take as much memory again: freed before, it goes back to the system, and costs page
    faults. Elsewhere torch's allocator keeps it, and the next forward pass can have it."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], wire: torch.dtype | None = None
    ) -> None:
        own = parameters[0].dtype
        device = parameters[0].device.type
        self._narrow = wire is not None and own in COUNTS
        super().__init__(
            parameters,
            "sum",
            wire if wire is not None and self._narrow else own,
            aligned=_ALIGNED_BYTES.get(device, 64) // own.itemsize,
        )
        self._at_once = device in self.at_once
        self.parameters = list(parameters)
        self._home = torch.empty(0, device="cpu")  # where gradients come back
        self._homes: list[torch.Tensor] = []  # the places in it
        self._sharded = any(map(is_sharded, parameters))
        self._parts: list[_Parts] = []  # only in a step of several ratios
        self.came: set[int] = set()
        self._before: list[torch.Tensor | None] = []  # gradients that a step in slices began with
        self._aside: list[torch.Tensor | None] = []  # while others are computed
        self._marks: dict[int, _Mark] = {}  # in such a step: of gradients, when last added to
        self._used = [False] * len(parameters)
        self._filled = [False] * len(parameters)
        self._spent: list[torch.Tensor | None] = []  # local gradients; see `freed_late`
        self._late = device in self.freed_late
        self._given: list[weakref.ref[torch.Tensor] | None] = []  # gradients, as handed back
        self._given_at = 0  # version of our memory then
        self.left = False
        # While a step is added up: local gradients, as autograd has left them, and the version of
        # the memory that they lie in. Some share it.
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._noted_at: dict[int, int] = {}
        self._noted_parts: dict[int, _Mark] = {}
        self._idle = 0
        self.unscaled = False
        self.collect: Callable[[int, torch.Tensor | None], None] | None = None

    def _lay_out(self) -> None:
        """See Bucket."""
        super()._lay_out()
        self._make_home()

    def _make_home(self) -> None:
        """From now on whoever else refers to where gradients come back is a user."""
        self._home, self._homes = self.flat, self.views
        if self._narrow:
            own = self.parameters[0]
            self._home = fresh_memory(self.elements, own.dtype, self.flat.device)
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
        if self.collect is None:
            self._spent = []

    @property
    def comes_once(self) -> bool:
        """Whether a backward pass that has no other in it brings a gradient once.

        FSDP2 adds to it whenever a module is used.
        """
        return not self._sharded

    @property
    def counts_exactly(self) -> bool:
        """Whether many slices fit into a sum that is not scaled yet."""
        return self.dtype in COUNTS and not self._narrow

    def note(self, place: int) -> None:
        """A gradient was added to `param.grad`, and the step is not over."""
        gradient = self.parameters[place].grad
        if gradient is None or gradient.is_sparse:
            return
        if is_sharded(gradient):
            self._noted_parts[place] = _mark_of(gradient)
        else:
            memory = _memory_of(gradient)
            self._noted[place] = weakref.ref(gradient), memory
            self._noted_at[memory] = gradient._version

    def not_zero(self) -> list[torch.nn.Parameter]:
        """Those that have a gradient which is not zero."""
        return [p for p in self.parameters if p.grad is not None and bool(local(p.grad).any())]

    def forget_notes(self) -> None:
        """Whoever has changed them since was meant to."""
        self._noted, self._noted_at, self._noted_parts = {}, {}, {}

    def changed(self, but: int | None = None) -> bool:
        """Whether somebody has changed such a gradient since. To drop or zero it is allowed.

        Args:
            but: a place to which autograd has just added. Parts are not looked at then: FSDP2 has
                added to others as well, and has not called their hooks yet.
        """
        for place, mark in self._noted_parts.items() if but is None else ():
            gradient = self.parameters[place].grad
            if gradient is None or _mark_of(gradient) == mark:
                continue
            if bool(local(gradient).any()):
                return True
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
        self.left = bool(self._given) and self._home._version == self._given_at + added

    def adds_to_left(self, place: int) -> bool:
        """Whether autograd has just added to a gradient of the last step, with no trace of a zero.

        By way of .data it may have been zeroed all the same.
        """
        return self.left and self._is_given(place)

    def still_left(self, but: int | None) -> bool:
        """Whether there is a gradient of the last step that is not zero, at another place."""
        places = (place for place in range(len(self._given) * self.left) if place != but)
        given = (self.parameters[place].grad for place in places if self._is_given(place))
        return any(bool(local(gradient).any()) for gradient in given if gradient is not None)

    def forget_left(self) -> None:
        """They were zeroed."""
        self.left = False

    def _is_given(self, place: int) -> bool:
        given = self._given[place] if self._given else None
        return given is not None and given() is self.parameters[place].grad

    def has_unaveraged(self, wanted: Container[int]) -> bool:
        """Whether one of the parameters with these ids has a gradient that was not handed back."""
        return any(
            id(parameter) in wanted
            and parameter.grad is not None
            and not self._is_given(place)
            and (parameter.grad.is_sparse or bool(local(parameter.grad).any()))
            for place, parameter in enumerate(self.parameters)
        )

    def keep_apart(self, ratio: int) -> None:
        """Gradients of this step so far are of `ratio`, and there will be some of others."""
        if not self._parts:
            self._parts = [_Parts(ratio) for _ in self.parameters]

    def turn_to(self, place: int, ratio: int) -> None:
        """A gradient of `ratio` is about to be added to `param.grad`: move aside what is not."""
        self._parts[place].turn_to(ratio, self.parameters[place])

    def turn_all_to(self, ratio: int) -> None:
        """The same at once for what FSDP2 shards: it tells nobody before it adds a gradient."""
        for place, parameter in enumerate(self.parameters if self._sharded else ()):
            self._parts[place].turn_to(ratio, parameter, at_once=True)
            self._marks.pop(place, None)
            self.added_in_slice(place)

    def added(self, place: int) -> None:
        """A gradient was added to `param.grad`."""
        gradient = self.parameters[place].grad
        self._parts[place].version = None if gradient is None else gradient._version

    def forget_parts(self) -> None:
        """What was added up counts no more."""
        self._parts = []
        self.forget_notes()

    def set_aside(self) -> None:
        """There are no gradients, until those so far are added to those to come."""
        self._aside = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def put_together(self, ratio: int) -> None:
        """Add what was set aside to what there is now.

        Args:
            ratio: what is there now is of.
        """
        for place, (parameter, before) in enumerate(zip(self.parameters, self._aside, strict=True)):
            gradient, parameter.grad = parameter.grad, before
            if self._parts:
                self._parts[place].turn_to(ratio, parameter, at_once=True)
            if gradient is not None:
                earlier = parameter.grad
                parameter.grad = gradient if earlier is None else earlier + gradient
            if self._parts:
                self.added(place)
        self._aside = []

    def added_anywhere(self) -> None:
        """What is in `param.grad` is of this step, and as it is meant to be."""
        self.forget_notes()
        self._marks = {}
        for place in range(len(self.parameters)):
            self.note(place)
            self.added_in_slice(place)

    def begin_slices(self) -> None:
        """A step in slices begins: what gradients there are belong to none of them."""
        self._before, self._marks = [], {}
        if any(parameter.grad is not None for parameter in self.parameters):
            self._before = [_unless_zero(parameter.grad) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def forget_slice(self) -> None:
        """What was added to gradients in this step counts for nothing."""
        if self.collect is not None:
            self._keep_spent()
        self._marks = {}
        for parameter in self.parameters:
            parameter.grad = None

    def added_in_slice(self, place: int) -> None:
        """What is in `param.grad`, if anything, is as autograd has left it."""
        gradient = self.parameters[place].grad
        if gradient is None:
            return
        before, mark = self._marks.get(place), _mark_of(gradient)
        if isinstance(before, tuple) and isinstance(mark, tuple) and not gradient.is_sparse:
            memory, version = before
            if mark[0] == memory and mark[1] > version + 1:
                mark = _CHANGED  # a hook that comes before ours has changed the sum
        self._marks[place] = mark

    @property
    def carried(self) -> list[torch.nn.Parameter]:
        """With whose gradients of the step before a step in slices has begun."""
        given = [None if one is None else one() for one in self._given]
        places = zip(self.parameters, self._before, self._homes, given, strict=False)
        return [
            parameter
            for parameter, before, view, gradient in places
            if before is not None and (before is view or (self._sharded and before is gradient))
        ]

    def collected(self, place: int) -> bool:
        """Whether a gradient was taken as it came, and cannot be exchanged for another."""
        return self.collect is not None and self._filled[place]

    @property
    def meddled(self) -> bool:
        """Whether somebody else than autograd has changed a gradient since."""
        gradients = ((self.parameters[place].grad, mark) for place, mark in self._marks.items())
        return any(g is None or _mark_of(g) != mark for g, mark in gradients)

    def fill(self, place: int, scales: Sequence[float], ratio: int) -> None:
        """Copy one gradient in, times its scale; zeros if there is none or it counts for nothing.

        Args:
            place: which.
            scales: by ratio of the step.
            ratio: what `param.grad` is of, in a step with one.
        """
        parameter = self.parameters[place]
        if self.collect is not None:
            gradient = parameter.grad
            self._used[place] = gradient is not None
            self.collect(place, None if gradient is None else _dense(gradient).to(self.dtype))
            if self._spent:
                self._spent[place] = None
            self._fill_in(place)
            return
        if self._at_once and not (self._parts or self._narrow):  # those are rounded once, scaled
            self._fill_in(place)
            if not self.missing:
                self._fill_all(1.0 if self.unscaled else scales[ratio])
            return
        found = self._parts[place].all(parameter) if self._parts else {ratio: parameter.grad}
        view, used = self.views[place], False
        for of, gradient in found.items():
            scale = 1.0 if self.unscaled else scales[of]
            if gradient is None or scale == 0:  # not 0 * gradient: NaN for one that overflowed
                continue
            dense = _dense(local(gradient) if self._sharded else gradient).detach()
            if used:
                view.add_(dense, alpha=scale)
            else:
                torch.mul(dense, scale, out=view)
            used = True
        if not used:
            view.zero_()
        self._used[place] = used
        self._fill_in(place)

    def _fill_all(self, scale: float) -> None:
        """The same for all of them."""
        views, found = [], []
        for place, parameter in enumerate(self.parameters):
            gradient = parameter.grad if scale else None  # see `fill`
            self._used[place] = gradient is not None
            if gradient is not None:
                views.append(self.views[place])
                found.append(_dense(local(gradient)).detach())
        if not all(self._used):
            self._values.zero_()
        if found:
            torch._foreach_copy_(views, found)
        if scale != 1:
            self._values.mul_(scale)

    def _fill_in(self, place: int) -> None:
        self.missing -= not self._filled[place]
        self._filled[place] = True

    def fill_missing(self, scales: Sequence[float], ratio: int) -> None:
        """Copy in whatever is not copied yet, times its scale."""
        for place, filled in enumerate(self._filled):
            if not filled:
                self.fill(place, scales, ratio)

    def accept(self, factor: float) -> None:
        """`param.grad` becomes the average, or None where nobody has one that counts."""
        self._keep_spent()
        self.forget_parts()
        if factor != 1:
            self._values.mul_(factor)
        if self._narrow:
            self._home.copy_(self._values)
        everywhere = all(self._used)
        used = self._used if everywhere else [flag > 0 for flag in self._flags.real.tolist()]
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
        self._given_at, self.left = self._home._version, False
        self.came.clear()

    def _keep_spent(self) -> None:
        self._spent = [parameter.grad for parameter in self.parameters] if self._late else []

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
        self.came.update(range(len(self.parameters)))
        self.drop_new()

    def drop_new(self) -> None:
        """The same of those alone that have come in this step: others are of one before it."""
        self.forget_parts()
        self._before = []
        for place in self.came:
            self.parameters[place].grad = None
        self.came.clear()

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
            self._flags.copy_(torch.tensor(self._used, dtype=self.dtype, device="cpu"))

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
        self._empty = False  # `param.grad` may be None here, as none of this ratio was added yet

    def turn_to(self, ratio: int, parameter: torch.nn.Parameter, *, at_once: bool = False) -> None:
        """Have `param.grad` be what there is of `ratio`.

        Args:
            ratio: of what comes next.
            parameter: whose gradient it is.
            at_once: there may come nothing.
        """
        self._aside, self._empty = self.all(parameter), at_once
        parameter.grad = self._aside.pop(ratio, None)
        self.ratio = ratio
        if at_once:
            self.version = None if parameter.grad is None else parameter.grad._version

    def all(self, parameter: torch.nn.Parameter) -> dict[int, torch.Tensor]:
        """Whatever counts."""
        gradient = parameter.grad
        if gradient is None:
            return dict(self._aside) if self._empty else {}
        changed = self.version is not None and gradient._version != self.version
        if changed and not gradient.is_sparse and not bool(local(gradient).any()):
            return {self.ratio: gradient}  # zeroed in place
        return {**self._aside, self.ratio: gradient}


def _mark_of(gradient: torch.Tensor) -> _Mark:
    """Another one if somebody has changed it, or put another in its place.

    Of a DTensor no version tells that: its own stays, and FSDP2's parts share that of their memory.
    Its bytes do, of what this process has.
    """
    if is_sharded(gradient):
        return blake3(raw_bytes(local(gradient)).numpy().data).digest()
    return id(gradient), gradient._version


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _memory_of(gradient: torch.Tensor) -> int:
    """The same for gradients that lie in the same memory, while they do."""
    return int(gradient.untyped_storage()._cdata)


def _unless_zero(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or gradient.is_sparse:
        return gradient
    return gradient if bool(local(gradient).any()) else None
