"""Packs on anything that pyarrow.fs reaches: the same bytes, a whole file for each put.

Not here: the index, which is always on a local disk. An object store knows no append, no lock and
no mapping: a pack is streamed and becomes visible when it is closed, views read ranges into
memory, and one process at a time may own the index.
"""

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from blake3 import blake3
from pyarrow.fs import FileSelector, FileSystem, FileType

from elastix.errors import ConfigError, NotFound, StoreError
from elastix.store.packs import Buffer, View, check_name, storage_errors
from elastix.store.records import ALIGNMENT, Header, Place, padded


def locate(
    path: str | os.PathLike[str],
    filesystem: FileSystem | None,
    index: str | os.PathLike[str] | None,
) -> tuple[str, FileSystem | None, Path]:
    """Root, file system (None: a local directory) and directory of the index.

    Raises:
        ConfigError: no such scheme.
    """
    text = os.fspath(path)
    scheme = urlsplit(text).scheme
    if filesystem is None and scheme == "file":
        text, scheme = urlsplit(text).path, ""
    if filesystem is None and "://" not in text:
        return text, None, Path(index) if index else Path(text)
    root = text
    if filesystem is None:
        try:
            filesystem, root = FileSystem.from_uri(text)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{text!r} is no place that pyarrow.fs knows: {error}.") from error
    name = blake3(f"{filesystem.type_name}:{text}".encode()).hexdigest()[:16]
    return root, filesystem, Path(index) if index else Path.home() / ".cache" / "elastix" / name


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

    def __init__(self, filesystem: FileSystem, root: str) -> None:
        self._fs = filesystem
        self._folder = f"{root.rstrip('/')}/packs"

    def sizes(self) -> dict[str, int]:  # noqa: D102
        with _remote_errors(f"listing {self._folder}"):
            selector = FileSelector(self._folder, allow_not_found=True)
            found = {
                info.base_name: int(info.size)
                for info in self._fs.get_file_info(selector)
                if info.type == FileType.File and info.base_name.endswith(".pack")
            }
        return {check_name(pack): size for pack, size in found.items()}

    def read(self, pack: str, offset: int, length: int) -> bytes:  # noqa: D102
        path = f"{self._folder}/{check_name(pack)}"
        with _remote_errors(f"reading {path}"), self._fs.open_input_file(path) as file:
            length = max(0, min(length, file.size() - offset))
            return bytes(file.read_at(length, offset))

    def view(self, pack: str) -> View:  # noqa: D102
        path = f"{self._folder}/{check_name(pack)}"
        with _remote_errors(f"opening {path}"):
            return _Ranges(self._fs.open_input_file(path), path)

    def remove(self, pack: str) -> bool:  # noqa: D102
        path = f"{self._folder}/{check_name(pack)}"
        with suppress(NotFound), _remote_errors(f"removing {path}"):
            self._fs.delete_file(path)
        return True

    def alive(self, pack: str) -> bool:
        """Never: a pack that is visible is whole."""
        return False

    def writer(self) -> "RemoteWriter":  # noqa: D102
        return RemoteWriter(self._fs, self._folder)


class _Ranges:
    def __init__(self, file: pa.NativeFile, path: str) -> None:
        self._file = file
        self._path = path
        self._lock = threading.Lock()

    def bytes_at(self, offset: int, length: int) -> memoryview:
        with self._lock, _remote_errors(f"reading {self._path}"):
            memory = bytearray(self._file.read_at(length, offset))
        if len(memory) != length:
            raise NotFound(f"{self._path} ends before byte {offset + length}.")
        return memoryview(memory)


class RemoteWriter:
    """Streams one pack per put; `sync` closes it, and only then is it there."""

    def __init__(self, filesystem: FileSystem, folder: str) -> None:
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._fs = filesystem
        self._folder = folder
        self._id = secrets.token_hex(8)
        self._number = 0
        self._file: pa.NativeFile | None = None
        self._pack = ""
        self._end = 0

    @property
    def size(self) -> int:  # noqa: D102
        return self._end

    def append(self, header: Header, payload: Buffer) -> Place:  # noqa: D102
        with _remote_errors(f"writing to {self._folder}"):
            if self._file is None:
                self._number += 1
                self._pack = f"{self._id}-{self._number:06d}.pack"
                self._fs.create_dir(self._folder, recursive=True)
                self._file = self._fs.open_output_stream(f"{self._folder}/{self._pack}")
                self._end = 0
            start = self._end
            self._file.write(header.pack(self._pack, start))
            self._file.write(payload)
            self._file.write(bytes(padded(header.length) - header.length))
            self._end += ALIGNMENT + padded(header.length)
        return Place(self._pack, start + ALIGNMENT, header.length)

    def sync(self) -> None:  # noqa: D102
        if self._file is None:
            return
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
