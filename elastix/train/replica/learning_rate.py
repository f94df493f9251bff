"""Learning rates that follow the size of the group, for loops whose batch follows it.

With `ctx.loader(..., per_worker=True)` a step has twice the samples when the group has twice the
workers. A rate that was right for the smaller batch is then too small: it is multiplied by the
ratio (linear), or by its square root, and a change is spread over some steps.

Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017 (linear
scaling and gradual warm-up); the square root keeps the variance of the update instead.
"""

import logging
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import OneCycleLR

from elastix.errors import ConfigError

logger = logging.getLogger(__name__)

Rule = Literal["linear", "sqrt"]
_RULES = ("linear", "sqrt")


class RateScaling:
    """A factor on the learning rates of one optimizer, in force during its `step` alone.

    Schedulers and everything else see the rates as they were set.

    Args:
        optimizer: whose rates are scaled.
        rule: "linear" or "sqrt".
        reference: number of workers for which the rates are meant.
        warmup_steps: over how many steps a change of the factor is spread.

    Attributes:
        factor: of the step in hand.

    Raises:
        ConfigError: another rule, or numbers that make no sense.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rule: Rule, reference: int, warmup_steps: int
    ) -> None:
        if rule not in _RULES:
            raise ConfigError(
                f"ctx.scale_rate: rule must be one of {_RULES}, not {rule!r}. No rate was changed."
            )
        if reference < 1 or warmup_steps < 0:
            raise ConfigError(
                f"ctx.scale_rate: reference must be >= 1 and warmup_steps >= 0, not {reference} "
                f"and {warmup_steps}. No rate was changed."
            )
        self.factor = 1.0
        self._power = 1.0 if rule == "linear" else 0.5
        self._reference = reference
        self._warmup_steps = warmup_steps
        self._start = self._target = 1.0
        self._taken = 0
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._put_back)

    def observe(self, workers: int) -> None:
        """A step was agreed on to which so many workers contributed; its update comes next."""
        target = (workers / self._reference) ** self._power
        if target != self._target:
            self._start, self._target, self._taken = self.factor, target, 0
        self._taken = min(self._taken + 1, self._warmup_steps)
        done = self._taken / self._warmup_steps if self._warmup_steps else 1.0
        self.factor = self._start + (self._target - self._start) * done

    def state_dict(self) -> dict[str, Any]:
        """Where the warm-up is."""
        return {
            "factor": self.factor,
            "start": self._start,
            "target": self._target,
            "taken": self._taken,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.factor = state_dict["factor"]
        self._start, self._target = state_dict["start"], state_dict["target"]
        self._taken = state_dict["taken"]

    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _put_back(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def hold_at_end(scheduler: Any) -> None:  # noqa: ANN401 - whatever belongs to the State
    """Let a OneCycleLR, or one within another scheduler, keep its last rate when its steps are up.

    Torch raises then. Samples of a lost worker come back as further batches, so a run may have a
    few steps more than were planned, and must not end for that.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        hold_at_end(inner)
    if type(scheduler) is OneCycleLR:  # its attributes are its state, so it has none more
        scheduler.__class__ = _Held


class _Held(OneCycleLR):
    def step(self, epoch: int | None = None) -> None:
        """As torch's, but for further steps."""
        if epoch is None and self.last_epoch >= self.total_steps:
            if self.last_epoch == self.total_steps:
                logger.warning(
                    "OneCycleLR has made its %d steps and keeps its last rate. A run in which a "
                    "worker is lost may have a few steps more; if none was, give it more steps.",
                    self.total_steps,
                )
                self.last_epoch += 1  # it is said once
            return
        super().step(epoch)
