"""Of an object with a state: a copy of what is cheap to copy, and marks that show other changes.

Large tensors are marked by torch's count of their changes, and a few elements, since `tensor.data`
goes past it. Not here: what follows from a change (rewind, slice_effects).
"""

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastix.state import Stateful, raw_bytes, sample_of

_FEW = 64
"""Elements of a list, a tuple or a tensor that is copied in every step."""
_MANY = 4096
"""Entries of a table, of tensors mostly, or plain elements of anything, that are gone through."""
_MANY_BYTES = 1 << 20
"""Of an array that is looked at whole for whether it has changed."""
_LOOKED_AT = 8
"""Large tensors of an object, of which some elements are kept: an average moves all of them."""
_PLAIN = (int, float, complex, str, bytes, np.generic)
_ROWS = (list, tuple, deque, set, frozenset)


@dataclass(frozen=True)
class Mark:
    """In place of what is dear to copy: what shows whether it has changed."""

    of: tuple[Any, ...]


@dataclass(frozen=True)
class Outline:
    """Of one object.

    Attributes:
        of: a copy with marks, or marks alone.
        samples: of some of what is marked, tensors and a few elements of each.
    """

    of: Any
    samples: list[tuple[torch.Tensor, torch.Tensor]]


def small(name: str, other: Stateful) -> Any:  # noqa: ANN401 - as the object has it
    """What is put back of an object; None for nothing."""
    if name == "rng":  # what is done again may be done with other random numbers
        return None
    if isinstance(other, torch.optim.Optimizer):
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in other.param_groups
        ]
    return other.state_dict()


def outline_of(name: str, other: Stateful) -> Outline:
    """That of the object with this name."""
    large: list[torch.Tensor] = []
    if isinstance(other, torch.nn.Module):  # its state would take longer
        tensors = tensors_of(other)
        of: Any = marks(tensors)
        large = [tensor for tensor in tensors if tensor.numel()]
    else:
        of = _outline(small(name, other), large)
    chosen = large[:: max(1, -(-len(large) // _LOOKED_AT))]
    return Outline(of, [(tensor, sample_of(tensor)) for tensor in chosen])


def _outline(value: Any, large: list[torch.Tensor]) -> Any:  # noqa: ANN401 - any part of a state
    """A copy, with marks in place of what is dear to copy.

    Args:
        value: of which.
        large: is given the tensors that are marked.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() <= _FEW:
            return value.detach().clone()
        if value.layout is torch.strided:
            large.append(value)
        return mark(value)
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value) if value.size <= _MANY else mark(value)
    if isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value):
        return value
    if isinstance(value, set | frozenset | deque) and len(value) <= _FEW:
        return copy.copy(value)
    if _is_row_of(_PLAIN, value):
        return copy.copy(value)
    if isinstance(value, dict) and len(value) <= _MANY:
        return {key: _outline(part, large) for key, part in value.items()}
    few = type(value) in (list, tuple) and len(value) <= _FEW
    if few or (type(value) in (list, tuple) and _is_row_of(torch.Tensor, value)):
        return type(value)(_outline(part, large) for part in value)
    return mark(value)


def _is_row_of(kind: Any, value: Any) -> bool:  # noqa: ANN401 - any part of a state
    """Whether it is, say, the last thousand losses, or the average of each parameter."""
    fits = type(value) in _ROWS and len(value) <= _MANY
    return fits and all(isinstance(part, kind) for part in value)


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """What a module learns and keeps."""
    return [*module.parameters(), *module.buffers()]


def marks(tensors: Iterable[torch.Tensor]) -> Mark:
    """One for all of these."""
    return Mark(tuple(map(mark, tensors)))


def mark(value: Any) -> Mark:  # noqa: ANN401 - any part of a state
    """What goes in its place."""
    if isinstance(value, torch.Tensor):
        place = value.data_ptr() if value.layout is torch.strided else 0
        return Mark((place, value._version, value.shape))
    if isinstance(value, np.ndarray) and value.nbytes <= _MANY_BYTES and not value.dtype.hasobject:
        return Mark((value.dtype, value.shape, zlib.crc32(value.tobytes())))
    return Mark((type(value), len(value) if isinstance(value, Sized) else 0))


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """To the last bit."""
    return torch.equal(raw_bytes(tensor), raw_bytes(other))


def is_still(outline: Outline, name: str, other: Stateful) -> bool:
    """Whether nothing shows that an object has changed since it was outlined."""
    if not all(same(sample_of(large), sample) for large, sample in outline.samples):
        return False
    if isinstance(other, torch.nn.Module):
        return bool(outline.of == marks(tensors_of(other)))
    return _is_still(outline.of, small(name, other))


def _is_still(outline: Any, value: Any) -> bool:  # noqa: ANN401 - any part of a state
    if isinstance(outline, Mark):
        return outline == mark(value)
    if isinstance(outline, torch.Tensor):
        fits = isinstance(value, torch.Tensor) and outline.shape == value.shape
        return fits and outline.dtype == value.dtype and same(outline, value)
    if isinstance(outline, np.ndarray):
        return isinstance(value, np.ndarray) and outline.tobytes() == value.tobytes()
    if isinstance(outline, dict):
        there = isinstance(value, dict) and outline.keys() == value.keys()
        return there and all(_is_still(part, value[key]) for key, part in outline.items())
    if type(outline) in (list, tuple):
        there = isinstance(value, list | tuple) and len(outline) == len(value)
        return there and all(map(_is_still, outline, value))
    return bool(outline == value or (outline != outline and value != value))  # not a number
