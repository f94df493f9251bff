"""Tensors of which each process of a crew holds a part: taken out, put back, and named.

A sharded model (FSDP2, tensor parallel) has DTensors. A State holds what this process has of them,
as plain tensors under plain names, and says beside which part of the whole each is. In the store
the part stands in the name: `blocks.0.up.weight[16:32,0:18]`, and whatever holds a whole tensor
has a plain name. So any mesh reads what any other has written, and one process reads all of it.

Not here: who holds what (torch's placements say), and where stored parts are (store.reader).

Invariants: nobody pays for this who has no DTensors; parts are one whole tensor only if they
cover it exactly once.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from elastix.errors import StateError
from elastix.lazy_import import later

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

Shape = tuple[int, ...]

_NAMED = re.compile(r"(.*)\[([0-9]{1,18}:[0-9]{1,18}(?:,[0-9]{1,18}:[0-9]{1,18})*)\]", re.DOTALL)
_SPLIT_AXES = 8  # of a tensor in parts: more than any mesh has dimensions


class Part(NamedTuple):
    """A box of a larger tensor, by the first element along each axis and the first after it."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        """Elements along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def empty(self) -> bool:
        """It has no element."""
        return 0 in self.shape

    def within(self, other: Part) -> tuple[slice, ...]:
        """What indexes it in a tensor that holds `other`, which is around it."""
        pairs = zip(self.start, self.stop, other.start, strict=True)
        return tuple(slice(a - offset, b - offset) for a, b, offset in pairs)

    def overlap(self, other: Part) -> Part:
        """What both have; it may be empty."""
        start = tuple(map(max, self.start, other.start))
        return Part(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def __str__(self) -> str:
        return f"[{','.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class Shard(NamedTuple):
    """What a process holds of a tensor that is larger.

    Attributes:
        part: which part.
        whole: shape of the tensor that it is part of.
    """

    part: Part
    whole: Shape


# ------------------------------------------------------------------------ a process and its part


def possible() -> bool:
    """Whether there can be DTensors in this process at all."""
    return "torch.distributed.tensor" in sys.modules


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this process may hold a part only."""
    if type(tensor) is torch.Tensor:
        return False  # isinstance takes microseconds, and each gradient of a step comes here
    return possible() and isinstance(tensor, sys.modules["torch.distributed.tensor"].DTensor)


def fsdp_layers(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Layers of these modules that FSDP2 shards, from outside in."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
    if fsdp is not None:
        for module in modules:
            yield from (one for one in module.modules() if isinstance(one, fsdp.FSDPModule))


def fsdp_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """The groups of parameters that it shards together, which torch has no public name for."""
    for layer in fsdp_layers(modules):
        state = layer._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # torch 2.11
            yield state._fsdp_param_group


def let_go_of_gathered(modules: Iterable[torch.nn.Module]) -> None:
    """Have FSDP2 let go of what it keeps of the outermost layer until a backward pass.

    After a forward pass without one the model's parameters are whole and of nobody: not those of
    the optimizer, nor those that a State consists of.
    """
    for layer in fsdp_layers(modules):
        layer.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, sharing its memory; a plain one is as it is.

    Raises:
        StateError: it is a sum that its places have not taken yet.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise StateError(
            f"a tensor of shape {tuple(tensor.shape)} is {sharded.placements}: its places hold "
            "terms of a sum that was not taken. Nothing was captured. Redistribute it first."
        )
    with torch.no_grad():
        held: torch.Tensor = sharded.to_local()
    return held


def held(tensor: torch.Tensor) -> Shard | None:
    """Which part of it this process has; None for all of it.

    Raises:
        StateError: what it has is no box.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    whole = tuple(tensor.shape)
    if tuple(local(tensor).shape) == whole:
        return None
    mesh, placements = sharded.device_mesh, sharded.placements
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    stop = tuple(a + n for a, n in zip(start, shape, strict=True))
    if tuple(shape) != tuple(local(tensor).shape) or not _is_box(sharded, start, stop):
        raise StateError(
            f"of a tensor of shape {whole}, placed {placements} on {tuple(mesh.shape)}, this "
            f"process holds {tuple(local(tensor).shape)}, which are not neighbours in the whole. "
            "Nothing was captured. Choose sizes that the mesh divides."
        )
    return Shard(Part(tuple(start), stop), whole)


def _is_box(sharded: Any, start: Shape, stop: Shape) -> bool:  # noqa: ANN401 - a DTensor
    """Whether the elements along each axis are neighbours in the whole.

    They need not be where it is split twice: FSDP2 over tensor parallel splits what the other has
    split, and says so the other way round (`_StridedShard`); the offset alone does not tell that
    there are no holes.
    """
    for axis in range(sharded.dim()):
        placed = [
            (at, p) for at, p in enumerate(sharded.placements) if getattr(p, "dim", None) == axis
        ]
        if not any(hasattr(p, "split_factor") for _, p in placed):
            continue  # what is split from left to right is neighbours each time
        indices = torch.arange(sharded.shape[axis], device="cpu")
        for at, placement in placed:
            place, places = sharded.device_mesh.get_local_rank(at), sharded.device_mesh.size(at)
            groups = _chunks(indices, getattr(placement, "split_factor", 1))
            indices = torch.cat([_chunks(group, places)[place] for group in groups])
        if not torch.equal(indices, torch.arange(start[axis], stop[axis], device="cpu")):
            return False
    return True


def _chunks(indices: torch.Tensor, number: int) -> list[torch.Tensor]:
    """As torch.chunk, with empty ones at the end, so that there are as many as wanted."""
    chunks = list(torch.chunk(indices, number)) if len(indices) else []
    return [*chunks, *[indices[:0]] * (number - len(chunks))]


def like(part: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """`part` as `model` is: a DTensor of the same whole on the same mesh, or as it is.

    Raises:
        StateError: it is not as large as what this process holds of `model`.
    """
    if not is_sharded(model):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = model
    mine = local(model)
    if part.shape != mine.shape:
        raise StateError(
            f"{tuple(part.shape)} elements are given for a place that holds {tuple(mine.shape)} "
            f"of a tensor of shape {tuple(model.shape)}."
        )
    wrapped: torch.Tensor = DTensor.from_local(
        part.to(mine.device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )
    return wrapped


# ------------------------------------------------------------------------ names of stored parts


def stored_name(name: str, part: Part) -> str:
    """The name under which a part is stored; that of a whole tensor is its own."""
    return f"{name}{part}"


def named_part(stored: str) -> tuple[str, Part] | None:
    """Tensor and part of a stored name; None if it is that of a whole tensor."""
    found = _NAMED.fullmatch(stored) if stored.endswith("]") else None
    if found is None:
        return None
    pairs = [pair.split(":") for pair in found[2].split(",")]
    return found[1], Part(tuple(int(a) for a, _ in pairs), tuple(int(b) for _, b in pairs))


def tensors_of(stored: Iterable[str]) -> dict[str, dict[str, Part | None]]:
    """Stored names by the tensor that they are of, each with its part; None for a whole one."""
    tensors: dict[str, dict[str, Part | None]] = {}
    for name in stored:
        found = named_part(name)
        if found is None:
            tensors.setdefault(name, {})[name] = None
        else:
            tensors.setdefault(found[0], {})[name] = found[1]
    return tensors


class Described(Protocol):
    """What a manifest says of a tensor."""

    @property
    def dtype(self) -> str:
        """Of its elements."""
        ...

    @property
    def shape(self) -> Shape:
        """Elements along each axis."""
        ...


def whole_of(
    name: str, stored: Mapping[str, Part | None], infos: Mapping[str, Described]
) -> tuple[str, Shape]:
    """Dtype and shape of a tensor that is stored whole or in parts.

    Args:
        name: of the tensor.
        stored: the names that it is stored under, as `tensors_of` gives them.
        infos: by stored name.

    Raises:
        StateError: the parts are not exactly one whole tensor.
    """
    first = infos[next(iter(stored))]
    if len(stored) == 1 and name in stored:
        return first.dtype, first.shape
    parts: list[Part] = []
    for key, part in stored.items():
        info = infos[key]
        if part is None:
            raise _contradiction(name, "it is there as a whole, and in parts too")
        if info.dtype != first.dtype or len(part.start) != len(first.shape):
            raise _contradiction(name, f"{key!r} is of another dtype or another number of axes")
        if any(a > b for a, b in zip(part.start, part.stop, strict=True)):
            raise _contradiction(name, f"{key!r} ends before it begins")
        if part.shape != tuple(info.shape):
            raise _contradiction(name, f"{key!r} holds {tuple(info.shape)}")
        if stored_name(name, part) != key:
            raise _contradiction(name, f"{key!r} is not how {part} is written")
        parts.append(part)
    ends = zip(*(part.stop for part in parts), strict=True)
    whole = Part((0,) * len(first.shape), tuple(map(max, ends)))
    _check_cover(name, parts, whole)
    return first.dtype, whole.stop


def _check_cover(name: str, parts: Sequence[Part], whole: Part) -> None:
    """Refuse parts that overlap or leave gaps.

    Each box is the sum of its corners, counted by turns plus and minus: a tiling of the whole has
    the whole's own corners left over, and nothing else has.
    """
    axes = [i for i, stop in enumerate(whole.stop) if any(p.shape[i] != stop for p in parts)]
    if len(axes) > _SPLIT_AXES:
        raise _contradiction(name, f"it is split along {len(axes)} axes")
    corners: Counter[Shape] = Counter()
    for box, times in (*((part, 1) for part in parts), (whole, -1)):
        if not box.empty:
            for corner, sign in _corners(box, axes):
                corners[corner] += times * sign
    if any(corners.values()):
        missing = math.prod(whole.stop) - sum(math.prod(p.shape) for p in parts)
        what = f"{missing} elements of it are in none" if missing > 0 else "some overlap"
        raise _contradiction(name, f"its {len(parts)} parts do not make up {whole}: {what}")


def _corners(box: Part, axes: Sequence[int]) -> Iterator[tuple[Shape, int]]:
    for ends in product((0, 1), repeat=len(axes)):
        at = ((box.start, box.stop)[end][axis] for end, axis in zip(ends, axes, strict=True))
        yield tuple(at), -1 if sum(ends) % 2 else 1


def _contradiction(name: str, what: str) -> StateError:
    return StateError(f"the parts of tensor {name!r} are not one tensor: {what}.")


# ------------------------------------------------------------------------ out of a State


@runtime_checkable
class InParts(Protocol):
    """Tensors that can be read in parts, without those of the others being touched."""

    def shape(self, name: str) -> Shape:
        """Of a whole tensor."""
        ...

    def part(self, name: str, part: Part) -> torch.Tensor:
        """That part of it."""
        ...


class Fitted(Mapping[str, "torch.Tensor"]):
    """Tensors of a State as this process is to hold them: its own parts, wrapped as DTensors.

    Args:
        tensors: of the State, by plain name.
        parts: which of them are parts.
        models: by name, tensors that are as the ones wanted, for those which may be sharded.
        owners: by the beginning of a name, a tensor that those below it are like if they are of
            its shape: an optimizer's parameters.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        parts: Mapping[str, Shard],
        models: Mapping[str, torch.Tensor],
        owners: Mapping[str, torch.Tensor],
    ) -> None:
        self._tensors = tensors
        self._parts = parts
        self._models = {name: model for name, model in models.items() if is_sharded(model)}
        self._owners = {name: one for name, one in owners.items() if is_sharded(one)}

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        """That tensor.

        Raises:
            StateError: the State has another part of it, or a whole of another shape.
        """
        model = self._model(name)
        mine = None if model is None else held(model)
        theirs = self._parts.get(name)
        if theirs == mine:
            tensor = self._tensors[name]
        elif theirs is not None:
            wanted = "all of it" if mine is None else f"{mine.part} of {mine.whole}"
            raise StateError(
                f"the State has {theirs.part} of tensor {name!r}, which is {theirs.whole}, and "
                f"this process needs {wanted}. A State in parts fits the place that it was "
                "captured at; any other takes its own from the store."
            )
        else:
            assert mine is not None  # noqa: S101 - for mypy: theirs is None and differs
            tensor = self._cut(name, mine)
        return tensor if model is None else like(tensor, model)

    def _model(self, name: str) -> torch.Tensor | None:
        if name in self._models:
            return self._models[name]
        beginning = name
        while self._owners and "/" in beginning:
            beginning = beginning.rpartition("/")[0]
            if beginning in self._owners:
                owner = self._owners[beginning]
                return owner if self._shape(name) == tuple(owner.shape) else None
        return None

    def _shape(self, name: str) -> Shape:
        if name in self._parts:
            return self._parts[name].whole
        if isinstance(self._tensors, InParts):
            return self._tensors.shape(name)
        return tuple(self._tensors[name].shape)

    def _cut(self, name: str, mine: Shard) -> torch.Tensor:
        if self._shape(name) != mine.whole:
            raise StateError(
                f"tensor {name!r} of the State is {self._shape(name)}, and here it is {mine.whole}."
            )
        if isinstance(self._tensors, InParts):
            return self._tensors.part(name, mine.part)
        return self._tensors[name][mine.part.within(Part((0,) * len(mine.whole), mine.whole))]
