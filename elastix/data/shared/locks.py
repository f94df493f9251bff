"""Locks on bytes of a file, which the kernel gives back when their holder dies.

They belong to an open file (fcntl's OFD locks), so neither two threads nor a parent and a child of
a fork exclude each other by one `Locks`: each process makes its own, and threads take turns.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: of 64-bit Linux
_SET = getattr(fcntl, "F_OFD_SETLK", None)
_GET = getattr(fcntl, "F_OFD_GETLK", None)
_NAP_S, _LONGEST_NAP_S = 20e-6, 2e-3


def available() -> bool:
    """Whether this system has such locks."""
    return _SET is not None and struct.calcsize("P") == 8


class Locks:
    """Of one file, for one process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def take(self, byte: int, wait_s: float = 0.0, give_up: Callable[[], bool] = bool) -> bool:
        """Whether the lock is ours, after `wait_s` at most; not if `give_up()` meanwhile."""
        deadline = time.monotonic() + wait_s
        nap = _NAP_S
        while not self._set(byte, fcntl.F_WRLCK):
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True

    def release(self, byte: int) -> None:
        """Give it back."""
        self._set(byte, fcntl.F_UNLCK)

    def is_taken(self, byte: int) -> bool:
        """Whether somebody else holds it."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._file, _GET or 0, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _set(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, _SET or 0, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
