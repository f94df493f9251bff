"""The processes of a DataLoader die with the process that they read for."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(_number: int) -> None:
    """In a new process of a DataLoader (`worker_init_fn`): the kernel is to end it in time.

    torch's look every few seconds is too late: until then they hold their parent's sockets open,
    so whoever waits for its end does not hear of it.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None or os.getppid() != parent.pid:
        return  # a child of a fork server, say, which has no sockets of its parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died in between
        os._exit(1)
