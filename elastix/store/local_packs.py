"""Packs in a local directory: append, map, remove.

A mapping of a pack holds a shared flock on it, the lease, without which it is not removed. A
writer holds an flock on `writers/<writer>.lock` while it lives. Not here: the index.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from elastix.errors import Corrupt, NotFound, StoreError
from elastix.store.packs import LAST_NUMBER, NAME, Buffer, View, check_name, storage_errors
from elastix.store.records import ALIGNMENT, Header, Kind, Place, padded

_PAD = bytes(ALIGNMENT)
_QUEUE_BYTES = 64 << 20
_QUEUE_PARTS = 900  # a system call takes 1024
_CALL_BYTES = 1 << 20
"""Of one write. For larger ones Linux takes pages from its largest free blocks, and on a virtual
machine those are what it has given back to its host: they cost several times the write itself."""

_BEGIN_BYTES = 2 << 20
"""After so many the disk is told to begin, so that the sync at the end has less to wait for."""

_SYNC_FILE_RANGE_WRITE = 2  # do not wait for anything
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # of Linux
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class LocalPacks:
    """Packs in a directory of this machine, or one that is mounted like it."""

    def __init__(self, root: Path) -> None:
        self.folder = root
        self._folder = root / "packs"
        self._path = f"{self._folder}{os.sep}"  # joining paths takes longer than to open one
        self._writers = root / "writers"

    def claims(self, index: Path) -> None:
        """None: there are locks."""

    def sizes(self) -> dict[str, int]:  # noqa: D102
        with storage_errors(f"listing {self._folder}"):
            if not self._folder.is_dir():
                return {}
            found = {}
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # collected since it was listed
                            found[entry.name] = entry.stat(follow_symlinks=False).st_size
            return found

    def _open(self, pack: str) -> int:
        path = self._path + check_name(pack)
        try:
            # Nobody waits at a pipe in its place, which has no bytes.
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENOENT and not self._folder.is_dir():
                raise StoreError(  # no fault of one pack: nothing was damaged, and nothing retired
                    f"there is no directory {self._folder}, of which {pack} was to be read. "
                    "Nothing was changed. Is the file system of the store mounted?"
                ) from error
            if error.errno in (errno.ENOENT, errno.ELOOP):
                raise NotFound(f"there is no pack {path}.") from error
            raise

    def read(self, pack: str, offset: int, length: int) -> bytes:  # noqa: D102
        with storage_errors(f"reading {pack}"):
            handle = self._open(pack)
            try:
                length = min(length, max(0, os.fstat(handle).st_size - offset))
                chunks = []
                while length > 0:
                    chunk = os.pread(handle, length, offset)
                    if not chunk:
                        break
                    chunks.append(chunk)
                    offset, length = offset + len(chunk), length - len(chunk)
            finally:
                os.close(handle)
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def view(self, pack: str) -> View:  # noqa: D102
        with storage_errors(f"mapping {pack}"):
            handle = self._open(pack)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH)
                info = os.fstat(handle)
                if info.st_nlink == 0 or info.st_size == 0:
                    raise NotFound(f"{pack} was removed.")
                # mmap keeps a duplicate of the handle, and so the lease, until it is unmapped.
                return _Mapped(mmap.mmap(handle, info.st_size, access=mmap.ACCESS_COPY), pack)
            finally:
                os.close(handle)

    def tails(self, packs: Sequence[str]) -> Iterator[View | None]:  # noqa: D102
        for pack in packs:
            try:
                yield self.view(pack)
            except NotFound:
                yield None

    def remove(self, pack: str) -> bool:  # noqa: D102
        with storage_errors(f"removing {pack}"), suppress(FileNotFoundError):
            handle = _open_to_lock(self._folder / check_name(pack))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self._folder / pack).unlink(missing_ok=True)
            except BlockingIOError:
                return False
            finally:
                os.close(handle)
        return True

    def alive(self, pack: str) -> bool:  # noqa: D102
        path = self._writers / f"{pack[:16]}.lock"
        with storage_errors(f"asking for {path}"):
            try:
                handle = _open_to_lock(path)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            else:
                with suppress(OSError):
                    path.unlink()
                return False
            finally:
                os.close(handle)

    def lacks(self, pack: str) -> bool:  # noqa: D102
        with storage_errors(f"looking for {pack}"):
            try:
                os.stat(self._path + check_name(pack))  # noqa: PTH116 - joining takes longer
            except (FileNotFoundError, NotADirectoryError):
                return True
            return False

    def writer(self) -> "LocalWriter":  # noqa: D102
        return LocalWriter(self._folder, self._writers)


def _open_to_lock(path: Path) -> int:
    """For writing where that is allowed: NFS locks alone only what may be written."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


class _Mapped:
    def __init__(self, mapping: mmap.mmap, pack: str) -> None:
        self._memory = memoryview(mapping)
        self._pack = pack

    def bytes_at(self, offset: int, length: int) -> memoryview:
        if offset + length > len(self._memory):
            raise Corrupt(
                f"{self._pack} has {len(self._memory)} bytes and should have at least "
                f"{offset + length}: it was cut off."
            )
        return self._memory[offset : offset + length]


