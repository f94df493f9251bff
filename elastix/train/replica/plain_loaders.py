"""What a train function without a loader of elastix makes its steps on, and whether it marks them.

Of torch's own DataLoader each worker has all batches. That may be meant, so a hint is all that is
given. What is evaluated on is nobody's business: counted are batches that are read with gradients
on, and only steps that follow each other, each with such a batch of its own, tell.

Where neither a loader nor ctx.boundary says where a step begins, nothing can happen between two of
them: nobody joins, and no State is stored. That is said after as many steps as no closure of LBFGS
takes between two boundaries by default.

Not here: whether the train function uses loaders of elastix (step_commits).
"""

import functools
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_STEPS = 2
UNMARKED = 30
_read = 0
_counts = False


def watch() -> None:
    """Count batches from now on, in this process."""
    global _counts
    if _counts:
        return
    _counts = True
    own: Any = _BaseDataLoaderIter.__next__

    @functools.wraps(own)
    def read(self: Any) -> Any:  # noqa: ANN401 - a batch of any kind
        global _read
        _read += torch.is_grad_enabled()
        return own(self)

    _BaseDataLoaderIter.__next__ = read  # type: ignore[method-assign]


class PlainLoaders:
    """What the steps of one worker were made on."""

    def __init__(self) -> None:
        self._before = 0
        self._steps = 0
        self._unmarked = 0  # steps, as long as there was no boundary at all
        self._marks = False

    def boundary(self) -> None:
        """A step begins here."""
        self._marks = True

    def step(self) -> bool:
        """A step counts, of a train function without a loader of elastix.

        Returns:
            Whether it is time for the hint: once, if at all.
        """
        read, self._before = _read - self._before, _read
        self._steps = self._steps + 1 if read or self._steps >= _STEPS else 0
        return self._steps == _STEPS

    def unmarked(self) -> bool:
        """A step counts, of a train function without a loader of elastix.

        Returns:
            Whether it is time to say that nothing marks where steps begin: once, if at all.
        """
        self._unmarked += not self._marks
        return self._unmarked == UNMARKED and not self._marks
