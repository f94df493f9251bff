"""Flat buffers that carry gradients and module buffers through a reduction, out of place.

A bucket copies its tensors in, is reduced, and only when the step is agreed hands the result
back. What it copied from stays as it was, so it can be filled again for another group.
"""

from collections.abc import Iterable, Sequence

import torch

from elastix.comm.group import Group, Pending, Reduce

_FIRST_BYTES = 1 << 20
_CAP_BYTES = 25 << 20
_EXACT = (torch.float32, torch.float64)  # count samples without rounding


class Bucket:
    """Room for some tensors, a flag for each, and perhaps a count of samples.

    A flag is set by whoever used (gradient) or changed (buffer) the tensor; the sum of the flags
    tells whether anybody did. The count adds up the samples of all who took part.

    Attributes:
        missing: places that are not filled yet.
        counts: whether the last element counts samples.
        pending: the reduction, once launched.
    """

    def __init__(self, like: Sequence[torch.Tensor], reduce: Reduce, dtype: torch.dtype) -> None:
        self.reduce = reduce
        self.dtype = dtype
        self.counts = False
        self.pending: Pending | None = None
        self._like = [tensor.detach() for tensor in like]
        self._filled = [False] * len(like)
        self.missing = len(like)

    def renew(self) -> None:
        """Take fresh memory, unfilled. The old may still be written by an abandoned operation."""
        sizes = [tensor.numel() for tensor in self._like]
        values, places = sum(sizes), len(sizes)
        device = self._like[0].device if self._like else torch.device("cpu")
        self.flat = torch.empty(values + places + 1, dtype=self.dtype, device=device)
        self._values, self._flags, self._count = torch.split(self.flat, [values, places, 1])
        self.views = [
            _shaped(piece, like)
            for piece, like in zip(torch.split(self._values, sizes), self._like, strict=True)
        ]
        self.begin()

    def begin(self) -> None:
        """A new step: nothing is filled."""
        self._filled = [False] * len(self._like)
        self.missing = len(self._like)
        self.pending = None

    def fill(self, place: int, scale: float) -> None:
        """Copy one tensor in, times `scale`; zeros if there is none or it counts for nothing."""
        source = self._source(place)
        if source is None or scale == 0:
            self.views[place].zero_()  # not 0 * source: an overflowed gradient would give NaN
        elif self.reduce == "sum":
            torch.mul(source, scale, out=self.views[place])
        else:
            self.views[place].copy_(source)
        self.missing -= not self._filled[place]
        self._filled[place] = True

    def fill_missing(self, scale: float) -> None:
        """Copy whatever is not copied yet."""
        for place, filled in enumerate(self._filled):
            if not filled:
                self.fill(place, scale)

    def launch(self, group: Group, share: int) -> None:
        """Start the reduction; `share` is this worker's number of samples."""
        flags = self._marks()
        if all(flags):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(flags, dtype=self.dtype))
        self._count.fill_(share if self.counts else 0)
        self.pending = group.all_reduce(self.flat, self.reduce)

    def samples(self) -> float:
        """After the reduction: how many samples took part. Only where `counts`."""
        return float(self._count.item())

    def accept(self, factor: float) -> None:
        """The step is agreed: hand the values back, times `factor`."""
        if factor != 1 and self.reduce == "sum":
            self._values.mul_(factor)
        marks = self._marks()
        used = marks if all(marks) else [flag > 0 for flag in self._flags.tolist()]
        for place, anybody in enumerate(used):
            if anybody:
                self._hand_back(place)

    def _source(self, place: int) -> torch.Tensor | None:
        raise NotImplementedError

    def _marks(self) -> list[bool]:
        return []

    def _hand_back(self, place: int) -> None:
        raise NotImplementedError


