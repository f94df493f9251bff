"""Whether steps are made on batches of torch's own DataLoader, which the group does not share.

Each worker has all of its batches then. That may be meant, so a hint is all that is given. What is
evaluated on is nobody's business: counted are batches that are read with gradients on, and only
steps that follow each other, each with such a batch of its own, tell.

Not here: whether the train function uses loaders of elastix (step_commits).
"""

import functools
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_STEPS = 2
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

    def step(self) -> bool:
        """A step counts, of a train function without a loader of elastix.

        Returns:
            Whether it is time for the hint: once, if at all.
        """
        read, self._before = _read - self._before, _read
        self._steps = self._steps + 1 if read or self._steps >= _STEPS else 0
        return self._steps == _STEPS
