"""That the gradients of a stage are scaled once a step.

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
"""In a step: modules of stages whose gradients were scaled."""


@contextmanager
def once() -> Iterator[None]:
    """Within it no gradients are scaled after those of another schedule were added to them.

    Raises:
        ConfigError: at the end of that schedule.
    """
    global _scaled
    _watch()
    before, _scaled = _scaled, set()
    try:
        yield
    finally:
        _scaled = before


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
