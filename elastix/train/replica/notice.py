"""SIGTERM as a notice: the worker is to leave, as a scheduler wants its node, say. No Ray.

A process that the train function forks inherits the handler, and no notice: whoever sends it
SIGTERM (a pool that is closed, `Process.terminate`) means that process alone, and that it ends. So
it has the system's handling again, from its first moment on.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def on_notice(leave: Callable[[], None]) -> None:
    """Call `leave` at the first SIGTERM, in a thread of its own; another one ends the process.

    Nothing is done in another thread than the main one, in which Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _Heeding.leave = leave
    if not _Heeding.forks:
        _Heeding.forks = True
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)
    signal.signal(signal.SIGTERM, _heed)


class _Heeding:
    leave: Callable[[], None]
    forks = False  # they are seen to
    held = threading.local()


def _heed(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A thread of its own, since the one that was interrupted may hold any lock.
    threading.Thread(target=_Heeding.leave, name="notice", daemon=True).start()


def _hold() -> None:
    """Before a fork: the new process is not to be sent one that it would not heed."""
    _Heeding.held.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _Heeding.held.before)


def _forget() -> None:
    """In a forked process."""
    if signal.getsignal(signal.SIGTERM) is _heed:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
