"""In which order the samples of a dataset come: which one stands at which position. Pure.

Position `epoch * length + k` of a loader's stream is the k-th sample of that epoch, whatever the
size of the group. All of it is a function of the seed, so a resumed run has the same order.

Not here: which positions come next (cursor), and how a very long order is computed (permutation).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from elastix.data.permutation import FROM, scattered
from elastix.events import Span

_PART = 1 << 15  # places of a scattered order that are computed together


def order(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """The permutation of range(length) for one epoch: a pure function of its arguments.

    RandomState, because NumPy has frozen its streams: a run resumes in the same order after an
    upgrade.
    """
    generator = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(generator).permutation(length).astype(np.int64)


Blocks = tuple[tuple[int, int], ...]
"""Blocks of a dataset in which rows are dear to reach alone: (how many, rows of each), in order."""


def runs(sizes: Iterable[int]) -> Blocks:
    """Sizes of blocks, as `Blocks`."""
    return tuple((sum(1 for _ in same), size) for size, same in groupby(sizes))


def order_in_blocks(seed: int, epoch: int, blocks: Blocks, mixed: int) -> npt.NDArray[np.int64]:
    """A permutation of all rows that needs `mixed` blocks at a time, and each of them once.

    The blocks come in a random order, and the rows of `mixed` successive ones are shuffled
    together. A pure function of its arguments, frozen as `order` is.
    """
    generator = np.random.MT19937(np.random.SeedSequence([seed, epoch, 1]))
    random = np.random.RandomState(generator)
    sizes = np.repeat([size for _, size in blocks], [many for many, _ in blocks]).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    turns = random.permutation(len(sizes))
    parts = [np.empty(0, np.int64)]
    for first in range(0, len(turns), mixed):
        rows = [np.arange(starts[b], starts[b] + sizes[b]) for b in turns[first : first + mixed]]
        together = np.concatenate(rows)
        parts.append(together[random.permutation(len(together))])
    return np.concatenate(parts)


def indices(
    spans: Iterable[Span],
    seed: int,
    length: int,
    shuffle: bool,
    blocks: Blocks = (),
    mixed: int = 0,
    *,
    beside: bool = False,
) -> npt.NDArray[np.int64]:
    """Dataset indices at the given positions, in their order; with `blocks`, shuffled in blocks.

    With `beside` it is the order of what is rehearsed beside a stream: a batch may go through
    several, and they must not push the long ones of datasets out of the cache.
    """
    order_at = _kept_beside if beside else _kept_order
    parts: list[npt.NDArray[np.int64]] = []
    for start, stop in spans:
        while start < stop:
            epoch, offset = divmod(start, length)
            until = min(stop, (epoch + 1) * length)
            end = offset + until - start
            if shuffle:
                parts += _in_order(order_at, seed, epoch, length, blocks, mixed, offset, end)
            else:
                parts.append(np.arange(offset, end))
            start = until
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def is_scattered(length: int, blocks: Blocks) -> bool:
    """Whether the order of an epoch is computed where it is needed: whole, it would be large."""
    return length >= FROM and not blocks


def _in_order(
    order_at: Callable[[int, int, int, Blocks, int], npt.NDArray[np.int64]],
    seed: int,
    epoch: int,
    length: int,
    blocks: Blocks,
    mixed: int,
    offset: int,
    end: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Indices from one place of an epoch to another, in one or more parts."""
    if not is_scattered(length, blocks):
        yield order_at(seed, epoch, length, blocks, mixed)[offset:end]
        return
    while offset < end:
        part, within = divmod(offset, _PART)
        until = min(end, (part + 1) * _PART)
        yield _kept_part(seed, epoch, length, part)[within : within + until - offset]
        offset = until


def order_of(
    seed: int, epoch: int, length: int, blocks: Blocks, mixed: int
) -> npt.NDArray[np.int64]:
    """The order of an epoch, in blocks if there are some."""
    if is_scattered(length, blocks):
        return scattered(seed, epoch, length, np.arange(length))
    return order_in_blocks(seed, epoch, blocks, mixed) if blocks else order(seed, epoch, length)


@lru_cache(maxsize=8)
def _kept_part(seed: int, epoch: int, length: int, part: int) -> npt.NDArray[np.int64]:
    places = np.arange(part * _PART, min(length, (part + 1) * _PART))
    return scattered(seed, epoch, length, places)


_kept_order = lru_cache(maxsize=4)(order_of)  # this epoch, the one before, a second loader's
_kept_beside = lru_cache(maxsize=4)(order_of)
