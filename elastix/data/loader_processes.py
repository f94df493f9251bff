"""The processes of a DataLoader: they die with their parent, and one that dies is replaced.

A process that outlives its parent holds its sockets open, so whoever waits for the parent's end
hears of it seconds late. One that dies itself, for want of memory as a rule, is no error of the
train function: what it was reading is read again by others.

A forked process shares the position in each file that was open before. The training process may
have read samples itself by then, so a dataset that opens its file at first use has it open: each
process opens such files anew, or one would read where another has gone to.
"""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

_PR_SET_PDEATHSIG = 1
_MOMENT_S = 1.0  # between the end of a connection and that of the process behind it


class ProcessDied(Exception):
    """A process that reads ahead is gone, and with it what it had read."""


def die_with_parent(_number: int) -> None:
    """In a new process of a DataLoader (`worker_init_fn`): the kernel is to end it in time."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None or os.getppid() != parent.pid:
        return  # of a fork server, say; torch looks every few seconds
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died in between
        os._exit(1)


_OPEN: dict[int, tuple[os.stat_result, int]] = {}  # files that are read, as processes are started


def _look_at_files() -> None:
    """Before processes are started: which files are open to be read, and where they stand."""
    _OPEN.clear()
    numbers: list[int] = []
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # without /proc positions stay shared
            numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    for number in numbers:
        with contextlib.suppress(OSError):  # closed since, as that of the list itself
            about, flags = os.fstat(number), fcntl.fcntl(number, fcntl.F_GETFL)
            to_read = flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_PATH
            if stat.S_ISREG(about.st_mode) and to_read:
                _OPEN[number] = about, os.lseek(number, 0, os.SEEK_CUR)


def own_files() -> None:
    """In a new process of a DataLoader: nobody else moves in the files that it has from its parent.

    A process that was not forked has none of them. What can be written stays shared.
    """
    for number, (about, position) in _OPEN.items():
        with contextlib.suppress(OSError):
            if not os.path.samestat(about, os.fstat(number)):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_NOFOLLOW  # what is opened is a link
            own = os.open(f"/proc/self/fd/{number}", flags)
            try:
                os.lseek(own, position, os.SEEK_SET)
                os.dup2(own, number, os.get_inheritable(number))
            finally:
                os.close(own)
    _OPEN.clear()


class ProcessReader:
    """Reads batches in processes. Used by one thread at a time.

    Args:
        make: a DataLoader with persistent workers.
        rescue: called when a process has died, before the others are ended.
    """

    def __init__(
        self, make: Callable[[], DataLoader[Any]], rescue: Callable[[], None] = lambda: None
    ) -> None:
        self._make = make
        self._rescue = rescue
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._processes: set[BaseProcess] = set()
        _READERS.add(self)
        # Before torch would wait for each of them for five seconds: to tell them that they may end
        # it has a thread, which is over by then if Python's collector finds all this at once.
        weakref.finalize(self, _kill, self._processes, os.getpid()).atexit = False

    def begin(self) -> None:
        """Read anew from where the DataLoader's sampler begins.

        Raises:
            ProcessDied: to be called again.
        """
        if self._loader is None:
            self._loader = self._make()
            _look_at_files()
        loader = self._loader
        batches = self._guarded(lambda: iter(loader))
        self._batches = batches
        if not isinstance(batches._workers_done_event, _Done):
            batches._workers_done_event = _Done(batches._workers_done_event, self._processes)
        _ITERATORS.add(batches)
        self._processes.update(batches._workers)  # of all that this process starts, these alone
        _defer()

    def next(self) -> Any:  # noqa: ANN401 - whatever collate makes
        """The next batch. Blocks until it is read.

        Raises:
            ProcessDied: what was read ahead is lost; to begin anew.
        """
        batches = self._batches
        if batches is None:
            raise ProcessDied("nothing is being read")
        return self._guarded(lambda: next(batches))

    def close(self) -> None:
        """End its processes, whatever they are at. Blocks until they are gone, for a moment."""
        processes = list(self._processes)
        self._discard()
        for process in processes:
            process.join(_MOMENT_S)

    def _guarded(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        said = "a process of the DataLoader exited unexpectedly"
        try:
            if not self._dead(0.0):
                return work()
        except (RuntimeError, OSError, EOFError) as error:
            if not self._dead(_MOMENT_S):
                raise  # of the dataset
            said = str(error)
        self._rescue()
        self._discard()
        raise ProcessDied(said)

    def _dead(self, within_s: float) -> bool:
        return bool(wait([process.sentinel for process in self._processes], within_s))

    def _discard(self) -> None:
        _kill(self._processes, os.getpid())
        batches: Any = self._batches
        self._loader = self._batches = None
        if batches is not None:  # it may wait for a lock that a dead process had: not in our thread
            threading.Thread(target=batches.__del__, name="discard", daemon=True).start()


class _Done:
    """What torch sets to have its processes end. They are not told of it once they were killed.

    One of them may have had the lock of torch's own event, and torch would wait for it forever.
    """

    def __init__(self, event: Any, processes: set[BaseProcess]) -> None:  # noqa: ANN401
        self._event = event
        self._processes = processes
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        if self._processes:
            self._event.set()

    def is_set(self) -> bool:
        return self._is_set


def _kill(processes: set[BaseProcess], parent: int) -> None:
    """Kill those of this process, and forget them."""
    if os.getpid() == parent:
        for process in processes:
            process.kill()
    processes.clear()


_READERS: "weakref.WeakSet[ProcessReader]" = weakref.WeakSet()
_ITERATORS: "weakref.WeakSet[Any]" = weakref.WeakSet()  # torch's, as long as anybody has them


_forking = threading.local()


def _hold() -> None:
    """Before a fork: nothing of this may be collected in the new process before it is marked.

    Torch would end it there when it is collected, and say that it cannot.
    """
    _forking.iterators = list(_ITERATORS)


def _let_go() -> None:
    _forking.iterators = []


def _forget() -> None:
    """In a forked process: those are its parent's."""
    for iterator in _forking.iterators:
        iterator._shutdown = True
    _READERS.clear()
    _ITERATORS.clear()
    _let_go()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)


def end_all() -> None:
    """End the processes of all readers of this one."""
    for reader in list(_READERS):
        reader.close()


def _defer() -> None:
    """Torch raises in the main thread when a process dies, in the middle of anything: not now.

    The next batch tells, at once if it is asked for afterwards, else when torch next looks.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "__module__", "").startswith("torch."):
        signal.signal(signal.SIGCHLD, partial(_swallow, handler))


def _swallow(handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(RuntimeError):
        handler(number, frame)
