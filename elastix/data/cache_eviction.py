"""Who will want which sample when. Pure.

The order of an epoch is a function of seed and epoch, so whoever knows how far a reader is knows
its whole future. What makes room is the sample that nobody will want for longest.

Source: L. A. Belady, A study of replacement algorithms (1966), over the futures of all readers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

NEVER = int(np.iinfo(np.int64).max)
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReaderPosition:
    """How far somebody is.

    Attributes:
        seed: of the order; see sample_order.
        epoch: in progress, from 0.
        offset: samples of it that are behind this reader.
        epochs: that it is going to read, all told.
        shuffle: without it every epoch is in the order of the dataset.
    """

    seed: int
    epoch: int
    offset: int
    epochs: int
    shuffle: bool = True


class Horizon:
    """The futures of several readers of one dataset."""

    def __init__(self, length: int, order: Callable[[int, int], Indices]) -> None:
        """`order(seed, epoch)` is a permutation of range(length)."""
        self._length = length
        self._order = order
        self._places = lru_cache(maxsize=8)(self._inverse)

    def next_use(self, indices: Indices, readers: Sequence[ReaderPosition]) -> Indices:
        """How many samples the nearest reader will read before each of these; NEVER for none.

        Readers are taken to be equally fast, and further epochs than the next do not matter: an
        epoch has every sample.
        """
        nearest = np.full(len(indices), NEVER)
        for reader in readers:
            if reader.epoch >= reader.epochs:
                continue
            ahead = self._at(reader, reader.epoch)[indices] - reader.offset
            use = np.where(ahead >= 0, ahead, NEVER)
            if reader.epoch + 1 < reader.epochs:
                later = self._at(reader, reader.epoch + 1)[indices]
                use = np.where(ahead >= 0, ahead, self._length - reader.offset + later)
            nearest = np.minimum(nearest, use)
        return nearest

    def wanted(self, readers: Sequence[ReaderPosition], window: int, missing: Indices) -> list[int]:
        """Of the missing samples those that are wanted within `window` samples, nearest first."""
        uses = self.next_use(missing, readers)
        near = np.flatnonzero(uses < window)
        return [int(i) for i in missing[near[np.argsort(uses[near], kind="stable")]]]

    def _at(self, reader: ReaderPosition, epoch: int) -> Indices:
        if not reader.shuffle:
            return np.arange(self._length)
        return self._places(reader.seed, epoch)

    def _inverse(self, seed: int, epoch: int) -> Indices:
        """The place in the epoch of each sample."""
        places = np.empty(self._length, np.int64)
        places[self._order(seed, epoch)] = np.arange(self._length)
        return places


def victims(uses: Indices, amount: int) -> Indices:
    """Places in `uses` of the `amount` farthest, the farthest first."""
    amount = min(amount, len(uses))
    if amount < 1:
        return np.empty(0, np.int64)
    farthest = np.argpartition(-uses, amount - 1)[:amount]
    return farthest[np.argsort(-uses[farthest], kind="stable")]
