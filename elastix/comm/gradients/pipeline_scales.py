"""That the gradients of a stage are scaled once in each ctx.backward(), and nowhere else in a step.

At its end a schedule of torch's divides all gradients of its stages by the number of micro-batches,
and so those that another schedule has left there too.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastix.errors import ConfigError

_STAGES = "torch.distributed.pipelining.stage"
_scaled: set[int] | None = None
"""In ctx.backward(): modules of stages whose gradients were scaled."""
_refused = False
"""Gradients are added up, and this is not within ctx.backward()."""


@contextmanager
def once() -> Iterator[None]:
    """Within it no gradients are scaled after those of another schedule were added to them.

    Raises:
        ConfigError: at the end of that schedule.
    """
    global _scaled, _refused
    _watch()
    before = _scaled, _refused
    _scaled, _refused = set(), False
    try:
        yield
    finally:
        _scaled, _refused = before


@contextmanager
def refused() -> Iterator[None]:
    """Within it schedules belong into `once`.

    Raises:
        ConfigError: at the end of one that does not stand there.
    """
    global _refused
    _watch()
    before, _refused = _refused, True
    try:
        yield
    finally:
        _refused = before


def _watch() -> None:
    """Hear of it from now on, in this process; whoever runs a schedule has imported stages."""
    base: Any = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    own = getattr(base, "scale_grads", None)
    if own is None or getattr(own, "once", False):
        return

    @functools.wraps(own)
    def scale(self: Any, factor: int) -> None:  # noqa: ANN401 - a stage
        _look(id(self.submod), factor)
        own(self, factor)

    scale.once = True  # type: ignore[attr-defined]
    base.scale_grads = scale


def _look(module: int, factor: int) -> None:
    if _refused:
        raise ConfigError(
            "a schedule was run within ctx.accumulate() and outside of ctx.backward(). At its end "
            f"torch divides all gradients by its {factor} micro-batches, and so those of the "
            "batches before. The step was not taken; the run ends. Write: with ctx.accumulate(), "
            "ctx.backward(): schedule.step(...)"
        )
    if _scaled is None:
        return
    if module in _scaled and factor != 1:
        raise ConfigError(
            "a second schedule was run within one ctx.backward(). At its end torch divides all "
            f"gradients by its {factor} micro-batches, and so the first one's once more. The step "
            "was not taken; the run ends. Run one schedule in each ctx.backward(): on "
            "torch.cat of the batches, say."
        )
    _scaled.add(module)
