"""The run's journal: events as JSON lines in an append-only file. The truth that others read."""

import json
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from elastix.errors import Corrupt, Full, NotFound, StoreError, TooNew
from elastix.event_records import from_record, to_record
from elastix.events import Event
from elastix.observe.run_lock import Lock
from elastix.observe.sealed_lines import SEAL, LineChecker, checksum, is_sealed, seal

_BLOCK = 1 << 17  # bytes that are read at once
_NUMBER = "serial"  # of an event, in its line: journals have called it so from the beginning
_LOOK_EVERY_S = 0.05  # a look gives up the interpreter lock, which others take
_KIND = b'{"event":"'  # what a line begins with


def _at_once(path: str, flags: int) -> int:
    """Nobody waits at a pipe that somebody else has put there: that is an OSError."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


class Journal:
    """Appends events to a file. A line is handed to the system before `append` returns.

    It has one writer at a time. A half-written last line (the writer was killed) is cut off when
    the journal is opened again.

    Args:
        path: of the file; beside it is the lock.
        stays: the writer is not bound to a driver and goes on without one.
        patience_s: how long another writer, which is about to end, is waited for.

    Raises:
        Conflict: another process writes it; names that.
        Full: there is no room for it.
        StoreError: it cannot be locked.
        Corrupt: what is behind its last line break is a whole line. Nothing was cut off.
    """

    def __init__(self, path: Path, *, stays: bool = False, patience_s: float = 0.0) -> None:
        what = f"the journal {path} is written"
        self._lock = Lock(lock_of(path), what, stays=stays, patience_s=patience_s)
        self.path = path = path.absolute()  # whoever writes may change its working folder
        is_new = not path.exists()
        self._torn: StoreError | None = None
        self._looked_s = -math.inf
        try:
            self._file = open(path, "ab", buffering=0, opener=_at_once)  # noqa: SIM115
        except OSError as error:
            self._lock.close()
            kind = StoreError.kind_of(error)
            cure = "Let this user write it, or move away what is in its place."
            raise kind(
                f"the journal {path} cannot be written: {error}. Nothing was started. "
                f"{'Make room.' if kind is Full else cure}"
            ) from error
        try:
            self._inode = os.fstat(self._file.fileno()).st_ino
            size = _whole_bytes(path)
            checksum_there = _checksum_at(path, size)
            if size < self._file.seek(0, os.SEEK_END):
                _check_torn(path, size, checksum_there)
                self._file.truncate(size)
            self._end = size, checksum_there  # of the file; together, as Ctrl-C may come between
            if is_new:
                _sync_directory(path.parent)
        except BaseException:
            self._file.close()
            self._lock.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of whole lines in it."""
        return self._end[0]

    def append(self, event: Event, sequence: int | None = None) -> None:
        """Add one event; `sequence` numbers those that several workers may send.

        Raises:
            Full, StoreError: JSON has no word for what is in it. Or the disk refuses, or refused
                an earlier one: there are no events after that.
                Or the file was removed, moved away, cut short or written by another process:
                noticed within a twentieth of a second, or by `close`.
        """
        if self._torn is not None:
            raise self._torn
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = now_s
            self._check_in_place()
        record = to_record(event) if sequence is None else {**to_record(event), _NUMBER: sequence}
        try:
            text = json.dumps(record, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"{self.path} cannot hold {str(event)[:200]}: {error}. It was not added. This is a "
                "bug in elastix."
            ) from error
        line, after = seal(text, self._end[1])
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._end = self.size + len(line), after
        except OSError as error:
            self._torn = StoreError.kind_of(error)(
                f"{self.path} cannot be written: {error}. Nothing is added to it any more. Make "
                "room, then call fit() again: it goes on from the last stored State."
            )
            raise self._torn from error
        except BaseException:
            self._settle(line, after)
            raise

    def _settle(self, line: bytes, after: int) -> None:
        """Ctrl-C has come while a line was written: it stays if it is whole, else it goes.

        Whoever is interrupted may have more to say, and the next line goes by what is there.
        """
        written = os.fstat(self._file.fileno()).st_size - self.size
        if written == len(line):
            self._end = self.size + written, after
        elif written > 0:
            self._file.truncate(self.size)

    def _check_in_place(self) -> None:
        """What is written to a removed file is lost, and its lock keeps nobody out any more.

        Behind what others have cut off or added, no line has the checksum that belongs there.
        """
        try:
            in_place = self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            in_place = False
        if not in_place:
            self._torn = StoreError(
                f"{self.path} was removed or replaced while it was being written. Events since "
                "then are lost, and nothing is added any more. Call fit() again to begin anew, "
                "and leave the folder of a run alone while it trains."
            )
            raise self._torn
        size = os.fstat(self._file.fileno()).st_size
        if size != self.size:
            self._torn = StoreError(
                f"{self.path} was changed by another process while it was being written: it has "
                f"{size} bytes, and {self.size} were written. Nothing is added any more. Restore "
                "it from a copy, or choose another name for what is run next, and leave the folder "
                "of a run alone while it trains."
            )
            raise self._torn

    def sync(self) -> None:
        """Make durable what was appended, against the death of the host too.

        Raises:
            StoreError: the disk refuses.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            kind = StoreError.kind_of(error)
            raise kind(f"{self.path} cannot be made durable: {error}.") from error

    def close(self) -> None:
        """Make it durable, and let others write it.

        Raises:
            StoreError: it is not where it was, which `append` has not noticed yet; or the disk
                refuses.
        """
        try:
            self.sync()
            if self._torn is None:
                self._check_in_place()
        finally:
            self._file.close()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def lock_of(path: Path) -> Path:
    """The lock that the writer of the journal at `path` holds."""
    return path.with_suffix(".lock")


def is_file(path: Path) -> bool:
    """Whether there is a file.

    Raises:
        StoreError: it cannot be told: somebody may not look there, say.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # which Path.is_file() takes for no in some versions of Python
        raise _unreadable(path, error) from error


