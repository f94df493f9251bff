"""What a step changes beside model and optimizer state, kept so that the step can be done again.

Gradients of a void step are None, so parameters and the optimizer's tensors stay as they are, but
the loop's body runs, around its last backward pass as well: schedulers step, learning rates change,
averages move. All that is put back before the step is done again. Parameters that the loop changes
by itself are put back where the run has to be exact.

Where steps may be void often, all is copied when a step begins (`keep`). Else, in nearly all runs,
only what is cheap to copy is (`outline`); the rest is when a step turns out void, if it is still
what it was when the step began (`fill_in`).

Not here: buffers (comm.gradients.buffer_bucket) and samples (data.loader).
"""

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from elastix.state import Stateful, raw_bytes

_FEW = 64
"""Elements of a list, a tuple or a tensor that is copied in every step."""
_MANY = 4096
"""Entries of a table, of tensors mostly, or plain elements of anything, that are gone through."""
_MANY_BYTES = 1 << 20
"""Of an array that is looked at whole for whether it has changed."""
_PLAIN = (int, float, complex, str, bytes, np.generic)
_ROWS = (list, tuple, deque, set, frozenset)


@dataclass(frozen=True)
class _Mark:
    """In place of what is dear to copy: what shows whether it has changed."""

    of: tuple[Any, ...]


class Rewind:
    """The small part of a State as it was at the last boundary.

    Attributes:
        due: the step since then is void.
    """

    def __init__(self) -> None:
        self.due = False
        self._kept: dict[str, Any] = {}
        self._outlines: dict[str, Any] = {}
        self._parameters: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._again = False  # the step has to begin with just these

    def keep(self, others: Mapping[str, Stateful]) -> None:
        """Remember `others` as they are: optimizers but for their tensors, the rest whole."""
        for name, other in others.items():
            if (state := _small(name, other)) is not None:
                self._kept[name] = copy.deepcopy(state)

    def outline(self, others: Mapping[str, Stateful]) -> None:
        """A step begins: remember what is cheap to copy of what `keep` copies."""
        self._outlines = {
            name: _marks(other)
            if isinstance(other, torch.nn.Module)
            else _outline(_small(name, other))
            for name, other in others.items()
        }

    def fill_in(self, others: Mapping[str, Stateful]) -> str | None:
        """The step since `outline` is void: remember the rest.

        Returns:
            The name of one that has changed since, in what was not copied; None if there is none.
        """
        for name, other in others.items():
            if (state := _small(name, other)) is None:
                continue
            outline = self._outlines.get(name)
            try:
                if outline is None:  # it came within the step
                    self._kept[name] = copy.deepcopy(state)
                elif isinstance(other, torch.nn.Module):
                    self._kept[name] = _unless_changed(outline, _marks(other), state)
                else:
                    self._kept[name] = _filled(outline, state)
            except _Changed:
                return name
        return None

    def keep_parameters(self, modules: Iterable[torch.nn.Module], *, again: bool) -> None:
        """Remember them as they are. On the CPU: other memory may have no room for a copy.

        Args:
            modules: whose.
            again: the slices of the void step will be computed again, from just these.
        """
        self._again = again
        parameters = {id(p): p for module in modules for p in module.parameters()}
        self._parameters = [
            (parameter, parameter.detach().to("cpu", copy=True))
            for parameter in parameters.values()
        ]

    def begins_otherwise(self) -> bool:
        """Whether the slices of a step that is done again begin with other parameters than before.

        Their bytes are compared, since a change may have gone past their version counters.
        """
        kept, self._parameters = self._parameters, []
        if not self._again:
            return False
        self._again = False
        return not all(torch.equal(raw_bytes(p), raw_bytes(value)) for p, value in kept)

    def forget_parameters(self) -> None:
        """A State has come: a step that is done again begins with what that has."""
        self._parameters, self._again = [], False

    def restore(self, others: Mapping[str, Stateful]) -> None:
        """Put back what was kept, if the step since then is void."""
        if not self.due:
            return
        self.due = False
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
        for name, kept in self._kept.items():
            other = others[name]
            if isinstance(other, torch.optim.Optimizer):
                for group, values in zip(other.param_groups, kept, strict=True):
                    group.update(copy.deepcopy(values))
            else:
                other.load_state_dict(copy.deepcopy(kept))


class _Changed(Exception):
    """And was not copied before that."""


def _small(name: str, other: Stateful) -> Any:  # noqa: ANN401 - as the object has it
    """What is put back of an object; None for nothing."""
    if name == "rng":  # what is done again may be done with other random numbers
        return None
    if isinstance(other, torch.optim.Optimizer):
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in other.param_groups
        ]
    return other.state_dict()


def _outline(value: Any) -> Any:  # noqa: ANN401 - any part of a state
    """A copy, with marks in place of what is dear to copy."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= _FEW else _mark(value)
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value) if value.size <= _MANY else _mark(value)
    if isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value):
        return value
    if isinstance(value, set | frozenset | deque) and len(value) <= _FEW:
        return copy.copy(value)
    if _is_plain_row(value):
        return copy.copy(value)
    if isinstance(value, dict) and len(value) <= _MANY:
        return {key: _outline(part) for key, part in value.items()}
    if type(value) in (list, tuple) and len(value) <= _FEW:
        return type(value)(map(_outline, value))
    return _mark(value)


def _is_plain_row(value: Any) -> bool:  # noqa: ANN401 - any part of a state
    """Whether it is, say, the last thousand losses."""
    fits = type(value) in _ROWS and len(value) <= _MANY
    return fits and all(isinstance(part, _PLAIN) for part in value)


def _marks(module: torch.nn.Module) -> _Mark:
    """Of all its tensors; its state would take longer."""
    return _Mark((*map(_mark, module.parameters()), *map(_mark, module.buffers())))


def _mark(value: Any) -> _Mark:  # noqa: ANN401 - any part of a state
    if isinstance(value, torch.Tensor):
        place = value.data_ptr() if value.layout is torch.strided else 0
        return _Mark((place, value._version, value.shape))
    if isinstance(value, np.ndarray) and value.nbytes <= _MANY_BYTES and not value.dtype.hasobject:
        return _Mark((value.dtype, value.shape, zlib.crc32(value.tobytes())))
    return _Mark((type(value), len(value) if isinstance(value, Sized) else 0))


def _unless_changed(before: _Mark, now: _Mark, value: Any) -> Any:  # noqa: ANN401 - any state
    if before != now:
        raise _Changed
    return copy.deepcopy(value)


def _filled(outline: Any, value: Any) -> Any:  # noqa: ANN401 - any part of a state
    """A part as it was when it was outlined; `value` is what it is now.

    Raises:
        _Changed: it cannot be told any more.
    """
    if isinstance(outline, _Mark):
        return _unless_changed(outline, _mark(value), value)
    if isinstance(outline, dict):
        now = value if isinstance(value, dict) else {}
        made = copy.copy(now)  # its class, and what that has beside its entries
        made.clear()
        made.update({key: _filled(part, now.get(key)) for key, part in outline.items()})
        return made
    if type(outline) in (list, tuple):
        there = value if isinstance(value, list | tuple) else ()
        return type(outline)(_filled(*pair) for pair in zip_longest(outline, there[: len(outline)]))
    return outline
