"""The folder in which the users of one dataset meet: private, and gone with the last of them.

Each user holds a shared flock on the folder. Whoever gets an exclusive one is alone with it and may
remove it: the last to leave, or the next to come after all were killed.
"""

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elastix.errors import Conflict

KEY_DIGITS = 32
"""Of a key: hexadecimal ones."""

_NAP_S, _LONG_NAP_S = 1e-3, 1e-2


class SharedFolder:
    """Being one of the users."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.handle = handle

    def open(self, name: str) -> int:
        """A file of the folder, made if it is not there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self.handle)

    def leave(self) -> None:
        """Use it no more; the last one removes it."""
        if self.handle >= 0:
            _remove_if_unused(self.path, self.handle)
            self.abandon()

    def abandon(self) -> None:
        """Close the handle, which leaves the parent of a fork in."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)


def enter(root: Path, key: str, wait_s: float) -> SharedFolder | None:
    """Be a user of the folder for `key`; None if nobody lets us in within `wait_s`.

    What others have left behind who were all killed is removed, for this and for other keys.

    Raises:
        Conflict: the folder belongs to somebody else, or others may look into it.
        OSError: it cannot be made.
    """
    path = root / (_prefix() + key)
    sweep(root)
    deadline = time.monotonic() + wait_s
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        handle = _opened(path)
        if handle is not None:
            if _flock(handle, fcntl.LOCK_SH) and _is_at(path, handle):
                return SharedFolder(path, handle)
            os.close(handle)
        if time.monotonic() > deadline:
            return None
        time.sleep(_NAP_S)


def _opened(path: Path) -> int | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        info = path.lstat()
        what = _owned(info) if stat.S_ISDIR(info.st_mode) else "is no folder"
        raise _refusal(path, what) from error
    info = os.fstat(handle)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        os.close(handle)
        raise _refusal(path, _owned(info))
    return handle


def _owned(info: os.stat_result) -> str:
    return f"belongs to user {info.st_uid} with mode {stat.S_IMODE(info.st_mode):o}"


def _refusal(path: Path, what: str) -> Conflict:
    return Conflict(
        f"{path} {what}, so samples in it could be read or made up by others. Nothing was read. "
        "It must be a folder of yours that nobody else may enter: remove it, or have it removed."
    )


def sweep(root: Path, within_s: float = 0.0) -> None:
    """Remove what our processes have left behind who were all killed.

    Blocks while there is anything in use, up to `within_s`: whoever was killed just now may not be
    gone yet, nor those that read for it.
    """
    deadline = time.monotonic() + within_s
    while _sweep(root) and time.monotonic() < deadline:
        time.sleep(_LONG_NAP_S)


def _sweep(root: Path) -> bool:
    """Whether anything is left."""
    for path in _all(root):
        with suppress(OSError, Conflict):
            handle = _opened(path)
            if handle is not None:
                try:
                    _remove_if_unused(path, handle)
                finally:
                    os.close(handle)
    return any(_all(root))


def _all(root: Path) -> Iterator[Path]:
    """Of all keys; what else begins with such a name is somebody's own."""
    return root.glob(_prefix() + "[0-9a-f]" * KEY_DIGITS)


def _prefix() -> str:
    return f"elastix-{os.geteuid()}-"


def _remove_if_unused(path: Path, handle: int) -> None:
    if _flock(handle, fcntl.LOCK_EX) and _is_at(path, handle):
        with suppress(OSError):  # what cannot be removed stays for the next one
            for name in os.listdir(handle):
                os.unlink(name, dir_fd=handle)
            path.rmdir()


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    """Whether the folder was not removed since, nor another put in its place."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