def read(path: Path) -> Iterator[Event]:
    """The events of a journal, in order; works while it is being written.

    Raises:
        NotFound: there is none.
        Corrupt: a line that is no event or is damaged, with its number. A torn last line is not
            one.
        TooNew: a line is of another version of elastix; names that.
        StoreError: it may not be read.
    """
    for event, _ in read_numbered(path):
        yield event


def read_numbered(path: Path) -> Iterator[tuple[Event, int | None]]:
    """As `read`, each event with its sequence number, if it has one."""
    for event, sequence, _ in read_placed(path):
        yield event, sequence


def read_placed(path: Path) -> Iterator[tuple[Event, int | None, int]]:
    """As `read_numbered`, each with the place in the file where its line ends."""
    end = 0
    for number, line in enumerate(_lines(path), start=1):
        end += len(line) + 1
        yield *_parse(line, path, f"line {number}"), end


def _lines(path: Path, place: int = 0) -> Iterator[bytes]:
    """The whole lines from a place on where one begins, without their breaks, and checked."""
    with _opened(path) as file:
        checker = LineChecker(path, _checksum_at(path, place), number=None if place else 0)
        file.seek(place)
        while block := file.read(_BLOCK):
            yield from checker.lines(block)


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The kind of each event and its line, unread: for whoever needs few of very many.

    `parse` reads one.

    Raises:
        NotFound: there is none.
        StoreError: it may not be read.
        Corrupt: a line is damaged.
    """
    for line in _lines(path):
        yield _kind(line), line


def read_only(path: Path, *kinds: type[Event]) -> Iterator[Event]:
    """The events of some kinds, in order. Others are passed over unread, in a tenth of the time.

    Raises:
        NotFound: there is no journal.
        Corrupt: a line of one of these kinds is no event, or any line is damaged.
        TooNew: see `read`.
    """
    wanted = {kind.__name__ for kind in kinds}
    for kind, line in lines(path):
        if kind in wanted:
            yield parse(line, path)


def parse(line: bytes, path: Path) -> Event:
    """The event in a line.

    Raises:
        Corrupt: it is none. TooNew: see `read`.
    """
    return _parse(line, path, "a line")[0]


def _opened(path: Path) -> BinaryIO:
    if not is_file(path):
        raise NotFound(f"there is no journal at {path}. `elastix runs` lists the runs of a store.")
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    cure = " Let this user read it." if isinstance(error, PermissionError) else ""
    return StoreError(f"reading {path} failed: {error.strerror}.{cure}")


def _kind(line: bytes) -> str:
    start = len(_KIND)
    found = line[start : line.find(b'"', start)] if line.startswith(_KIND) else b""
    return found.decode(errors="replace")


def read_part(path: Path, place: int, skip: int, most: int) -> list[Event]:
    """Some events from the middle of a journal.

    Args:
        path: of the file.
        place: where the line of one of them begins, in bytes.
        skip: events from there that are not wanted.
        most: how many are.

    Raises:
        Corrupt: a line that is no event or is damaged. TooNew: see `read`.
    """
    found = islice(_lines(path, place), skip, skip + most)
    return [parse(line, path) for line in found]


class Tail:
    """Reads a journal as it grows; there may be none yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._checker = LineChecker(path)

    def news(self) -> list[Event]:
        """The events since the last call.

        Raises:
            Corrupt: a line that is no event or is damaged. TooNew: see `read`.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                block = file.read()
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]  # the rest may yet be cut off
        self._place += len(whole)
        return [parse(line, self._path) for line in self._checker.lines(whole)]


def _parse(line: bytes, path: Path, which: str) -> tuple[Event, int | None]:
    try:
        record = json.loads(line)
        if is_sealed(line):
            del record["crc"]
        sequence = record.pop(_NUMBER, None) if isinstance(record, dict) else None
    except (ValueError, RecursionError) as error:
        raise _no_event(path, which, error) from error
    try:
        return from_record(record), sequence
    except Corrupt as error:
        if not is_sealed(line):
            raise _no_event(path, which, error) from error
        by = _written_by(path, line)  # and not damaged, by its checksum
        raise TooNew(
            f"{which} of {path} is of another version of elastix{by and f', {by}'}: {error} "
            "Nothing was changed. Use that version, or a later one, to read it and go on with it."
        ) from error


def _no_event(path: Path, which: str, error: Exception) -> Corrupt:
    return Corrupt(
        f"{which} of {path} is no event: {str(error).rstrip('.')}. Nothing was changed. Restore "
        "the file from a backup."
    )


def _written_by(path: Path, upto: bytes) -> str:
    """The version of elastix that whoever wrote a line said to have; "" if it is not known."""
    version = ""
    with suppress(StoreError, ValueError, TypeError, AttributeError):
        for line in _lines(path):
            if _kind(line).endswith("Started") and b'"versions":' in line:
                version = str(json.loads(line)["versions"].get("elastix", ""))
            if line == upto:
                break
    return version


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _checksum_at(path: Path, place: int) -> int:
    """Of the file up to a place where a line ends."""
    with path.open("rb") as file:
        file.seek(max(0, place - SEAL))
        return checksum(file.read(min(place, SEAL)))


def _check_torn(path: Path, place: int, before: int) -> None:
    """What is behind the last line break, and is to be cut off, must be no whole line."""
    with path.open("rb") as file:
        file.seek(place)
        list(LineChecker(path, before, number=None).lines(file.read()))


def _whole_bytes(path: Path) -> int:
    """Length of the file up to its last line break."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
