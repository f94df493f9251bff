"""Optimizers that are no part of the State, and train by this worker's part of the batches.

A critic that was forgotten in ctx.prepare, say: nobody averages its gradients, so each worker
trains one of its own. What is trained on other data, or lives no longer than a step (an attack on a
batch), is nobody's business.

Not here: optimizers of prepared parameters (tracked_objects), and what follows (step_commits).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastix.errors import ConfigError

UNPREPARED = (
    "an optimizer (%s) whose parameters were not given to ctx.prepare takes steps by gradients of "
    "each worker's own samples: nobody averages them, so each trains a model of its own, and a "
    "joiner begins with a new one. The run goes on. Give its module and the optimizer to "
    "ctx.prepare with the others."
)


def refused(optimizer: torch.optim.Optimizer) -> ConfigError:
    """With exact=True."""
    return ConfigError(
        f"RunConfig(exact=True) and an optimizer ({type(optimizer).__name__}) that takes steps by "
        "gradients from the loop over slices, and whose parameters were not given to ctx.prepare: "
        "nobody adds up theirs, so what it trains depends on which slices this worker computed. "
        "The step was not taken; the run ends. Give its module and the optimizer to ctx.prepare "
        "with the others, or leave exact out."
    )


@dataclass
class _Seen:
    """Of one of them: in which step it was first seen, and whether it was given such gradients."""

    since: int
    trained: bool = False


class UnpreparedOptimizers:
    """Those of one worker.

    Args:
        within: whether a gradient that comes now is of a batch of the group; a bound method.
    """

    def __init__(self, within: Callable[[], bool]) -> None:
        self._within = weakref.WeakMethod(within)  # parameters may outlive the run
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = (
            weakref.WeakKeyDictionary()
        )

    def look(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """One is about to take a step, after that of the group.

        Returns:
            Whether by gradients of a batch of the group, and not in one step alone.
        """
        seen = self._seen.get(optimizer)
        if seen is None:
            self._seen[optimizer] = seen = _Seen(step)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.is_leaf and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_noting(seen, self._within))
        found = seen.trained and step > seen.since
        seen.trained = False
        return found


def _noting(
    seen: _Seen, within: weakref.WeakMethod[Callable[[], bool]]
) -> Callable[[torch.Tensor], None]:
    def note(_parameter: torch.Tensor) -> None:
        asked = within()
        seen.trained |= asked is not None and asked()

    return note
