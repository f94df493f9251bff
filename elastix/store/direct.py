"""Writing past the page cache, for what is large: most of it is never read, or not soon.

A page of the cache costs more CPU time than the copy into it, above all where the kernel has to
get the page first, and what training reads would have to make room. Whole blocks go to the disk
from a small buffer that is used again and again; the caller writes the ends through the cache.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

BLOCK_BYTES = 4096
_BUFFER_BYTES = 4 << 20


class Direct:
    """A second way into one file. Not thread-safe."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._memory = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page, as the kernel wants it
        self._buffer = np.frombuffer(self._memory, dtype=np.uint8)

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """None if the file system cannot."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return None
        try:
            return cls(os.open(path, os.O_WRONLY | flag))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return None
            raise

    def write(self, parts: Sequence[memoryview], offset: int) -> int:
        """Write whole blocks of what `parts` make up together.

        Args:
            parts: bytes, one after the other.
            offset: in the file, a multiple of the block.

        Returns:
            Bytes written: all, but for less than a block. Less if the file system refuses.

        Raises:
            OSError: the disk is full, or broken.
        """
        written = filled = 0
        for part in parts:
            source = np.frombuffer(part, dtype=np.uint8)
            while source.size:
                piece = source[: _BUFFER_BYTES - filled]
                self._buffer[filled : filled + piece.size] = piece
                filled += piece.size
                source = source[piece.size :]
                if filled == _BUFFER_BYTES:
                    if not self._write_buffer(filled, offset + written):
                        return written
                    written, filled = written + filled, 0
        whole = filled - filled % BLOCK_BYTES
        if whole and self._write_buffer(whole, offset + written):
            written += whole
        return written

    def _write_buffer(self, length: int, offset: int) -> bool:
        done = 0
        while done < length:
            try:
                done += os.pwrite(self._handle, self._buffer[done:length].data, offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and not done:
                    return False
                raise
        return True

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            os.close(self._handle)