class LocalWriter:
    """Appends to `<writer>-<number>.pack`. After an error, call `cut` or `abandon`."""

    def __init__(self, folder: Path, writers: Path) -> None:
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._folder = folder
        self._writers = writers
        self._lock: BinaryIO | None = None  # locked while this writer lives
        self._id = ""
        self._number = 0
        self._handle = -1
        self._pack = ""
        self._queue: list[Buffer] = []
        self._synced = 0  # bytes that are durable, then written, then promised
        self._written = 0
        self._end = 0
        self._gone: StoreError | None = None

    @property
    def size(self) -> int:  # noqa: D102
        return self._end

    def append(self, header: Header, payload: Buffer) -> Place:
        """As Writer.append. The payload must stay as it is until `sync`, which may write it."""
        if self._gone is not None:
            raise self._gone
        if self._handle < 0:
            with storage_errors(f"writing to {self._folder}"):
                self._begin()
        start = self._end
        rest = padded(header.length) - header.length
        self._end += ALIGNMENT + padded(header.length)
        self._queue += (header.pack(self._pack, start), payload, _PAD[:rest])
        if len(self._queue) > _QUEUE_PARTS or self._end - self._written > _QUEUE_BYTES:
            self._flush()
        return Place(self._pack, start + ALIGNMENT, header.length)

    def _flush(self) -> None:
        with storage_errors(f"writing to {self._pack}"):
            _write_all(self._handle, self._queue, self._written)
        self._written = self._end
        self._queue.clear()

    def sync(self) -> None:  # noqa: D102
        if self._handle < 0 or self._synced == self._end:
            return
        self._flush()
        with storage_errors(f"syncing {self._pack}"):
            try:
                os.fdatasync(self._handle)
            except OSError:
                # After a failed sync nobody knows which pages are on the disk: never go on here.
                self.abandon()
                raise
            self._check_in_place()
        self._synced = self._end

    def _check_in_place(self) -> None:
        """What is written to a removed file is lost, and nobody looks where it was moved.

        Other packs may be gone as well, of which the index still knows: nothing is added any more.
        """
        path = self._folder / self._pack
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(self._handle), path.stat()):
                return
        self.abandon()
        self._gone = StoreError(
            f"{path} was removed or moved away while it was being written. Nothing was stored, nor "
            "is anything until the store is opened anew. Leave its folder alone meanwhile: "
            "`elastix store gc` is what makes room there."
        )
        raise self._gone

    def cut(self) -> None:  # noqa: D102
        self._queue.clear()
        if self._handle < 0:
            return
        try:
            os.ftruncate(self._handle, self._synced)
            self._end = self._written = self._synced
        except OSError:
            self.abandon()

    def abandon(self) -> None:
        """Leave the current pack as it is; gc takes its useless tail."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            self._end = self._written = self._synced = 0
            self._queue.clear()
            with suppress(OSError):
                os.close(handle)

    def seal(self) -> None:  # noqa: D102
        if self._handle < 0:
            return
        header = Header(Kind.SEAL, 0, blake3(b"").digest())
        try:
            # Only a hint that all before it was synced; without it the pack is read as well.
            with suppress(StoreError):
                self.sync()
                if self._handle >= 0:
                    self.append(header, b"")
                    self._flush()
        finally:
            self.abandon()

    def close(self) -> None:  # noqa: D102
        self.seal()
        if self._lock is not None:
            with suppress(OSError):
                (self._writers / f"{self._id}.lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _begin(self) -> None:
        if self._number == LAST_NUMBER:
            self.close()
            self._number = 0
        if self._lock is None:
            self._enlist()
        self._number += 1
        self._pack = f"{self._id}-{self._number:06d}.pack"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / self._pack
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._synced = self._written = self._end = 0
        try:
            sync_directory(self._folder)
        except OSError:
            self.abandon()
            raise

    def _enlist(self) -> None:
        self._writers.mkdir(parents=True, exist_ok=True)
        while True:
            self._id = secrets.token_hex(8)
            path = self._writers / f"{self._id}.lock"
            lock = path.open("xb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = os.fstat(lock.fileno()).st_nlink > 0
            except BlockingIOError:  # `alive` looked at it just now and takes it for dead
                held = False
            if held:
                self._lock = lock
                return
            lock.close()


def _write_all(handle: int, parts: Sequence[Buffer], offset: int) -> None:
    rest = deque(memoryview(part).cast("B") for part in parts if len(part))
    begun = offset
    while rest:
        offset += _write_some(handle, rest, offset)
        if rest and offset - begun >= _BEGIN_BYTES and _sync_file_range is not None:
            _sync_file_range(handle, begun, offset - begun, _SYNC_FILE_RANGE_WRITE)
            begun = offset


def _write_some(handle: int, rest: deque[memoryview], offset: int) -> int:
    """One system call; takes what was written off the front."""
    call: list[memoryview] = []
    size = 0
    while rest and size < _CALL_BYTES:
        part = rest.popleft()
        call.append(part[: _CALL_BYTES - size])
        size += len(call[-1])
        if len(call[-1]) < len(part):
            rest.appendleft(part[len(call[-1]) :])
    written = os.pwritev(handle, call, offset)
    left = size - written  # a full disk takes a part of it, and then refuses
    while left:
        part = call.pop()
        rest.appendleft(part[max(0, len(part) - left) :])
        left -= len(rest[0])
    return written


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
