"""Keys kept in order while they come and go, at a cost that hardly grows with their number.

One long list would have to move half of its keys for each that comes. Here they stand in blocks of
a few thousand, so that this is all that is moved; which block it is, is found by a search.

Invariant: all keys of a block are at most those of the next, and no block is empty.
"""

from bisect import bisect_left, bisect_right, insort
from typing import Generic, TypeVar

Key = TypeVar("Key", float, tuple[float, int])

BLOCK = 2048  # twice that is the most


class Ordered(Generic[Key]):
    """Any number of keys; equal ones count each."""

    def __init__(self) -> None:
        self._blocks: list[list[Key]] = []
        self._lasts: list[Key] = []  # of each block

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, key: Key) -> None:
        """One more."""
        if not self._blocks:
            self._blocks, self._lasts = [[key]], [key]
            return
        at = min(bisect_left(self._lasts, key), len(self._blocks) - 1)
        block = self._blocks[at]
        insort(block, key)
        if len(block) > 2 * BLOCK:
            self._blocks[at : at + 1] = block[:BLOCK], block[BLOCK:]
            self._lasts[at : at + 1] = block[BLOCK - 1], block[-1]
        else:
            self._lasts[at] = block[-1]

    def remove(self, key: Key) -> None:
        """One less; it must be there."""
        at = bisect_left(self._lasts, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at], self._lasts[at]

    def below(self, key: Key) -> int:
        """How many are less."""
        at = bisect_left(self._lasts, key)
        before = sum(map(len, self._blocks[:at]))
        return before + (bisect_left(self._blocks[at], key) if at < len(self._blocks) else 0)

    def at(self, place: int) -> Key:
        """The key at a place, from 0, or the last one; there must be one."""
        for block in self._blocks:
            if place < len(block):
                return block[place]
            place -= len(block)
        return self._lasts[-1]

    def until(self, key: Key) -> list[Key]:
        """Those that are at most that, in order."""
        found: list[Key] = []
        for block in self._blocks:
            found += block[: bisect_right(block, key)]
            if block[-1] > key:
                break
        return found
