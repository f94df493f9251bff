"""The run's journal: events as JSON lines in an append-only file. The truth that others read."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from elastix.errors import Corrupt, NotFound
from elastix.events import Event, from_record, to_record


class Journal:
    """Appends events to a file. A line is handed to the system before `append` returns.

    A half-written last line (the writer was killed) is cut off when the journal is opened again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")
        whole = _whole_bytes(path)
        if whole < self._file.tell():
            self._file.truncate(whole)

    def append(self, event: Event, serial: int | None = None) -> None:
        """Add one event; `serial` numbers those that several workers may send."""
        record = to_record(event) if serial is None else {**to_record(event), "serial": serial}
        line = json.dumps(record, separators=(",", ":")) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        """Make it durable and let go of the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read(path: Path) -> Iterator[Event]:
    """The events of a journal, in order; works while it is being written.

    Raises:
        NotFound: there is none.
        Corrupt: a line that is no event, with its number. A torn last line is not one.
    """
    for event, _ in read_numbered(path):
        yield event


def read_numbered(path: Path) -> Iterator[tuple[Event, int | None]]:
    """As `read`, each event with its serial, if it has one."""
    if not path.is_file():
        raise NotFound(f"there is no journal at {path}.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse(line, f"line {number} of {path}")


class Tail:
    """Reads a journal as it grows; there may be none yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def news(self) -> list[Event]:
        """The events since the last call.

        Raises:
            Corrupt: a line that is no event.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                lines = file.read()
        except FileNotFoundError:
            return []
        whole = lines[: lines.rfind(b"\n") + 1]
        self._place += len(whole)
        return [_parse(line, f"a line of {self._path}")[0] for line in whole.splitlines()]


def _parse(line: bytes, place: str) -> tuple[Event, int | None]:
    try:
        record = json.loads(line)
        serial = record.pop("serial", None) if isinstance(record, dict) else None
        return from_record(record), serial
    except (json.JSONDecodeError, UnicodeDecodeError, Corrupt) as error:
        raise Corrupt(f"{place} is no event: {error}") from error


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
