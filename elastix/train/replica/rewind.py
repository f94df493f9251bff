"""What a step changes beside model and optimizer state, kept so that the step can be done again.

No optimizer has gradients in a void step, so it moves nothing, but the loop's body runs, around its
last backward pass as well: schedulers step, learning rates change, averages move. All that is put
back before the step is done again, and so are parameters and an optimizer's tensors that the loop
changes by itself after its last backward pass.

Where steps may be void often, all is copied when a step begins (`keep`). Else, in nearly all runs,
only what is cheap to copy is (`outline`); the rest is when a step turns out void, if it is still
what it was when the step began (`fill_in`). Whether it is, version counters tell, and a few
elements, since `tensor.data` goes past these.

Hardly any loop changes parameters before its backward pass. So they are copied when a step turns
out void. Where steps may be void often they are copied when a step begins: when each does if the
loop was seen to do so, and when this worker's first one does, since nobody has seen it yet.

Some loops have an optimizer use its gradients when the next batch is there. They are no part of a
State, and are gone when the step is done again: what was made of them stays. What such a loop has
changed by itself before that cannot be told from it, nor can what an object has that holds the
optimizer.

A further pass on a batch is a step that is not done again: the loop goes on after it. Nothing is
put back for it.

Not here: buffers (comm.gradients.buffer_bucket) and samples (data.loader).
"""

import copy
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch

from elastix.state import Stateful, sample_of
from elastix.train.replica.outlines import (
    Mark,
    Outline,
    mark,
    marks,
    outline_of,
    same,
    small,
    tensors_of,
)


