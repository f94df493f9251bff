"""Hear of a death on the same host before the dying process has given its memory back.

A process that was killed closes its sockets after it has given its memory back: with gigabytes
mapped, on busy cores, that takes a tenth of a second. A *robust mutex* is told first: when the
thread that holds it ends, the kernel marks it and wakes whoever waits. So a worker holds one, in
memory that can be shared, and the controller waits for it.

This only ever makes news faster. Where it does not work (another host, no Linux, a process that
may not be looked into) the death is heard of as any other, through Ray.

Source: pthread_mutexattr_setrobust(3); Linux, Documentation/locking/robust-futexes.rst.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

_NAME = "elastix-lifeline"
_ROOM = mmap.PAGESIZE  # a pthread_mutex_t takes 40 bytes; what can be shared are pages
_ATTRIBUTES = 64  # a pthread_mutexattr_t takes 4
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1


def hold() -> str:
    """Hold a mutex until this process ends. Where another process can open it; "" for nowhere."""
    if sys.platform != "linux":
        return ""
    try:
        file = os.memfd_create(_NAME)
        os.ftruncate(file, _ROOM)
        memory = mmap.mmap(file, _ROOM)
        if not _make_robust(_address(memory)):
            return ""
    except (OSError, AttributeError):  # not allowed, or another C library
        return ""
    locked: SimpleQueue[bool] = SimpleQueue()
    # A thread that sleeps: on busy cores it is woken, and dies, before those that compute.
    threading.Thread(target=_hold, args=(memory, locked), name="lifeline", daemon=True).start()
    # What nobody holds would pass for dead.
    return f"/proc/{os.getpid()}/fd/{file}" if locked.get() else ""


def watch(path: str, on_death: Callable[[], None]) -> bool:
    """Call `on_death`, in another thread, when whoever holds the mutex at `path` dies.

    Returns whether it will; False for a path that is nowhere, or not of this host.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if _NAME not in str(Path(f"/proc/self/fd/{file}").readlink()):
            return False  # of another container, where the same path means something else
        memory = mmap.mmap(file, _ROOM)
    except OSError:
        return False
    finally:
        os.close(file)
    threading.Thread(target=_watch, args=(memory, on_death), name="lifeline", daemon=True).start()
    return True


def _make_robust(mutex: ctypes.c_void_p) -> bool:
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES)
    return not (
        libc.pthread_mutexattr_init(attributes)
        or libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED)
        or libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST)
        or libc.pthread_mutex_init(mutex, attributes)
    )


def _hold(memory: mmap.mmap, locked: SimpleQueue[bool]) -> None:
    locked.put(ctypes.CDLL(None).pthread_mutex_lock(_address(memory)) == 0)
    threading.Event().wait()  # for ever: whoever ends this thread ends the process


def _watch(memory: mmap.mmap, on_death: Callable[[], None]) -> None:
    libc, mutex = ctypes.CDLL(None), _address(memory)
    result = libc.pthread_mutex_lock(mutex)
    if result == errno.EOWNERDEAD:
        result = libc.pthread_mutex_consistent(mutex)
    if result == 0:  # its holder never lets go of it alive
        libc.pthread_mutex_unlock(mutex)  # for others who watch
        on_death()


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
