"""Who may write to a store: two lock files, held with flock, and notes where there are no locks.

`owner.lock` lies beside the packs and is held for as long as a process may write: shared by
processes of one machine that use one index, alone by a StoreServer and by whoever makes the index
anew. It says which machine and which index. `index.lock` lies beside the index and is held while
the index is changed, and while somebody becomes an owner. Not here: what is written.

Invariants: an index over packs that exist is made anew only while nobody else has the store open,
for what others commit meanwhile would be missing in it. SQLite's log of a database is shared in
memory, so two machines never write to one index. A file is never reached through a link.
"""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastix.errors import Conflict, StoreDamaged
from elastix.store.packs import one_line, storage_errors

_PARTS = ("packs", "writers", "owner.lock", "reserve", "reserve.draft")
_INDEX = ("index.lock", *(f"index.sqlite{end}" for end in ("", "-wal", "-shm", "-journal")))
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for all containers of a machine


def machine() -> str:
    """The running kernel: processes of one share memory, those of two do not."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def refuse_links(root: Path | None, index: Path) -> None:
    """A store that somebody else made must not lead out of its directory, nor to no file at all.

    Raises:
        StoreDamaged: names the link, or the pipe or device, which whoever opens it waits at.
    """
    parts = [index / name for name in _INDEX]
    if root is not None:
        parts += [root / name for name in _PARTS]
    for path in parts:
        try:
            mode = path.lstat().st_mode
        except OSError:  # there is none, or whoever opens it is told why not
            continue
        if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise StoreDamaged(
                f"{path} is no file; a store has files and directories alone. It was not opened, "
                "and neither was the store. Remove it."
            )
        if stat.S_ISLNK(mode):
            raise StoreDamaged(
                f"{path} is a link; a store has none. It was not followed, and the store was not "
                "opened. Remove it, or give the directory itself (index= for the index)."
            )


def open_lock(path: Path) -> int:
    """A handle for flock, on a file that is made if there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


class Owner:
    """This process as one that may write to a store. Not an owner before `join`."""

    def __init__(self, root: Path, index: Path) -> None:
        """Open the lock files.

        Args:
            root: directory of the packs, or of the index if the packs are far away.
            index: directory of the index.
        """
        self._index = index
        self._alone = False
        self._sole = False
        self._note = ""
        self._owner = self._lock = -1
        try:
            with storage_errors(f"opening {index}"):
                for folder in (root, index):
                    folder.mkdir(parents=True, exist_ok=True)
                self._lock = open_lock(index / "index.lock")
                self._owner = open_lock(root / "owner.lock")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up being an owner."""
        for handle in (self._owner, self._lock):
            if handle >= 0:
                with suppress(OSError):
                    os.close(handle)
        self._owner = self._lock = -1

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One at a time over all processes that use this index."""
        try:
            with storage_errors("locking the index"):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            yield
        finally:
            if self._lock >= 0:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def join(self, alone: bool) -> bool:
        """Become an owner, within `exclusive`. Whether there is no other. Then `settle` follows.

        Raises:
            Taken: a StoreServer is one, or another machine, or one with another index; or
                (alone) anybody.
            Conflict: the index here is not the one that the others have open.
        """
        self._alone = alone
        info = self._index.stat()  # and not its path: containers see one directory under many
        name = f"{machine()} {info.st_dev}:{info.st_ino}"
        with storage_errors(f"locking the store of {self._index}"):
            self._note = f"{name} {one_line(self._index.absolute())}\n"
            if self._try(fcntl.LOCK_EX):
                self._sole = True
                self._write("")
                return True
            if alone:
                raise _taken("another process uses", self._index)
            if not self._try(fcntl.LOCK_SH):
                raise _taken("a StoreServer owns", self._index)
            other = os.pread(self._owner, 1 << 16, 0).decode(errors="replace")
        if other.startswith(f"{name} "):
            self._check_files(other)
            return False
        if other.startswith(f"{machine()} "):
            index = other.partition("\n")[0].split(" ", 2)[-1]
            raise _taken(f"a process with another index ({index}) uses", self._index)
        raise _taken("a process on another machine uses", self._index)

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._owner, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write(self, files: str) -> None:
        os.truncate(self._owner, 0)
        os.pwrite(self._owner, f"{self._note}{files}".encode(), 0)

    def _check_files(self, note: str) -> None:
        """Compare the index with the files that the others have open.

        Raises:
            Conflict: some were removed or replaced. What the others commit is not in these.
        """
        opened = note.partition("\n")[2].split()
        if not set(opened) <= set(_files(self._index).split()):
            raise crowded("be read anew: its files were removed or replaced")

    def settle(self) -> None:
        """Say which files the index consists of, if nobody else has it open, and let others join.

        A StoreServer lets nobody.
        """
        if self._sole:
            with storage_errors("writing owner.lock"):
                self._write(f"{_files(self._index)}\n")
            self._sole = False
        if not self._alone:
            fcntl.flock(self._owner, fcntl.LOCK_SH)

    def is_last(self) -> bool:
        """Within `exclusive`: whether there is no other. Close it then."""
        with storage_errors("locking the store"):
            return self._owner >= 0 and self._try(fcntl.LOCK_EX)

    @contextmanager
    def only(self) -> Iterator[None]:
        """Within `exclusive`: as the only owner.

        Raises:
            Conflict: there are others.
        """
        try:
            with storage_errors("locking the store"):
                if not self._try(fcntl.LOCK_EX):
                    raise crowded("be made anew")
            self._sole = True
            yield
        finally:
            if self._owner >= 0:
                self.settle()


def _files(index: Path) -> str:
    """Which files an open index consists of; the log is one of them as long as it is open."""
    found = []
    for end in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            found.append(f"index.sqlite{end}:{(index / f'index.sqlite{end}').stat().st_ino}")
    return " ".join(found)


def crowded(what: str) -> Conflict:
    """The error where an index cannot be replaced under others."""
    return Conflict(
        f"the index must {what}, and another process has this store open: what it writes meanwhile "
        "would be missing. Nothing was changed. Close the other one first; what was acknowledged "
        "is in the packs."
    )


class Taken(Conflict):
    """Somebody else owns the store, in a way that leaves no room for this process."""


def _taken(by: str, folder: Path) -> Taken:
    return Taken(
        f"{by} the store in {folder}. It was not opened. Close the other one, connect to its "
        "StoreServer (StoreServer.open), or only look at it: `elastix store log`, in Python "
        "Store(path, read_only=True)."
    )


def held_elsewhere(root: Path) -> bool:
    """Whether another machine may be writing to the index of `root`, for one who only reads it."""
    try:
        handle = os.open(root / "owner.lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        there = os.pread(handle, 1 << 16, 0).decode(errors="replace").partition(" ")[0]
        if there in ("", machine()):
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or not to be found out without the right to write
        return True
    else:
        return False
    finally:
        os.close(handle)