class Rewind:
    """The small part of a State as it was at the last boundary.

    Attributes:
        due: the step since then is void.
        marked: there was a boundary.
        first: no step has ended since then, so the next is not a further pass on a batch. False
            before the first boundary.
    """

    def __init__(self) -> None:
        self.due = self.marked = self.first = False
        self._kept: dict[str, Any] = {}
        self._outlines: dict[str, Outline] = {}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what was in them
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._tables: list[tuple[dict[Any, Any] | list[Any], Any]] = []  # and what was in them
        self._again = False  # the step has to begin with just these
        self._parameters: list[torch.nn.Parameter] = []
        self._versions: list[int] = []  # of these, at the boundary
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the first and the last
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whether the loop changes parameters between a boundary and its first pass, if seen yet.
        self._moves: bool | None = None
        self._copying = False  # if it may
        self._mixed = False  # it has there, and then an optimizer has

    def prepared(self, modules: Iterable[torch.nn.Module]) -> None:
        """The parameters of these are what the loop may change, but for those of inference mode."""
        every = {id(p): p for module in modules for p in module.parameters()}.values()
        self._parameters = [parameter for parameter in every if not parameter.is_inference()]

    def set_out(self, *, copies: bool) -> None:
        """A step begins from here.

        Args:
            copies: parameters are copied, if this loop may change them before its backward pass.
        """
        self.marked = self.first = True
        self._mixed, self._copying = False, copies
        self._look()

    def before_optimizer(self) -> None:
        """One takes a step. Before the first pass it has the gradients of the step before."""
        self._mixed |= self.first and self._moved

    def before_held_optimizer(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """One that another object holds takes a step, which changes that object's state as well.

        Before the first pass, that cannot be told from what the object itself has changed.
        """
        groups = optimizer.param_groups
        used = any(parameter.grad is not None for group in groups for parameter in group["params"])
        self._mixed |= self.first and used and not closure  # which runs a pass of its own

    def after_optimizer(self) -> None:
        """It has: what it has made of them stays."""
        if self.first:
            self._look()

    def _look(self) -> None:
        """Parameters are put back to what they are now."""
        copies = self._copying and self._moves is not False
        self._copies = _copied(self._parameters) if copies else []
        self._versions = [parameter._version for parameter in self._parameters]
        ends = self._parameters[:: max(1, len(self._parameters) - 1)]
        self._samples = [(parameter, sample_of(parameter)) for parameter in ends]

    def left(self, *, copies: bool) -> None:
        """A step counts. The first after a boundary shows whether the loop moves parameters itself.

        Args:
            copies: see `set_out`.
        """
        if copies and self.first and not self._moves:
            self._moves = self._mixed or self._moved
        self.first, self._copies = False, []

    @property
    def _moved(self) -> bool:
        """Whether the loop itself has changed parameters since they were looked at."""
        if self._copies:
            return not all(same(parameter, value) for parameter, value in self._copies)
        if self._versions != [parameter._version for parameter in self._parameters]:
            return True
        return not all(same(sample_of(parameter), sample) for parameter, sample in self._samples)

    def keep(self, others: Mapping[str, Stateful]) -> None:
        """Remember `others` as they are: optimizers but for their tensors, the rest whole."""
        for name, other in others.items():
            if (state := small(name, other)) is not None:
                self._kept[name] = copy.deepcopy(state)

    def outline(self, others: Mapping[str, Stateful]) -> None:
        """A step begins: remember what is cheap to copy of what `keep` copies."""
        self._outlines = {name: outline_of(name, other) for name, other in others.items()}

    def fill_in(self, others: Mapping[str, Stateful]) -> str | None:
        """The step since `outline` is void: remember the rest.

        Returns:
            The name of one that has changed since, in what was not copied; None if there is none.
        """
        for name, other in others.items():
            if (state := small(name, other)) is None:
                continue
            outline = self._outlines.get(name)
            try:
                if outline is None:  # it came within the step
                    self._kept[name] = copy.deepcopy(state)
                    continue
                if not all(same(sample_of(large), sample) for large, sample in outline.samples):
                    return name
                if isinstance(other, torch.nn.Module):
                    now = marks(tensors_of(other))
                    self._kept[name] = _unless_changed(outline.of, now, state)
                else:
                    self._kept[name] = _filled(outline.of, state)
            except _Changed:
                return name
        return None

    def keep_tensors(self, others: Iterable[Stateful], *, again: bool) -> bool:
        """The first step since `set_out` is void: parameters and an optimizer's tensors as then.

        Args:
            others: optimizers are among them.
            again: the slices of the void step have to be computed again from just these.

        Returns:
            Whether they can be put back: not if parameters have changed since, and were not copied.
            Where `again` is set it is found out later; see `begins_otherwise`.
        """
        self._again = again and not self._copies
        kept = not self._mixed and (bool(self._copies) or self._again or not self._moved)
        optimizers = [other for other in others if isinstance(other, torch.optim.Optimizer)]
        self._states = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        moments: list[torch.Tensor] = []
        self._tables = []
        for _, state in self._states:
            for value in state.values():
                _go_through(value, moments, self._tables)
        parameters = self._copies or _copied(self._parameters)
        self._tensors = [*_copied(moments), *parameters]  # which may lie where a moment does
        self._copies = []
        return kept

    def begins_otherwise(self) -> bool:
        """Whether the slices of a step that is done again begin with other tensors than before.

        Their bytes are compared, since a change may have gone past their version counters.
        """
        kept, again = self._tensors, self._again
        self.forget_tensors()
        return again and not all(same(tensor, value) for tensor, value in kept)

    def forget_tensors(self) -> None:
        """A State has come: a step that is done again begins with what that has."""
        self._tensors, self._states, self._tables, self._again = [], [], [], False

    def restore(self, others: Mapping[str, Stateful]) -> None:
        """Put back what was kept, if the step since then is void."""
        if not self.due:
            return
        self.due = False
        with torch.no_grad():
            for table, held in self._tables:
                table.clear()
                table.update(held) if isinstance(table, dict) else table.extend(held)
            for optimizer, state in self._states:
                optimizer.state.clear()  # also what a further pass on the batch has made
                optimizer.state.update(state)
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for name, kept in self._kept.items():
            other = others[name]
            if isinstance(other, torch.optim.Optimizer):
                for group, values in zip(other.param_groups, kept, strict=True):
                    group.update(copy.deepcopy(values))
            else:
                other.load_state_dict(copy.deepcopy(kept))
        if not self._again:
            self.forget_tensors()


def _go_through(
    value: Any,  # noqa: ANN401 - any part of an optimizer's state
    tensors: list[torch.Tensor],
    tables: list[tuple[dict[Any, Any] | list[Any], Any]],
) -> None:
    """Collect the tensors of a value, and its tables and lists with what they hold."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, dict | list | tuple):
        parts = list(value.values() if isinstance(value, dict) else value)
        if not isinstance(value, tuple):
            tables.append((value, dict(value) if isinstance(value, dict) else parts))
        for part in parts:
            _go_through(part, tensors, tables)


def _copied(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """On the CPU: other memory may have no room for a copy."""
    return [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]


class _Changed(Exception):
    """And was not copied before that."""


def _unless_changed(before: Mark, now: Mark, value: Any) -> Any:  # noqa: ANN401 - any state
    if before != now:
        raise _Changed
    return copy.deepcopy(value)


def _filled(outline: Any, value: Any) -> Any:  # noqa: ANN401 - any part of a state
    """A part as it was when it was outlined; `value` is what it is now.

    Raises:
        _Changed: it cannot be told any more.
    """
    if isinstance(outline, Mark):
        return _unless_changed(outline, mark(value), value)
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
