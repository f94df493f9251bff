"""Samples in memory that several processes map: where each is, and room for those to come.

A sample lies in a chain of blocks, so that any sample may make room for any other, whatever their
sizes. Its word in `where` has the first block and a number that no earlier sample at that place
had; storing that word publishes the sample, and clearing it comes before its blocks are used again.

Invariants. What a word in `where` leads to is all of that sample for as long as the word stands: a
reader copies, and looks again. `where` and the chains it leads to are the truth; all else is made
anew from them by the next one who changes something, if the last one died over it (`dirty`).

Stores are seen in their order on x86-64. Elsewhere a digest in the sample says whether a copy is
whole.
"""

import errno
import mmap
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Indices = npt.NDArray[np.int64]
Choose = Callable[[int, "Arena"], "list[int] | None"]
"""Which samples go so that so many blocks come free; None if those that are there shall stay."""

IN_ORDER = platform.machine() in ("x86_64", "AMD64")
READERS, FIELDS = 256, 8
_MAGIC = int.from_bytes(b"elastix1", "little")
_HEAD = struct.Struct("<q16s")  # length of the sample, digest
_WORDS = 16
_READY, _LENGTH, _BLOCKS, _BLOCK_BYTES, _LIMIT = range(5)  # _READY is first: see _prepare
_GROWN, _FREE, _NUMBER, _DIRTY, _USUAL_NS = range(5, 10)
_NUMBERS = (1 << 31) - 1
_LOW = (1 << 32) - 1
_ATTEMPTS = 5
_LEAST_EXTENT = 1 << 20  # bytes that are taken from the machine at once; later an eighth more


