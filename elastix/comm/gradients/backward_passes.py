"""Where a backward pass of autograd ends, and whether others run inside it.

Checkpoints that re-enter autograd run passes inside another. What they belong to ends with the
outermost.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from elastix.errors import ConfigError


class BackwardPasses:
    """See the module.

    Args:
        came: called within a pass, perhaps several times, before its end.
        ended: called at the end of the outermost.

    Attributes:
        nest: a pass was seen inside another; None if that is not known yet.
    """

    def __init__(self, came: Callable[[], None], ended: Callable[[], None]) -> None:
        self.nest: bool | None = None
        self._came = came
        self._ended = ended
        # By number of autograd's task; it drops what was to be called after a failure.
        self._endings: dict[int, weakref.ref[Callable[[], None]]] = {}

    def within(self) -> None:
        """To be called in a backward pass: its end will be told.

        Raises:
            ConfigError: one before it was left by an exception.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._endings:
            if any(ending() is None for ending in self._endings.values()):
                raise abandoned()
            ending = partial(self._over, task)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
            self._endings[task] = weakref.ref(ending)
        self._came()

    def over(self) -> None:
        """The outermost has ended: whether passes nest is known."""
        self.nest = bool(self.nest)

    @contextmanager
    def as_nested(self) -> Iterator[None]:
        """Within it passes count as nested."""
        before, self.nest = self.nest, True
        yield
        self.nest = before

    def _over(self, task: int) -> None:
        del self._endings[task]
        around: Any = torch._C._current_autograd_node()
        if around is None:
            if self._endings:
                raise abandoned()
            self._ended()
            return
        self.nest = True
        for node, _ in around.next_functions:  # what the pass around this one comes to next
            if node is not None:
                node.register_prehook(lambda *_: self.within())


def abandoned() -> ConfigError:
    """A backward pass did not come to its end."""
    return ConfigError(
        "a backward pass was left by an exception that the train function caught. Other "
        "workers may have this worker's gradients in part, so the step cannot be finished, nor "
        "taken back; the run ends. Let the exception through, or make sure that it does not "
        "come: smaller pieces of the batch within ctx.accumulate() need less memory."
    )
