"""A metric in a pipeline runs a schedule, does not call its stage, and leaves gradients alone."""

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastix.train.replica import refusals
from elastix.train.replica.evaluation import Metric, name_of

_STAGES = "torch.distributed.pipelining.stage"
_runs = 0


def required(metric: Metric) -> Metric:
    """The same, and it is refused to run none.

    Who passes activations on without torch's schedules is believed.

    Raises:
        ConfigError: at the end of a batch on which none was run.
    """

    @functools.wraps(metric)
    def computed(model: Any, batch: Any) -> Any:  # noqa: ANN401 - as the metric's
        _watch()
        before = _runs
        found = metric(model, batch)
        if _runs == before and _STAGES in sys.modules:
            raise refusals.no_schedule_ran()
        return found

    computed.__name__ = name_of(metric)
    return computed


@contextmanager
def gradients_aside(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within it there are none.

    torch's schedules divide whatever there is, `eval` too, and drop those of what FSDP2 shards as
    they learn shapes.
    """
    parameters = [p for module in modules for p in module.parameters() if p.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _watch() -> None:
    """Hear of them from now on, in this process: a schedule clears its stages as it begins."""
    base: Any = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    own = getattr(base, "clear_runtime_states", None)
    if own is None or getattr(own, "counted", False):
        return

    @functools.wraps(own)
    def clear(self: Any) -> None:  # noqa: ANN401 - a stage
        global _runs
        _runs += 1
        own(self)

    clear.counted = True  # type: ignore[attr-defined]
    base.clear_runtime_states = clear
