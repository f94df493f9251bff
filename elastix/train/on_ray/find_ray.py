"""Ray, as a driver finds or starts it if its user has not."""

import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import services
from ray._private.utils import read_ray_address

from elastix.errors import ConfigError
from elastix.interrupts import heeding

logger = logging.getLogger(__name__)

_NO_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_LEAST_ROOM = 1 << 20  # bytes; Ray itself needs some
_POPEN = "ConsolePopen"  # with which Ray starts its processes
_TOKENS = "ray._private.authentication.authentication_token_setup"


_using = 0
_users = threading.Lock()
_keepers: list[ThreadPoolExecutor] = []


def hold_ray() -> bool:
    """See that this process is connected to Ray, for as long as several threads may need it.

    Returns:
        Whether that is ours to end: with `let_go_of_ray`, once for each True.
    """
    global _using
    with _users:
        if not ray.is_initialized():
            _start()
        elif not _using:
            return False  # the user has connected it
        _using += 1
        return True


def let_go_of_ray() -> None:
    """End the connection if nobody else in this process holds it."""
    global _using
    with _users:
        _using -= 1
        if not _using:
            ray.shutdown()
            while _keepers:
                _keepers.pop().shutdown()


def _start() -> None:
    """By a thread that stays: the kernel ends Ray's processes with the thread that started them."""
    if threading.current_thread() is threading.main_thread():
        find_or_start_ray()
        return
    _keepers.append(ThreadPoolExecutor(1))
    _keepers[-1].submit(find_or_start_ray).result()


def find_or_start_ray() -> None:
    """Use the Ray that runs on this host, or start a local one.

    Ray notes in a file where the host's cluster is. Where that has ended without taking the note
    away, ray.init() waits for it for minutes. Here one that no connection can be made to is gone.
    Where the user has named one that does not answer, a warning says what is waited for.
    """
    logging.getLogger(_TOKENS).addFilter(_is_news)
    told = os.environ.get("RAY_ADDRESS")
    if told and is_gone(told):  # it may be about to start
        logger.warning(
            "nobody answers at RAY_ADDRESS=%s. Ray waits for it, for some minutes. If there is "
            "none, correct or unset RAY_ADDRESS.",
            told,
        )
    gone = not told and is_gone(read_ray_address())
    init_ray("local" if gone else None, logging_level=logging.WARNING)


def _is_news(record: logging.LogRecord) -> bool:
    """A local Ray wants a token, as it should; Ray warns of that, too, and says how to opt out."""
    return "Token authentication is enabled" not in record.getMessage()


def init_ray(address: str | None, **options: Any) -> None:  # noqa: ANN401 - of ray.init
    """ray.init, for which the path of the folder for temporary files can be too long.

    Ray puts handlers of SIGTERM of its own in place of the user's. The one that stays kills Ray's
    processes before anything of ours has ended, and this one then aborts with a dump.

    Raises:
        ConfigError: it is, or Ray may not write its files, or there is no room for them.
    """
    before = signal.getsignal(signal.SIGTERM)
    with heeding() as has_come:
        try:
            with _groups_of_their_own():
                ray.init(address, **options)
        except Exception as error:  # Ray has no class for what it cannot start
            reason = _why_not(error) if isinstance(error, OSError) else _no_room()
            if not reason:
                raise
            raise ConfigError(f"Ray cannot start: {reason}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                kept = None if before is signal.SIG_DFL else before
                signal.signal(signal.SIGTERM, kept or _end)
            if has_come(signal.SIGTERM):
                signal.raise_signal(signal.SIGTERM)  # Ray may have lost it


@contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Ray's processes do not get what is sent to the process group of this one.

    `timeout`, and others that end a program in good order, send SIGTERM to all of the group. If Ray
    ended by that, the run could not be told, and its workers would train on until Ray gives up.
    Where this process dies, the kernel ends Ray's all the same.
    """
    popen = getattr(services, _POPEN, None)
    if popen is None:
        yield
        return
    setattr(services, _POPEN, partial(popen, process_group=0))
    try:
        yield
    finally:
        setattr(services, _POPEN, popen)


def _why_not(error: OSError) -> str:
    """What stands in Ray's way, and what to do; empty if nobody here knows."""
    if "AF_UNIX path length" in str(error):
        return (
            f"its sockets lie in the folder for temporary files, {tempfile.gettempdir()}, and "
            "their paths must not be longer than 107 bytes. Nothing was started. Set "
            "RAY_TMPDIR=/tmp, or another folder with a path of up to 40 bytes."
        )
    if error.errno in _NO_FILES:
        return (
            f"{error}. Nothing was started. It writes logs and sockets to the folder for temporary "
            "files, and a token to ~/.ray: this user must be allowed to, and there must be room. "
            "Set RAY_TMPDIR and HOME to folders where that is so."
        )
    return ""


def _no_room() -> str:
    """Ray waits for its processes until it gives up, and does not say that they could not write."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free >= _LEAST_ROOM:
        return ""
    return (
        f"there are {free:,} bytes free in {folder}, where it writes logs and sockets. Nothing was "
        "started. Make room, or set RAY_TMPDIR to another folder."
    )


def _end(number: int, frame: object) -> None:
    """End this process in good order, as after Ctrl-C; another SIGTERM ends it at once."""
    del frame
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def is_gone(address: str | None) -> bool:
    """Whether no connection can be made to a cluster, for which ray.init() would wait long."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return False  # nothing is noted, or nothing that is known here: Ray knows what to do
    try:
        # An IPv6 address stands in brackets.
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except (OSError, OverflowError, UnicodeError):  # no such port, and what can be no host
        return True
    return False
