"""What one worker's run takes from other models at its beginning, and leaves to them at its end.

The model source knows where models are (model_source); here it is asked once for each, in its turn.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from elastix.data.rehearsal import Rehearsal
from elastix.errors import ConfigError
from elastix.events import AncestorIgnored, Event, StateStored, TensorsInherited
from elastix.state import State, Stateful
from elastix.train.replica.model_source import ModelSource, TrainedModel
from elastix.train.replica.tracked_objects import TrackedObjects


class Inheritance:
    """One worker's.

    Args:
        source: None for a run that has nothing to do with other models.
    """

    def __init__(self, source: ModelSource | None) -> None:
        self._source = source
        self._asked_for: torch.nn.Module | None = None
        self._inherited: tuple[torch.nn.Module, Mapping[str, Any]] | None = None

    @property
    def takes_final(self) -> bool:
        """Whether the final State goes to other models, and does not stay with the run."""
        return self._source is not None and self._source.takes_final

    def inherit(
        self, model: torch.nn.Module, rehearsal: Rehearsal | None
    ) -> TensorsInherited | None:
        """Copy tensors of an ancestor into `model`; what was copied, None for nothing.

        Raises:
            ConfigError: another model has asked before.
        """
        if self._source and self._asked_for is not None and self._asked_for is not model:
            raise _for_another()
        self._asked_for = model
        found = self._source.inherit(model) if self._source is not None else None
        if found is None:
            return None
        if rehearsal is not None and self._source is not None:
            self._source.rehearse(found, rehearsal)
        self._inherited = model, found
        return TensorsInherited(found=found)

    def prepared(self, tracked: TrackedObjects) -> Event | None:
        """Give optimizers what the ancestor's had, now that they are known.

        Returns:
            What there is to say of it: that nobody has asked for an ancestor's tensors.

        Raises:
            ConfigError: a further model has, of which an ancestor's signature says nothing.
        """
        if self._source is None:
            return None
        if any(self._asked_for is one for one in [*tracked.modules.values()][1:]):
            raise _for_another()
        if self._inherited is not None:
            model, found = self._inherited
            if model is tracked.model:
                self._source.warm_start(found, tracked.modules, tracked.others)
        elif self._source.has_ancestor and self._asked_for is None:
            return AncestorIgnored()
        return None

    def tracked(self, tracked: TrackedObjects, begun: Mapping[str, Stateful]) -> None:
        """The same for what comes after the model was prepared, and begins with this run."""
        if self._source is None or self._inherited is None or not tracked.modules:
            return
        model, found = self._inherited
        if model is tracked.model:
            self._source.warm_start(found, tracked.modules, begun)

    def resume(self) -> State | None:
        """The State that was left at a pause."""
        return self._source.resume() if self._source is not None else None

    def place(self) -> tuple[State, Mapping[str, str], bool] | None:
        """The State in whose place the run begins, what it has of it, and whether that is all.

        None where it begins at the beginning, as it does if it has inherited nothing.
        """
        if self._source is None or self._inherited is None:
            return None
        model, found = self._inherited
        state = self._source.place()
        if state is None:
            return None
        return state, found["tensors"], _each_once(model) <= set(found["tensors"])

    def leave(self, left: TrainedModel, step: int) -> StateStored | None:
        """Leave a State to other models. Blocks until it is stored, if it is worth it."""
        started = time.monotonic()
        stored = self._source.leave(left) if self._source is not None else None
        if stored is None:
            return None
        took_s = time.monotonic() - started
        return StateStored(
            ref=stored.ref,
            step=step,
            reason=left.reason,
            stored_bytes=stored.stored_bytes,
            store_s=took_s,
            stall_s=took_s,
            state_bytes=stored.state_bytes,
        )


def _each_once(model: torch.nn.Module) -> set[str]:
    """The names of its tensors; of one that has several, as tied weights do, the first."""
    first: dict[int, str] = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if isinstance(one, torch.Tensor):  # and not what a get_extra_state gives
            first.setdefault(id(one), name)
    return set(first.values())


def _for_another() -> ConfigError:
    return ConfigError(
        "ctx.inherit was called for another model than the first argument of ctx.prepare. Layers "
        "of an ancestor are known of its first model alone, and others could be taken for them. "
        "Call it once, for that one."
    )
