"""One run, one writer: locks beside the journal that say who holds them.

The kernel gives a lock back when its process has ended, however it did, so a crash leaves nothing
behind that stands in the way. Over NFS the server holds the lock (flock(2), "NFS details": the file
has to be open for writing); that of a host which is gone is free when its lease has run out, a
minute and a half by default.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from elastix.errors import Conflict, Full, StoreError

DRIVER_LOCK = "driver.lock"
"""In the folder of a run: held by the process that trains it, before there is a journal."""

_AGAIN_S = 0.1
_ATTEMPTS = 100  # to make a folder that others remove
_NOT_STARTED = "Nothing was started. Wait for it, stop it, or choose another name."
_REFUSED = (errno.EAGAIN, errno.EACCES)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host, pid: of the process.
        since: Unix time.
        stays: it is not bound to a driver and goes on without one.
    """

    host: str
    pid: int
    since: float
    stays: bool = False

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"


class Lock:
    """Held from its construction to `close`, or to the end of the process. Forks do not hold it.

    Args:
        path: of the lock's file; stays there.
        what: what it means to hold it, as in "run 'digits' is trained".
        stays: see Holder.
        patience_s: how long another holder is waited for.
        refusal: what was not done, if somebody else holds it, and what to do.
        makes_room: it is held to remove something, so on a full disk it need not say who holds it.

    Raises:
        Conflict: somebody else holds it; names them.
        StoreError: there can be no lock here. Full: there is no room to say who holds it.
    """

    _file = -1

    def __init__(
        self,
        path: Path,
        what: str,
        *,
        stays: bool = False,
        patience_s: float = 0.0,
        refusal: str = _NOT_STARTED,
        makes_room: bool = False,
    ) -> None:
        me = Holder(host=socket.gethostname(), pid=os.getpid(), since=time.time(), stays=stays)
        deadline = time.monotonic() + patience_s
        try:
            while not self._take(path):
                if time.monotonic() >= deadline and not self._looked_at(path):
                    who = _holder(self._file) or "a process that has just begun"
                    raise Conflict(f"{what} by {who}. {refusal}")
                time.sleep(_AGAIN_S)
            os.ftruncate(self._file, 0)
            try:
                os.pwrite(self._file, json.dumps(asdict(me)).encode(), 0)
                os.fsync(self._file)
            except OSError as error:
                if not (makes_room and Full.tells(error)):
                    raise
        except OSError as error:
            self._forget()
            raise _failure(path, "written", error) from error
        except BaseException:
            self._forget()
            raise
        _held.add(self)

    def _take(self, path: Path) -> bool:
        """Whether it could be had, on the file that is there now: others see no other.

        Meanwhile the folder may be removed, or renamed.
        """
        while True:
            if self._file < 0:
                self._file = _created(path)
            if not _taken(self._file, fcntl.LOCK_EX, path):
                return False
            if _in_place(self._file, path):
                return True
            os.close(self._file)
            self._file = -1

    def _looked_at(self, path: Path) -> bool:
        """Whether those who have it share it: they ask who the holder is, for a moment."""
        shared = _taken(self._file, fcntl.LOCK_SH, path)
        if shared:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return shared

    def close(self) -> None:
        """Let others have it."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            self._forget()

    def _forget(self) -> None:
        """Without a word in the file: a fork may do so while its parent holds on."""
        _held.discard(self)
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def holder(path: Path) -> Holder | None:
    """Who holds the lock with this file; None if nobody does, or they do not say yet.

    Raises:
        StoreError: there can be no lock here.
    """
    try:
        file = _open(path, os.O_RDONLY)  # others may only read
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error}. Nothing was changed.") from error
    try:
        return None if _taken(file, fcntl.LOCK_SH, path) else _holder(file)
    finally:
        os.close(file)


def killed_holder(path: Path) -> Holder | None:
    """Who held the lock with this file last, and was killed; None if somebody holds it, or let go.

    Raises:
        StoreError: there can be no lock here.
    """
    try:
        file = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error}. Nothing was changed.") from error
    try:
        return _holder(file) if _taken(file, fcntl.LOCK_SH, path) else None
    finally:
        os.close(file)


def _created(path: Path) -> int:
    attempt = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            attempt += 1
            # The folder was removed in between; or there can be none: the kernel says the same.
            if isinstance(error, FileNotFoundError) and attempt < _ATTEMPTS:
                continue
            raise _failure(path, "locked", error) from error


def _failure(path: Path, how: str, error: OSError) -> StoreError:
    kind = StoreError.kind_of(error)
    cure = "Let this user write there, or name another store"
    todo = "Make room" if kind is Full else cure
    return kind(f"{path} cannot be {how}: {error}. Nothing was changed. {todo}.")


def _in_place(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _open(path: Path, flags: int) -> int:
    """Nobody waits at a pipe that somebody else has put there."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file")
    return file


def _taken(file: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise StoreError(
            f"{path} cannot be locked: {error}. Nothing was changed. Without locks two writers "
            "could not be told apart: use a file system that has them, or mount it so."
        ) from error
    return True


def _holder(file: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):  # it has the lock and has not written yet
        return None


def _forget() -> None:
    """In a forked child: it outlives its parent at times, and must not keep its locks."""
    for lock in list(_held):
        lock._forget()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget)
