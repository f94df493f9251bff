"""Schedulers of prepared optimizers that are no part of the State, and so begin anew with it.

A worker that joins, and a run that goes on from a stored State, make them again and count from the
beginning, while the others, or the run that went on, would be further. Torch marks the optimizers
that schedulers are made for, all but ReduceLROnPlateau. All objects of the process are looked
through, once, for an optimizer that is marked, in a group or an exact run for any, and only if
nothing in the State may be its scheduler or keep it.

Not here: schedulers that are a part of the State (tracked_objects).
"""

import gc
import weakref
from collections.abc import Collection

import torch
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR

from elastix.data.random_numbers import RandomState
from elastix.errors import ConfigError

UNPREPARED = (
    "a scheduler (%s) was given neither to ctx.prepare nor to ctx.track: in a worker that joins, "
    "and in a run that is continued, it counts from the beginning again, so they train at other "
    "rates. The run goes on. Give it to ctx.prepare with its optimizer."
)


def refused(kind: str) -> ConfigError:
    """With exact=True, one of this class."""
    return ConfigError(
        f"RunConfig(exact=True) and a scheduler ({kind}) that was given neither to ctx.prepare nor "
        "to ctx.track: in a worker that joins, and in a run that is continued, it counts from the "
        "beginning again, so what comes out depends on which workers are lost. The step was not "
        "taken; the run ends. Give it to ctx.prepare with its optimizer, or leave exact out."
    )


class UnpreparedSchedulers:
    """Those of one worker."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, list[tuple[weakref.ref[LRScheduler], int]]
        ] = weakref.WeakKeyDictionary()
        self._told = False

    def look(
        self, optimizer: torch.optim.Optimizer, others: Collection[object], *, unmarked: bool
    ) -> str | None:
        """Find one that was forgotten.

        Args:
            optimizer: a prepared one, about to take a step.
            others: what is in the State with it.
            unmarked: look although torch has not marked it.

        Returns:
            The class of a scheduler that has moved on since the optimizer's first step here; once.
        """
        if self._told or not (unmarked or hasattr(optimizer.step, "_wrapped_by_lr_sched")):
            return None
        if any(_may_keep(other, optimizer) for other in others):
            return None
        seen = self._seen.get(optimizer)
        if seen is None:
            self._seen[optimizer] = _schedulers(optimizer)
            return None
        for reference, count in seen:
            scheduler = reference()
            if scheduler is not None and _count(scheduler) != count:
                self._told = True
                return type(scheduler).__name__
        return None


def _may_keep(other: object, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the optimizer's scheduler, or something of the user's that may hold it."""
    if isinstance(other, LRScheduler):
        return getattr(other, "optimizer", None) is optimizer
    torchs = torch.optim.Optimizer | torch.amp.GradScaler | torch.nn.Module | RandomState
    return not isinstance(other, torchs)


def _schedulers(optimizer: torch.optim.Optimizer) -> list[tuple[weakref.ref[LRScheduler], int]]:
    """Those that were made for it, each with how often it has moved on."""
    found = (other for other in gc.get_objects() if issubclass(type(other), LRScheduler))
    return [
        (weakref.ref(one), _count(one))
        for one in found
        if getattr(one, "optimizer", None) is optimizer and not _goes_by_rates(one)
    ]


def _count(scheduler: LRScheduler) -> int:
    """How often it has moved on; ReduceLROnPlateau counts nothing but epochs."""
    count: int = getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0))
    return count


def _goes_by_rates(scheduler: LRScheduler) -> bool:
    """Whether it goes by nothing but the optimizer's rates, which are in the State."""
    return isinstance(scheduler, ExponentialLR) or (
        isinstance(scheduler, StepLR) and scheduler.step_size == 1
    )
