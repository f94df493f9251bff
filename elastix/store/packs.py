"""Folders of packs: what every kind of them does, wherever it is. See local_packs.py and remote.py.

Not here: which records matter (index.py) and what their bytes mean (records.py).

Invariants: a byte that has been synced is never changed in place and never cut off. A pack is
removed whole, and only while nobody reads it. A pack is written by one writer.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from blake3 import blake3

from elastix.errors import Corrupt, Full, ReadOnly, StoreError
from elastix.store.records import ALIGNMENT, Header, Kind, Place, parse_header

SEAL_AT_BYTES = 256 << 20
NOT_WRITABLE = (
    "Let this user write there. To look at a store takes no such right: `elastix store log` or "
    "`show`, in Python Store(path, read_only=True)."
)
"""What to do about a store that this user may not write to."""
Buffer: TypeAlias = bytes | bytearray | memoryview
NAME = re.compile(r"([0-9a-f]{16})-[0-9]{6}\.pack")
LAST_NUMBER = 999_999
"""Of the packs of one writer; it goes on under another id."""


class View(Protocol):
    """Bytes of one pack that stay what they are for as long as the view is referred to."""

    def bytes_at(self, offset: int, length: int) -> memoryview:
        """Writable memory; writing changes this view alone."""
        ...


class Writer(Protocol):
    """Appends records to packs that are its own. Hold `lock` from append to sync or cut."""

    lock: AbstractContextManager[Any]

    @property
    def size(self) -> int:
        """Bytes in the current pack."""
        ...

    def append(self, header: Header, payload: Buffer) -> Place:
        """Write one record; not durable before `sync`."""
        ...

    def sync(self) -> None:
        """Make everything appended durable."""
        ...

    def cut(self) -> None:
        """Forget what was appended since the last sync. No index may have named it yet."""
        ...

    def seal(self) -> None:
        """End the current pack; the next record begins another."""
        ...

    def close(self) -> None:
        """Seal, and give up being a writer."""
        ...


class Claims(Protocol):
    """Who uses a store where there are no locks: each owner of an index leaves a note there."""

    def enter(self, first: bool) -> None:
        """Leave a note. Conflict if another owner collects garbage just now.

        Args:
            first: nobody else uses this index, so what it left there is of the dead.
        """
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """Conflict if there is another owner; otherwise nobody enters meanwhile."""
        ...

    def leave(self) -> None:
        """Take the note back."""
        ...


class Packs(Protocol):
    """A folder of packs."""

    @property
    def folder(self) -> Path | None:
        """The store's directory, where locks work; None if it is far away."""
        ...

    def claims(self, index: Path) -> Claims | None:
        """The note of the owner of the index in that directory; None where there are locks."""
        ...

    def sizes(self) -> dict[str, int]:
        """Every pack there is, with its bytes."""
        ...

    def read(self, pack: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes. NotFound if there is no such pack."""
        ...

    def view(self, pack: str) -> View:
        """The pack, kept readable even if it is removed meanwhile. NotFound if there is none."""
        ...

    def tails(self, packs: Sequence[str]) -> Iterator[View | None]:
        """A view of each, in order, as its last bytes are needed first; None: it is not there."""
        ...

    def remove(self, pack: str) -> bool:
        """Remove a pack, unless somebody has a view of it."""
        ...

    def alive(self, pack: str) -> bool:
        """Whether the writer of this pack may still append to it."""
        ...

    def lacks(self, pack: str) -> bool:
        """Whether it is not there, as far as that is told at once."""
        ...

    def writer(self) -> Writer:
        """A new writer."""
        ...


def storage_errors(what: str) -> AbstractContextManager[None]:
    """Turn an OSError into the StoreError that says whose fault it is.

    Args:
        what: was done, such as "opening PATH".

    Raises:
        Full: ENOSPC, EDQUOT, EFBIG. ReadOnly: EROFS, EACCES, EPERM. StoreError: anything else.
    """
    return _StorageErrors(what)


class _StorageErrors(AbstractContextManager[None]):  # no generator: it is entered at every read
    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        text = f"{self._what} failed: {error.strerror or error}."
        if Full.tells(error):
            raise Full(
                f"{text} Nothing was stored; what was stored before is readable. Make room, or "
                "retire models and run gc, which needs no free space."
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            hint = f" {NOT_WRITABLE}" if self._what.startswith("opening") else ""
            raise ReadOnly(f"{text} Nothing was changed.{hint}") from error
        hint = " Raise the limit of open files (ulimit -n)." if error.errno == errno.EMFILE else ""
        raise StoreError(
            f"{text} This operation had no effect; what was stored before is readable.{hint}"
        ) from error


def one_line(path: Path) -> str:
    """A path for a note, which has lines: whatever is in its name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))


@lru_cache(maxsize=4096)
def check_name(pack: str) -> str:
    """`pack` if it is a pack's name, and so cannot lead out of the folder.

    Raises:
        Corrupt: it is not.
    """
    if not isinstance(pack, str) or NAME.fullmatch(pack) is None:  # a damaged index has any type
        raise Corrupt(f"{pack!r} is no pack's name. It was not opened.")
    return pack


def read_record(packs: Packs, place: Place, kind: Kind) -> tuple[Header, bytes]:
    """The record at `place`, its header and digest checked.

    Raises:
        Corrupt: it is not what was written.
        NotFound: there is no such pack.
    """
    raw = packs.read(place.pack, place.offset - ALIGNMENT, ALIGNMENT + place.length)
    header = parse_header(raw[:ALIGNMENT], place.pack, place.offset - ALIGNMENT)
    payload = raw[ALIGNMENT:]
    if (header.kind, header.length) != (kind, place.length):
        raise Corrupt(f"the record at byte {place.offset} of {place.pack} is another one.")
    if len(payload) != place.length or blake3(payload).digest() != header.digest:
        raise Corrupt(f"the record at byte {place.offset} of {place.pack} is damaged.")
    return header, payload
