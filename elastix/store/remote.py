"""Packs on anything that pyarrow.fs reaches: the same bytes, a whole file for each put.

Not here: the index, which is always on a local disk. An object store knows no append, no lock and
no mapping: a pack is streamed and becomes visible when it is closed, and views read ranges into
memory. Every owner of an index leaves a note in `owners/`; with more than one, none collects
garbage, for each lacks what the others have lately acknowledged.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from blake3 import blake3

from elastix.errors import ConfigError, Conflict, NotFound, StoreError
from elastix.lazy_import import later
from elastix.store.packs import (
    LAST_NUMBER,
    NAME,
    Buffer,
    View,
    check_name,
    one_line,
    storage_errors,
)
from elastix.store.records import ALIGNMENT, Header, Kind, Place, padded

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs
else:
    pa, fs = later("pyarrow"), later("pyarrow.fs")

_COLLECTING = ".collecting"
_TAIL_BYTES = 64 << 10  # holds the contents of most packs, and a small model's manifest
_REQUESTS = 16  # at a time
_AHEAD = 64  # packs whose ends are fetched before they are wanted


def locate(
    path: str | os.PathLike[str],
    filesystem: fs.FileSystem | None,
    index: str | os.PathLike[str] | None,
) -> tuple[str, fs.FileSystem | None, Path]:
    """Root, file system (None: a local directory) and directory of the index.

    Both directories are absolute: a process may change its working folder while a store is open.

    Raises:
        ConfigError: no such scheme.
    """
    text = os.fspath(path)
    if filesystem is None and (text.lower().startswith("file:") or "://" not in text):
        folder = _directory(_of_uri(text) if text.lower().startswith("file:") else text)
        return str(folder), None, _directory(index) if index else folder
    root = text
    if filesystem is None:
        try:
            filesystem, root = fs.FileSystem.from_uri(text)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{text!r} is no place that pyarrow.fs knows: {error}. No store was opened. Give a "
                "directory, or a URI such as s3://BUCKET/PATH."
            ) from error
    whole = f"{filesystem.type_name}:{text.rstrip('/')}"  # two names of one store have one index
    name = blake3(os.fsencode(whole)).hexdigest()[:16]
    return root, filesystem, _directory(index or Path.home() / ".cache" / "elastix" / name)


def _directory(path: str | os.PathLike[str]) -> Path:
    """As a shell takes it: `~nobody` without such a user is a name like any other."""
    named = Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises there
    try:
        return named.absolute()
    except OSError as error:
        raise ConfigError(
            f"{path} is relative, and the working folder is gone: {error}. No store was opened. "
            "Give an absolute path."
        ) from error


def _of_uri(text: str) -> str:
    """The path in a file URI, with or without an empty host.

    Raises:
        ConfigError: it names a host, or no path.
    """
    path = text[len("file:") :]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(
                f"{text!r} names the host {host!r}. No store was opened. A file URI has three "
                "slashes, as in file:///home/me/store."
            )
        path = slash + rest
    path = os.fsdecode(unquote_to_bytes(path))
    if not path or "\0" in path:
        raise ConfigError(f"{text!r} names no directory. No store was opened.")
    return path


@contextmanager
def _remote_errors(what: str) -> Iterator[None]:
    with storage_errors(what):
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{what}: there is no such file.") from error
        except pa.ArrowException as error:
            if isinstance(error, OSError):
                raise
            raise StoreError(f"{what} failed: {error}. Nothing was changed.") from error


class RemotePacks:
    """Packs below `root` on a pyarrow file system."""

    folder = None

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self._fs = filesystem
        self._root = root
        self._folder = f"{root.rstrip('/')}/packs"

    def claims(self, index: Path) -> RemoteClaims:  # noqa: D102
        return RemoteClaims(self._fs, self._root, index)

    def sizes(self) -> dict[str, int]:  # noqa: D102
        with _remote_errors(f"listing {self._folder}"):
            selector = fs.FileSelector(self._folder, allow_not_found=True)
            return {
                info.base_name: int(info.size)
                for info in self._fs.get_file_info(selector)
                if info.type == fs.FileType.File and NAME.fullmatch(info.base_name)
            }

    def read(self, pack: str, offset: int, length: int) -> bytes:  # noqa: D102
        path = f"{self._folder}/{check_name(pack)}"
        with _remote_errors(f"reading {path}"), self._fs.open_input_file(path) as file:
            length = max(0, min(length, file.size() - offset))
            return bytes(file.read_at(length, offset))

    def view(self, pack: str) -> _Ranges:  # noqa: D102
        path = f"{self._folder}/{check_name(pack)}"
        with _remote_errors(f"reading {path}"):
            return _Ranges(self._fs.open_input_file(path), path)

    def tails(self, packs: Sequence[str]) -> Iterator[View | None]:
        """Views with their ends fetched, many at a time: a request takes longer than its bytes."""
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for start in range(0, len(packs), _AHEAD):
                yield from pool.map(self._tail_of, packs[start : start + _AHEAD])

    def _tail_of(self, pack: str) -> View | None:
        with suppress(NotFound):
            view = self.view(pack)
            view.tail(_TAIL_BYTES)
            return view
        return None

    def remove(self, pack: str) -> bool:  # noqa: D102
        path = f"{self._folder}/{check_name(pack)}"
        with suppress(NotFound), _remote_errors(f"removing {path}"):
            self._fs.delete_file(path)
        return True

    def alive(self, pack: str) -> bool:
        """Never: a pack that is visible is whole."""
        return False

    def lacks(self, pack: str) -> bool:
        """Never: it would take a request."""
        return False

    def writer(self) -> RemoteWriter:  # noqa: D102
        return RemoteWriter(self._fs, self._folder)


class _Ranges:
    def __init__(self, file: pa.NativeFile, path: str) -> None:
        self._file = file
        self._path = path
        self._lock = threading.Lock()
        self._tail: tuple[int, bytes] = (1 << 63, b"")

    def tail(self, length: int) -> int:
        """Fetch the last so many bytes in one request; returns how many the pack has."""
        with self._lock, _remote_errors(f"reading {self._path}"):
            size = int(self._file.size())
            start = max(0, size - length)
            self._tail = start, bytes(self._file.read_at(size - start, start))
        return size

    def bytes_at(self, offset: int, length: int) -> memoryview:
        start, tail = self._tail
        if offset >= start and offset + length <= start + len(tail):
            return memoryview(bytearray(tail[offset - start :][:length]))
        with self._lock, _remote_errors(f"reading {self._path}"):
            memory = bytearray(self._file.read_at(length, offset))
        if len(memory) != length:
            raise NotFound(f"{self._path} ends before byte {offset + length}.")
        return memoryview(memory)


class RemoteClaims:
    """Notes of owners: `owners/<index>`, and `owners/<index>.<token>.collecting` of a collector.

    Whoever enters writes its note and then looks for a collector; who collects writes its own
    and then looks for others. Listings show what was written before, so of two that do so at once
    at least one sees the other. A process that was killed leaves its notes, and takes them for
    its own when it opens the same index again.
    """

    def __init__(self, filesystem: fs.FileSystem, root: str, index: Path) -> None:
        self._fs = filesystem
        self._folder = f"{root.rstrip('/')}/owners"
        host = socket.gethostname()
        where = index.resolve()  # one index, by whatever name it was given
        self._about = f"{host}, index in {one_line(where)}, since {time.ctime()}"
        self._name = blake3(os.fsencode(f"{host}:{where}")).hexdigest()[:16]

    def enter(self, first: bool) -> None:
        """As Claims.enter."""
        if first:  # of a process that was killed while it collected
            for name in self._listed():
                if name.startswith(self._name) and name.endswith(_COLLECTING):
                    self._erase(name.removeprefix(self._name))
        self._write("")
        other = next((name for name in self._others() if name.endswith(_COLLECTING)), None)
        if other is not None:
            if first:
                self._erase("")
            raise Conflict(
                f"garbage of this store is being collected ({self._told(other)}). It was not "
                f"opened. Try again, or remove {self._folder}/{other} if that process is gone."
            )

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """As Claims.collecting."""
        mine = f".{secrets.token_hex(4)}{_COLLECTING}"  # others may collect with this index
        try:
            self._write(mine)
            others = self._others()
            if others:
                raise Conflict(
                    f"another owner uses this store ({self._told(others[0])}), and its index "
                    "knows what this one does not. Nothing was collected. Close it there, or "
                    f"remove {self._folder}/{others[0]} if it is gone for good."
                )
            yield
        finally:
            self._erase(mine)

    def leave(self) -> None:
        """As Claims.leave. What cannot be removed is taken over at the next opening."""
        with suppress(StoreError):
            self._erase("")

    def _others(self) -> list[str]:
        return [name for name in self._listed() if not name.startswith(self._name)]

    def _listed(self) -> list[str]:
        with _remote_errors(f"listing {self._folder}"):
            found = self._fs.get_file_info(fs.FileSelector(self._folder, allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == fs.FileType.File)

    def _told(self, name: str) -> str:
        path = f"{self._folder}/{name}"
        try:
            with _remote_errors(f"reading {path}"), self._fs.open_input_stream(path) as file:
                return bytes(file.read(1000)).decode(errors="replace")
        except StoreError:
            return name

    def _write(self, suffix: str) -> None:
        with _remote_errors(f"writing to {self._folder}"):
            self._fs.create_dir(self._folder, recursive=True)
            with self._fs.open_output_stream(f"{self._folder}/{self._name}{suffix}") as file:
                file.write(self._about.encode())

    def _erase(self, suffix: str) -> None:
        with suppress(NotFound), _remote_errors(f"removing from {self._folder}"):
            self._fs.delete_file(f"{self._folder}/{self._name}{suffix}")


class RemoteWriter:
    """Streams one pack per put; `sync` closes it, and only then is it there."""

    def __init__(self, filesystem: fs.FileSystem, folder: str) -> None:
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._fs = filesystem
        self._folder = folder
        self._id = secrets.token_hex(8)
        self._number = 0
        self._file: pa.NativeFile | None = None
        self._pack = ""
        self._end = 0
        self._headers: list[bytes] = []

    @property
    def size(self) -> int:  # noqa: D102
        return self._end

    def append(self, header: Header, payload: Buffer) -> Place:  # noqa: D102
        with _remote_errors(f"writing to {self._folder}"):
            if self._file is None:
                if self._number == LAST_NUMBER:
                    self._id, self._number = secrets.token_hex(8), 0
                self._number += 1
                self._pack = f"{self._id}-{self._number:06d}.pack"
                self._fs.create_dir(self._folder, recursive=True)
                self._file = self._fs.open_output_stream(f"{self._folder}/{self._pack}")
                self._end = 0
                self._headers.clear()
            start = self._end
            self._headers.append(header.pack(self._pack, start))
            self._file.write(self._headers[-1])
            self._file.write(payload)
            self._file.write(bytes(padded(header.length) - header.length))
            self._end += ALIGNMENT + padded(header.length)
        return Place(self._pack, start + ALIGNMENT, header.length)

    def _seal(self) -> None:
        """The contents, so that one request tells them all, and the seal, which says where."""
        contents, at = b"".join(self._headers), self._end
        self.append(Header(Kind.SEAL, len(contents), blake3(contents).digest()), contents)
        self.append(Header(Kind.SEAL, 0, blake3(b"").digest(), seq=at), b"")

    def sync(self) -> None:  # noqa: D102
        if self._file is None:
            return
        try:
            self._seal()
        except StoreError:
            self.cut()
            raise
        file, self._file, self._end = self._file, None, 0
        try:
            with _remote_errors(f"writing {self._pack}"):
                file.close()
        except StoreError:
            self._discard()
            raise

    def cut(self) -> None:  # noqa: D102
        if self._file is not None:
            file, self._file, self._end = self._file, None, 0
            with suppress(OSError, pa.ArrowException):
                file.close()
            self._discard()

    def _discard(self) -> None:
        with suppress(OSError, pa.ArrowException):
            self._fs.delete_file(f"{self._folder}/{self._pack}")

    def seal(self) -> None:
        """Nothing to do: every pack is whole."""

    def close(self) -> None:  # noqa: D102
        self.cut()
