"""Samples of tar archives (WebDataset's shards) by position, through an index.

The index is made once from an archive's headers and stands beside it, as `ARCHIVE.index`. It is
made anew when the archive is another one by size or time; and what is read from the archive must
begin with the very header that the index was made from, so that a sample is never another's.

An index file: the length of a header; the header, in JSON; arrays of int64, see `_ARRAYS`; and the
keys as text.
"""

import json
import os
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from elastix.arguments import checked
from elastix.data.formats.archive import BLOCK, ArchiveMember, mark_of, members
from elastix.data.formats.files import (
    Fingerprint,
    Paths,
    check_decode,
    check_index,
    check_same,
    fingerprint,
    found,
)
from elastix.data.formats.indexed import Indexed
from elastix.errors import ConfigError, Corrupt

_FORMAT = 1
_KEY = "__key__"
_SUFFIX = ".index"
_MOST_OPEN = 64  # archives; a dataset may have thousands
_ARRAYS = ("starts", "keys", "headers", "sizes", "marks", "names")


@checked
class Tar(Indexed):
    """Samples of tar archives by position, as WebDataset groups files: by name up to the first dot.

    A sample is a dict with `"__key__"`, the name, and the bytes of each of its files by what stands
    behind the first dot, in lower case: `{"__key__": "train/0007", "jpg": b"...", "cls": b"3"}`.
    The files of a sample may stand anywhere in its archive; samples come in the order in which the
    archive begins them. Left out are symbolic links and devices, files without a dot, and names
    within two underscores (WebDataset's own).

    Names are keys and nothing else: nothing is ever unpacked, so it does not matter whether one
    begins with `/` or `../`.

    Raises:
        ConfigError: no such file, or archives without a sample.
        Corrupt: an archive is damaged, cut off, or has the same file twice.
        Conflict: when reading: an archive was changed since it was opened.
    """

    def __init__(self, paths: Paths, decode: Callable[[dict[str, Any]], Any] | None = None) -> None:
        """Open archives, making the indexes that are missing or too old.

        Args:
            paths: an archive, a pattern such as "shards/*.tar", or a list of them.
            decode: makes what the loader is given of a sample's dict; without it, the dict is.
        """
        check_decode(decode)
        self._decode = decode
        self._shards = [_Shard.of(path) for path in _archives(paths)]
        self.files = blake3("".join(s.digest for s in self._shards).encode()).hexdigest(16)
        self._starts = [0, *accumulate(len(shard) for shard in self._shards)]
        self._open: OrderedDict[int, int] = OrderedDict()
        if not len(self):
            raise ConfigError(
                f"{self._shards[0].path} has no sample: no regular file whose name has a dot. No "
                "dataset was made."
            )

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - whatever decode makes
        index = check_index(index, len(self), "the Tar dataset")
        number = bisect_right(self._starts, index) - 1
        shard = self._shards[number]
        parts = shard.read(self._handle(number), index - self._starts[number])
        return parts if self._decode is None else self._decode(parts)

    def _handle(self, number: int) -> int:
        """Kept open, but not too many. `pread` has no place in the file to share after a fork."""
        handle = self._open.get(number)
        if handle is None:
            shard = self._shards[number]
            handle = os.open(shard.path, os.O_RDONLY)
            try:
                check_same(shard.path, fingerprint(handle), shard.made_from)
            except Exception:
                os.close(handle)
                raise
            self._open[number] = handle
            if len(self._open) > _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(number)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        made_from = [(shard.path, shard.made_from) for shard in self._shards]
        return {"made_from": made_from, "decode": self._decode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made_from = state["made_from"]
        self.__init__([path for path, _ in made_from], state["decode"])  # type: ignore[misc]
        for shard, (path, then) in zip(self._shards, made_from, strict=True):
            check_same(path, shard.made_from, then)

    def __del__(self) -> None:
        for handle in getattr(self, "_open", {}).values():
            with suppress(OSError):
                os.close(handle)


class _Shard:
    """One archive and its index."""

    def __init__(self, path: Path, header: Mapping[str, Any], body: memoryview) -> None:
        self.path = path
        self.made_from: Fingerprint = (header["size"], header["mtime_ns"])
        self.left_out: int = header["left_out"]
        self.digest: str = header["digest"]
        self._names: list[str] = header["names"]
        self._arrays = _arrays(header, body)
        self._text = body[len(body) - header["text"] :]

    @classmethod
    def of(cls, path: Path, remake: bool = False) -> "_Shard":
        """With the index beside the archive if it is of this archive, or a new one."""
        stamp = fingerprint(path)
        beside = path.with_name(path.name + _SUFFIX)
        opened = None if remake else _opened(beside, stamp)
        if opened is None:
            raw = _index_of(path)
            with suppress(OSError):  # a folder that may only be read: then it is made every time
                _replace(beside, raw)
            opened = _parsed(raw, fingerprint(path))
            if opened is None:
                raise Corrupt(f"{path} was changed while its index was made. Start again.")
        return cls(path, *opened)

    def __len__(self) -> int:
        return len(self._arrays["starts"]) - 1

    def read(self, handle: int, index: int) -> dict[str, Any]:
        """The sample's key and its files."""
        starts, keys = self._arrays["starts"], self._arrays["keys"]
        key = bytes(self._text[keys[index] : keys[index + 1]]).decode("utf-8", "surrogateescape")
        sample: dict[str, Any] = {_KEY: key}
        for part in range(int(starts[index]), int(starts[index + 1])):
            size = int(self._arrays["sizes"][part])
            raw = _read(handle, int(self._arrays["headers"][part]), BLOCK + size)
            check_same(self.path, fingerprint(handle), self.made_from)
            if len(raw) < BLOCK + size or mark_of(raw[:BLOCK]) != self._arrays["marks"][part]:
                raise Corrupt(
                    f"{self.path} does not hold the files of sample {key!r} where its index says. "
                    "It was written to since. No sample was read. Make the index anew with "
                    f"`elastix data index {self.path}`."
                )
            sample[self._names[int(self._arrays["names"][part])]] = raw[BLOCK:]
        return sample


def _archives(paths: Paths) -> list[Path]:
    """The files, but not the indexes that were written beside them."""
    files = found(paths)
    indexes = {path.with_name(path.name + _SUFFIX) for path in files}
    return [path for path in files if path not in indexes]


def make_index(path: Path) -> tuple[int, int]:
    """Make the index of an archive anew; how many samples it has, and how many files are in none.

    Raises:
        Corrupt: the archive is damaged, cut off, or has the same file twice.
        ConfigError: no index can be written beside it.
    """
    shard = _Shard.of(path, remake=True)
    beside = path.with_name(path.name + _SUFFIX)
    if _opened(beside, shard.made_from) is None:
        raise ConfigError(
            f"{beside} could not be written, so the index of {path} is made each time that it is "
            "opened. Nothing was changed. Make the folder writable, or copy the archive elsewhere."
        )
    return len(shard), shard.left_out


def _read(handle: int, offset: int, length: int) -> bytes:
    """All of it; a single call reads 2 GiB at most."""
    raw = os.pread(handle, length, offset)
    while 0 < len(raw) < length:
        more = os.pread(handle, length - len(raw), offset + len(raw))
        if not more:
            break
        raw += more
    return raw


def _split(name: str) -> tuple[str, str] | None:
    """Key of the sample and name of the part; None for a file that is of no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, rest = base.partition(".")
    if not dot or not stem or (base.startswith("__") and base.endswith("__")):
        return None
    return folder + slash + stem, rest.lower()


def _grouped(
    files: Iterator[ArchiveMember], path: Path
) -> tuple[dict[str, dict[str, ArchiveMember]], int]:
    samples: dict[str, dict[str, ArchiveMember]] = {}
    left_out = 0
    for member in files:
        place = _split(member.name)
        if place is None:
            left_out += 1
            continue
        if place[1] == _KEY:
            raise Corrupt(
                f"{path} has {member.name!r}, and {_KEY} is what the name of a sample is given as. "
                "Nothing was read from it. Make the archive again with another name."
            )
        parts = samples.setdefault(place[0], {})
        if place[1] in parts:
            raise Corrupt(
                f"{path} has {member.name!r} twice, at bytes {parts[place[1]].header} and "
                f"{member.header}, so nobody can say which of them is meant. Nothing was read from "
                "it. Make the archive again with one of them."
            )
        parts[place[1]] = member
    return samples, left_out


def _index_of(path: Path) -> bytes:
    """The index of an archive, as it is stored."""
    handle = os.open(path, os.O_RDONLY)
    try:
        stamp = fingerprint(handle)
        files = members(lambda at, length: _read(handle, at, length), stamp[0], str(path))
        samples, left_out = _grouped(files, path)
        check_same(path, fingerprint(handle), stamp)
    finally:
        os.close(handle)
    names = {name: n for n, name in enumerate(sorted({p for s in samples.values() for p in s}))}
    keys = [key.encode("utf-8", "surrogateescape") for key in samples]
    parts = [(names[name], m) for sample in samples.values() for name, m in sample.items()]
    arrays: dict[str, list[int]] = {
        "starts": [0, *accumulate(map(len, samples.values()))],
        "keys": [0, *accumulate(map(len, keys))],
        "headers": [member.header for _, member in parts],
        "sizes": [member.size for _, member in parts],
        "marks": [member.mark for _, member in parts],
        "names": [name for name, _ in parts],
    }
    body = b"".join(np.asarray(arrays[name], "<i8").tobytes() for name in _ARRAYS) + b"".join(keys)
    header = {
        "elastix_tar_index": _FORMAT,
        "size": stamp[0],
        "mtime_ns": stamp[1],
        "samples": len(samples),
        "parts": len(parts),
        "text": arrays["keys"][-1],
        "left_out": left_out,
        "names": list(names),
        "digest": blake3(body).hexdigest(),
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def _lengths(header: Mapping[str, Any]) -> dict[str, int]:
    """Numbers in each array."""
    samples, parts = header["samples"], header["parts"]
    return dict(zip(_ARRAYS, (samples + 1, samples + 1, *[parts] * 4), strict=True))


def _arrays(header: Mapping[str, Any], body: memoryview) -> dict[str, npt.NDArray[np.int64]]:
    found, at = {}, 0
    for name, length in _lengths(header).items():
        found[name] = np.frombuffer(body, "<i8", length, at)
        at += 8 * length
    return found


def _replace(path: Path, raw: bytes) -> None:
    """Whole or not at all, also when several do it at once."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(raw)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _opened(path: Path, stamp: Fingerprint) -> tuple[dict[str, Any], memoryview] | None:
    """What an index file holds; None if it is not the index of this archive."""
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return None
        return _parsed(cast("Any", np.memmap(path, np.uint8, "r")).data, stamp)
    except OSError:  # of somebody else, say
        return None


def _parsed(raw: Any, stamp: Fingerprint) -> tuple[dict[str, Any], memoryview] | None:  # noqa: ANN401
    """Header and body; None if they are damaged or of another archive."""
    memory = memoryview(raw)
    begin = 8 + int.from_bytes(memory[:8], "little")
    try:
        header = json.loads(bytes(memory[8:begin]))
        if header["elastix_tar_index"] != _FORMAT or (header["size"], header["mtime_ns"]) != stamp:
            return None
        body = memory[begin:]
        whole = len(body) == 8 * sum(_lengths(header).values()) + header["text"]
        whole = whole and blake3(body).hexdigest() == header["digest"]
        return (header, body) if whole and _sound(header, body) else None
    except (ValueError, KeyError, TypeError):  # another program's, or made up
        return None


def _sound(header: Mapping[str, Any], body: memoryview) -> bool:
    """Whether every number leads to somewhere: a digest says only that they are as written."""
    arrays, names = _arrays(header, body), header["names"]
    inside = isinstance(names, list) and all(isinstance(name, str) for name in names)
    inside = (
        inside
        and type(header["left_out"]) is int
        and _KEY not in names
        and all(
            bool(np.all((values >= 0) & (values <= most)))
            for values, most in (
                (arrays["starts"], header["parts"]),
                (arrays["keys"], header["text"]),
                (arrays["headers"], header["size"]),
                (arrays["sizes"], header["size"]),
                (arrays["names"], len(names) - 1),
            )
        )
    )
    ends = arrays["headers"] + BLOCK + arrays["sizes"]
    rising = all(bool(np.all(np.diff(arrays[name]) >= 0)) for name in ("starts", "keys"))
    return inside and rising and bool(np.all(ends <= header["size"]))
