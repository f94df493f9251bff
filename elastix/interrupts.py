"""Ctrl-C and SIGTERM that somebody else has swallowed, noticed all the same.

Libraries that import something optional catch everything meanwhile, KeyboardInterrupt too, and go
on half imported: they fail in some odd way, much later. Ray, while it starts, loses the SystemExit
that its own handler of SIGTERM raises. Python writes the number of each signal that it handles to
a file descriptor, whatever becomes of the exception: here it is looked at.

Not here: what a run or a campaign does when it is interrupted.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType


@contextlib.contextmanager
def heeding() -> Iterator[Callable[[int], bool]]:
    """Raise a swallowed KeyboardInterrupt again at the next import within, and at the end.

    Gives a function that says whether some signal has come since. In the main thread only, which
    alone handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda number: False
        return
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        finder = _Finder(receiver)
        before = signal.set_wakeup_fd(-1)
        try:
            try:
                signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
                sys.meta_path.insert(0, finder)
                yield finder.has_come
            except Exception:
                finder.heed()  # it may have come of what is half imported
                raise
            finally:
                _put_back(before, finder)
        finally:
            _put_back(before, finder)  # Ctrl-C may have come just before
            with contextlib.suppress(OSError):  # there was none, or it is full or closed
                os.write(before, finder.come())  # an event loop reads there what it is to handle
        finder.heed()


@contextlib.contextmanager
def importing(program: str) -> Iterator[None]:
    """End a program that is interrupted within with one line, instead of a traceback."""
    try:
        with heeding():
            yield
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted\n")
        sys.exit(130)


@contextlib.contextmanager
def exit_codes_kept() -> Iterator[None]:
    """A SystemExit that a handler of SIGTERM raises within comes out with its own code.

    Ray looks for signals while it waits, and raises one with the code 1 instead.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    codes = []

    def noting(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except SystemExit as ended:
            codes.append(ended.code)
            raise

    signal.signal(signal.SIGTERM, noting)
    try:
        yield
    except SystemExit as ended:
        if codes:
            ended.code = codes[-1]
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is noting:  # it has not put another in its place
            signal.signal(signal.SIGTERM, handler)


def _put_back(wakeup: int, finder: "_Finder") -> None:
    """Of a file that is closed Python would not know, and write to what has its number next."""
    signal.set_wakeup_fd(wakeup)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds no module. Python asks it for each that is not imported yet."""

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver
        # Another handler may have done what it was to do.
        self._raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        del name, path, target
        if threading.current_thread() is threading.main_thread():
            self.heed()
        return None

    def heed(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C has come."""
        if self._raises and self.has_come(signal.SIGINT):
            raise KeyboardInterrupt

    def has_come(self, number: int) -> bool:
        """Whether a signal with that number has."""
        return number in self.come()

    def come(self) -> bytes:
        """The numbers of all signals that have."""
        try:
            return self._receiver.recv(1024, socket.MSG_PEEK)
        except BlockingIOError:
            return b""