@dataclass(frozen=True)
class Layout:
    """Sizes, from which everybody computes the same places.

    Attributes:
        length: samples of the dataset.
        block_bytes: of each block.
        blocks: how many there may be.
    """

    length: int
    block_bytes: int
    blocks: int

    @classmethod
    def within(cls, budget: int, length: int, sample_bytes: int) -> "Layout":
        """As many blocks as the budget has room for beside the table; 0 if there is none.

        A block is a fourth of the first sample: samples of its size fill theirs, and others leave
        an eighth of a sample unused on average.
        """
        block = max(256, -(-(sample_bytes + _HEAD.size) // 4 + 63) // 64 * 64)
        fixed = 8 * (_WORDS + READERS * FIELDS + length)
        blocks = max(0, budget - fixed) // (block + 2 * 8)
        return cls(length, block, min(blocks, _LOW - 1))

    @property
    def fixed(self) -> int:
        """Words of the table that do not go with the blocks."""
        return _WORDS + READERS * FIELDS + self.length

    @property
    def table_bytes(self) -> int:
        """Of all but the samples, if all blocks are used."""
        return 8 * (self.fixed + 2 * self.blocks)

    def blocks_for(self, nbytes: int) -> int:
        """How many a sample of so many bytes takes."""
        return -(-(nbytes + _HEAD.size) // self.block_bytes)


class Arena:
    """The memory of one dataset, as one process sees it.

    `put` and `Arena` itself are for one process at a time: the caller holds a lock.
    """

    def __init__(self, table: int, arena: int, layout: Layout) -> None:
        """Map two files, empty ones or those of others, whose layout then counts.

        Raises:
            OSError: there is no memory for the table, or what others made was damaged since.
        """
        if not _is_ready(table):
            _prepare(table, layout)
        raw = os.pread(table, 8 * _WORDS, 0)
        words = np.frombuffer(raw.ljust(8 * _WORDS, b"\0"), np.int64)
        length, blocks, size = (int(words[n]) for n in (_LENGTH, _BLOCKS, _BLOCK_BYTES))
        there = os.fstat(arena).st_size
        whole = (length, size) == (layout.length, layout.block_bytes) and 0 < blocks < _LOW
        if not (whole and 0 <= words[_FREE] <= words[_GROWN] <= words[_LIMIT] <= blocks):
            raise OSError(errno.EINVAL, "its table was damaged")
        if words[_GROWN] * size > there:
            raise OSError(errno.EINVAL, "its samples were removed")
        self.layout = Layout(length, size, blocks)
        if os.fstat(table).st_size < self.layout.table_bytes:
            raise OSError(errno.EINVAL, "its table was damaged")
        if there < blocks * size:
            os.ftruncate(arena, blocks * size)
        self._files = os.dup(table), os.dup(arena)  # to grow them
        self._memory = memoryview(mmap.mmap(arena, blocks * size))
        mapped = mmap.mmap(table, self.layout.table_bytes)
        self._words = memoryview(mapped).cast("q")
        every = np.frombuffer(mapped, np.int64)
        at = _WORDS
        board, at = every[at : at + READERS * FIELDS], at + READERS * FIELDS
        self.board = board.reshape(READERS, FIELDS)
        self._where_at = at
        self.where, at = every[at : at + length], at + length
        self._next, at = every[at : at + blocks], at + blocks
        self._free = every[at : at + blocks]

    def close(self) -> None:
        """What was mapped goes when nothing refers to it any more."""
        for file in self._files:
            os.close(file)

    # ------------------------------------------------------------------------------- reading

    def has(self, index: int) -> bool:
        """Whether a sample is there."""
        return self._words[self._where_at + index] != 0

    def get(self, index: int) -> bytearray | None:
        """A copy of a sample, or None."""
        place = self._where_at + index
        for _ in range(_ATTEMPTS):  # it may go, and come back, while it is copied
            word = self._words[place]
            if not word:
                return None
            copy = self._copy((word & _LOW) - 1)
            if copy is not None and self._words[place] == word:
                return copy
        return None

    def _copy(self, block: int) -> bytearray | None:
        """What the chain from `block` holds; None for what is no whole sample."""
        size, grown, memory = self.layout.block_bytes, self._words[_GROWN], self._memory
        length, digest = _HEAD.unpack_from(memory, block * size)
        if not 0 <= length <= grown * size - _HEAD.size:
            return None
        copy = bytearray(length)
        into = memoryview(copy)
        at, start = 0, block * size + _HEAD.size
        while True:
            stop = (block + 1) * size
            while (following := int(self._next[block])) == block + 2:  # neighbours at once
                block, stop = block + 1, stop + size
                if stop - start >= length - at:
                    break
            part = min(stop - start, length - at)
            into[at : at + part] = memory[start : start + part]
            at += part
            if at == length:
                break
            if not 0 < following <= grown:
                return None
            block = following - 1
            start = block * size
        if not IN_ORDER and blake3(copy).digest(16) != digest:
            return None
        return copy

    def nbytes(self, index: int) -> int:
        """Of a sample that is there; 0 for others."""
        word = self._words[self._where_at + index]
        size = self.layout.block_bytes
        return _HEAD.unpack_from(self._memory, ((word & _LOW) - 1) * size)[0] if word else 0

    @property
    def used_bytes(self) -> int:
        """Memory that is taken from the machine."""
        each = self.layout.block_bytes + 2 * 8
        return 8 * self.layout.fixed + int(self._words[_GROWN]) * each

    @property
    def usual_ns(self) -> int:
        """How long a decode takes, about."""
        return self._words[_USUAL_NS]

    def took(self, decode_ns: int) -> None:
        """A decode took so long."""
        usual = self._words[_USUAL_NS]
        self._words[_USUAL_NS] = usual + (decode_ns - usual) // 8 if usual else decode_ns

    # ------------------------------------------------------------------------------ changing

    def put(self, index: int, sample: bytes, choose: Choose) -> tuple[bool, int]:
        """Keep a sample, if `choose` finds that it is worth it.

        Returns:
            Whether it is there now, and how many had to go.
        """
        if self._words[_DIRTY]:
            self._repair()
        if self.has(index):
            return True, 0
        need = self.layout.blocks_for(len(sample))
        self._grow(need)
        if need > self._words[_GROWN]:
            return False, 0
        short = need - self._words[_FREE]
        going = [] if short <= 0 else choose(short, self)
        if going is None:
            return False, 0
        self._words[_DIRTY] = 1
        for other in going:
            self._evict(other)
        blocks = self._taken(need)
        self._fill(blocks, sample)
        self._publish(index, blocks[0])
        self._words[_DIRTY] = 0
        return True, len(going)

    def _evict(self, index: int) -> None:
        block = (self._words[self._where_at + index] & _LOW) - 1
        count = self.layout.blocks_for(self.nbytes(index))
        self._words[self._where_at + index] = 0
        free = self._words[_FREE]
        for _ in range(count):
            self._free[free] = block
            free += 1
            block = int(self._next[block]) - 1
        self._words[_FREE] = free

    def _taken(self, need: int) -> list[int]:
        free = self._words[_FREE]
        blocks = sorted(int(block) for block in self._free[free - need : free])
        self._words[_FREE] = free - need
        return blocks

    def _fill(self, blocks: list[int], sample: bytes) -> None:
        size, memory = self.layout.block_bytes, self._memory
        digest = bytes(16) if IN_ORDER else blake3(sample).digest(16)
        _HEAD.pack_into(memory, blocks[0] * size, len(sample), digest)
        from_ = memoryview(sample)
        at, skip = 0, _HEAD.size
        for block, following in zip(blocks, [*blocks[1:], -1], strict=True):
            part = min(size - skip, len(sample) - at)
            start = block * size + skip
            memory[start : start + part] = from_[at : at + part]
            self._next[block] = following + 1
            at, skip = at + part, 0

    def _publish(self, index: int, block: int) -> None:
        number = self._words[_NUMBER] % _NUMBERS + 1
        self._words[_NUMBER] = number
        self._words[self._where_at + index] = number << 32 | block + 1

    def _grow(self, need: int) -> None:
        """Take more memory from the machine while there is some: a write without any would kill."""
        while self._words[_FREE] < need and self._words[_GROWN] < self._words[_LIMIT]:
            grown, size = self._words[_GROWN], self.layout.block_bytes
            until = min(grown + max(need, grown // 8, _LEAST_EXTENT // size), self._words[_LIMIT])
            try:
                self._allocate(grown, until)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                self._words[_LIMIT] = grown  # then this is all there is
                return
            self._words[_DIRTY] = 1
            free = self._words[_FREE]
            self._free[free : free + until - grown] = np.arange(until - 1, grown - 1, -1)
            self._words[_GROWN] = until
            self._words[_FREE] = free + until - grown
            self._words[_DIRTY] = 0

    def _allocate(self, grown: int, until: int) -> None:
        """Memory for blocks, and for their places in the chains and in the list of free ones."""
        table, arena = self._files
        size, layout = self.layout.block_bytes, self.layout
        os.posix_fallocate(arena, grown * size, (until - grown) * size)
        for first in (layout.fixed, layout.fixed + layout.blocks):
            os.posix_fallocate(table, 8 * (first + grown), 8 * (until - grown))

    def _repair(self) -> None:
        """Free is what no sample leads to."""
        grown = self._words[_GROWN]
        used = np.zeros(grown, bool)
        words = np.array(self.where)
        chain = (words[words != 0] & _LOW) - 1
        while len(chain):
            used[chain] = True
            following = self._next[chain] - 1
            chain = following[following >= 0]
        free = np.flatnonzero(~used)[::-1]
        self._free[: len(free)] = free
        self._words[_FREE] = len(free)
        self._words[_DIRTY] = 0


def _is_ready(table: int) -> bool:
    return os.pread(table, 8, 0) == _MAGIC.to_bytes(8, "little")


def _prepare(table: int, layout: Layout) -> None:
    """Its first word is stored last: whoever dies before has made nothing."""
    os.ftruncate(table, 0)
    os.posix_fallocate(table, 0, 8 * layout.fixed)
    os.ftruncate(table, layout.table_bytes)  # the rest is taken with the blocks
    words = np.zeros(_WORDS, "<i8")
    words[_LENGTH], words[_BLOCK_BYTES] = layout.length, layout.block_bytes
    words[_BLOCKS] = words[_LIMIT] = layout.blocks
    os.pwrite(table, words.tobytes()[8:], 8)
    os.pwrite(table, _MAGIC.to_bytes(8, "little"), 0)
