"""How far malloc's heap grows: the holes between blocks, of which the size alone does not tell.

torch asks for blocks that begin at multiples of 64 bytes. glibc looks for a hole that is larger by
that much, so the hole that such a block leaves never fits another of its size: the layers of a
network, which take blocks of a few sizes in turn, leave one behind each. Blocks from a certain size
on are mapped by themselves and go back to the system whole.

Pure: nothing is allocated. Not here: which blocks there are (trace), or what caching allocators of
GPUs do.

Source: glibc, malloc/malloc.c: _int_memalign, DEFAULT_MMAP_THRESHOLD_MAX.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_MAPPED = 32 << 20  # bytes, from which on a block is mapped; what it is once large ones were freed
_SLACK = 96  # bytes that a hole must have beyond a block's: alignment, and the smallest chunk
_UNIT = 16  # bytes, of which sizes are multiples; a block has a header of half of it


@dataclass(frozen=True)
class Block:
    """Bytes that are taken. `start` is None if they are mapped by themselves."""

    start: int | None
    size: int


class Heap:
    """Takes the smallest hole that is large enough, or grows.

    Attributes:
        peak: bytes at most that the heap and mapped blocks had together.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._end = 0
        self._mapped = 0
        self._holes: list[tuple[int, int]] = []  # size, start; sorted
        self._starts: dict[int, int] = {}  # of a hole, to its end
        self._ends: dict[int, int] = {}  # the other way round

    def take(self, size: int) -> Block:
        """So many bytes."""
        size = -(-(size + _UNIT // 2) // _UNIT) * _UNIT
        if size >= _MAPPED:
            self._mapped += size
            block = Block(None, size)
        else:
            block = Block(self._place(size), size)
        self.peak = max(self.peak, self._end + self._mapped)
        return block

    def give(self, block: Block) -> None:
        """A block is free: a hole, one with those beside it."""
        if block.start is None:
            self._mapped -= block.size
            return
        start, end = block.start, block.start + block.size
        if start in self._ends:
            start = self._ends[start]
            self._close(start)
        if end in self._starts:
            after, end = end, self._starts[end]
            self._close(after)
        if end == self._end:
            self._end = start
        else:
            self._open(start, end)

    def _place(self, size: int) -> int:
        found = bisect_left(self._holes, (size + _SLACK, 0))
        if found == len(self._holes):
            start, self._end = self._end, self._end + size
            return start
        _, start = self._holes[found]
        end = self._starts[start]
        self._close(start)
        self._open(start + size, end)
        return start

    def _open(self, start: int, end: int) -> None:
        insort(self._holes, (end - start, start))
        self._starts[start], self._ends[end] = end, start

    def _close(self, start: int) -> None:
        end = self._starts.pop(start)
        del self._ends[end]
        del self._holes[bisect_left(self._holes, (end - start, start))]