class GradientBucket(Bucket):
    """Gradients of some parameters. They come back as views of the bucket, not as copies."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, "sum", parameters[0].dtype)
        self.parameters = list(parameters)
        self.touched = [False] * len(parameters)
        self._spent: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """A new step. Gradients that were not set to None since the last one live in our memory."""
        super().begin()
        if any(p.grad is v for p, v in zip(self.parameters, self.views, strict=True)):
            self.renew()
        # Local gradients of the step before are freed here, where backward is about to take as
        # much memory again; freed at its end, the memory goes back to the system and costs faults.
        self._spent = []

    def accept(self, factor: float) -> None:
        """`param.grad` becomes the average, or stays None where nobody used the parameter."""
        self._spent = [p.grad for p in self.parameters]
        super().accept(factor)
        self.touched = [False] * len(self.parameters)

    def drop(self) -> None:
        """Nobody with samples is left in this step: no gradients, so that nothing is updated."""
        for parameter in self.parameters:
            parameter.grad = None
        self.touched = [False] * len(self.parameters)

    def _source(self, place: int) -> torch.Tensor | None:
        gradient = self.parameters[place].grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        return gradient

    def _marks(self) -> list[bool]:
        return self.touched

    def _hand_back(self, place: int) -> None:
        self.parameters[place].grad = self.views[place]


class BufferBucket(Bucket):
    """Buffers of modules. Only what changed in a step comes back: constants must not drift."""

    def __init__(self, places: Sequence[tuple[torch.nn.Module, str]], reduce: Reduce) -> None:
        self._places = list(places)
        self._held: list[torch.Tensor] = []
        self._seen = [(0, 0)] * len(places)
        tensors = [self._tensor(place) for place in range(len(places))]
        dtype = tensors[0].dtype if tensors[0].dtype != torch.bool else torch.uint8
        super().__init__(tensors, reduce, dtype)
        self.mark_seen()

    def mark_seen(self) -> None:
        """Whatever changes from now on has changed."""
        self._seen = [self._version(place) for place in range(len(self._places))]

    def hold(self) -> None:
        """Remember the values before a forward pass that does not count."""
        self._held = [self._tensor(place).clone() for place in range(len(self._places))]

    def undo(self) -> None:
        """Put back what was held. After backward, which may still need what forward left."""
        with torch.no_grad():
            for place, tensor in enumerate(self._held):
                self._tensor(place).copy_(tensor)
        self._held = []

    def accept(self, factor: float) -> None:
        """Buffers take the average or maximum in place."""
        super().accept(factor)
        self.mark_seen()

    def _tensor(self, place: int) -> torch.Tensor:
        module, name = self._places[place]
        return module.get_buffer(name)

    def _version(self, place: int) -> tuple[int, int]:
        tensor = self._tensor(place)
        return id(tensor), tensor._version

    def _source(self, place: int) -> torch.Tensor | None:
        return self._held[place] if self._held else self._tensor(place)

    def _marks(self) -> list[bool]:
        return [self._version(place) != seen for place, seen in enumerate(self._seen)]

    def _hand_back(self, place: int) -> None:
        with torch.no_grad():
            self._tensor(place).copy_(self.views[place])


def build_buckets(modules: Sequence[torch.nn.Module]) -> list[Bucket]:
    """Buckets for everything that replicas must agree on, in the order in which they are launched.

    Buffers first, since forward is done with them; then gradients in reverse order of parameters,
    a small first bucket so that reducing starts early, 25 MiB each after it. One bucket counts.
    """
    buckets: list[Bucket] = [BufferBucket(places, how) for how, places in _buffer_groups(modules)]
    buckets += [GradientBucket(group) for group in _parameter_groups(modules)]
    counter = next((b for b in buckets if b.reduce == "sum" and b.dtype in _EXACT), None)
    if counter is None:
        counter = Bucket([], "sum", torch.float32)
        buckets.insert(0, counter)
    counter.counts = True
    for bucket in buckets:
        bucket.renew()
    return buckets


def _parameter_groups(modules: Sequence[torch.nn.Module]) -> list[list[torch.nn.Parameter]]:
    wanted = (p for module in modules for p in module.parameters() if p.requires_grad)
    parameters = list({id(p): p for p in wanted}.values())
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.nn.Parameter], int]] = {}
    cap = _FIRST_BYTES
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device)
        group, size = open_groups.get(key, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += parameter.nbytes
        if size >= cap:
            cap = _CAP_BYTES
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


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat` in the shape of `like`, and in its memory layout if that is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)
