"""Where the members of a generation find each other: a key-value store behind a Door.

torch's own store listens on all interfaces, and answers and obeys whoever connects. Who can write
to it decides where gradients are sent. So a Rendezvous keeps the keys itself, for workers of the
run alone, and a MeetingStore is the store that torch is given.

Keys belong to one meeting, and are forgotten when all have left it.

Wire: a message is a number of fields, then each field's length and bytes.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from socket import socket
from typing import BinaryIO

from torch.distributed import Store  # type: ignore[attr-defined]

from elastix.comm.network.door import MEETING, Address, Door, enter, hang_up

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 20
"""Of a field. A name, or what a member says of itself, has some hundred."""

_PATIENCE_S = 2.0
"""How long an answer may take: then one asks again, or has left."""

_TIMEOUT = timedelta(seconds=30)


class _Waiting:
    """Somebody waits until so many keys are there."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.over = threading.Event()


class _Keys:
    """Keys and values of one meeting. Any thread."""

    def __init__(self) -> None:
        self.guests = 0
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[_Waiting]] = {}
        self._writers: set[int] = set()

    def obey(self, guest: int, request: Sequence[bytes]) -> list[bytes]:
        """The answer to a request; its first field says which.

        Raises:
            ValueError: there is no such request.
        """
        match request:
            case [b"await", *keys]:
                return self._await(keys)
            case [b"arrive", key, value]:
                with self._lock:
                    self._store(key, value)
                return []
            case [b"set", key, value]:
                with self._lock:
                    self._writers.add(guest)
                    self._store(key, value)
                return []
            case [b"add", key, amount]:
                with self._lock:
                    total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
                    self._store(key, total)
                return [total]
            case [b"swap", key, expected, wanted]:
                return [self._swap(key, expected, wanted)]
            case [b"delete", key]:
                with self._lock:
                    return [] if self._values.pop(key, None) is None else [key]
            case [b"check", *keys]:
                with self._lock:
                    return [key for key in keys if key in self._values]
            case [b"count"]:
                with self._lock:
                    return [b"%d" % len(self._values)]
            case [b"writers"]:
                with self._lock:
                    return [b"%d" % writer for writer in self._writers]
            case _:
                raise ValueError("no such request")

    def _await(self, keys: Sequence[bytes]) -> list[bytes]:
        """The values, as soon as all are there; nothing if they are not in time."""
        with self._lock:
            missing = [key for key in keys if key not in self._values]
            waiting = _Waiting(len(missing))
            for key in missing:
                self._waiting.setdefault(key, []).append(waiting)
        there = not missing or waiting.over.wait(_PATIENCE_S)
        with self._lock:
            for key in missing:
                others = [other for other in self._waiting.pop(key, []) if other is not waiting]
                if others:
                    self._waiting[key] = others
            return [self._values[key] for key in keys] if there else []

    def _swap(self, key: bytes, expected: bytes, wanted: bytes) -> bytes:
        """As in torch: set it if it is as expected, or absent and nothing is expected."""
        with self._lock:
            now = self._values.get(key)
            if now == expected or (now is None and not expected):
                self._store(key, wanted)
                return wanted
            return expected if now is None else now

    def _store(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, []):
            waiting.missing -= 1
            if not waiting.missing:
                waiting.over.set()


class Rendezvous:
    """Hosts the meetings of a run.

    Args:
        host: the address to listen at; no other is listened to.
        secret: of the run; see door.

    Attributes:
        address: what workers connect to.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[bytes, _Keys] = {}
        self._door = Door(host, MEETING, secret, self._serve)
        self.address: Address = self._door.address

    def close(self) -> None:
        """Nobody new can come to a meeting."""
        self._door.close()

    def _serve(self, connection: socket, guest: int) -> None:
        """One worker in one meeting, in a thread of its own until that hangs up."""
        with connection, connection.makefile("rb") as stream:
            try:
                (name,) = _receive(stream)
                keys = self._join(name)
            except (OSError, EOFError, ValueError):
                return
            try:
                while True:
                    _send(connection, keys.obey(guest, _receive(stream)))
            except (OSError, EOFError, ValueError):
                self._leave(name, keys)

    def _join(self, name: bytes) -> _Keys:
        with self._lock:
            keys = self._meetings.setdefault(name, _Keys())
            keys.guests += 1
            return keys

    def _leave(self, name: bytes, keys: _Keys) -> None:
        with self._lock:
            keys.guests -= 1
            if not keys.guests:
                self._meetings.pop(name, None)


class MeetingStore(Store):
    """One worker in one meeting: the store through which torch connects its members. Any thread.

    Args:
        address: of the Rendezvous.
        secret: of the run.
        me: this worker's id.
        name: of the meeting.

    Raises:
        OSError: the Rendezvous cannot be reached.
    """

    def __init__(self, address: Address, secret: bytes, me: int, name: str) -> None:
        super().__init__()
        self._name = name
        self._lock = threading.Lock()
        self._connection = enter(address, MEETING, secret, me)
        self._stream = self._connection.makefile("rb")
        _send(self._connection, [name.encode()])

    def close(self) -> None:
        """Leave. Whatever waits for an answer fails. Any thread, any number of times."""
        hang_up(self._connection, keep=True)

    def arrive(
        self, key: str, value: bytes, everybody: Sequence[str], gone: Callable[[], bool]
    ) -> list[bytes]:
        """Say that one is here, and wait for as long as it takes until all are.

        Returns:
            What each has said, in the order of `everybody`; nothing if `gone` says to give up.
        """
        self._ask(b"arrive", key.encode(), value)
        while not gone():
            found = self._ask(b"await", *(other.encode() for other in everybody))
            if found:
                return found
        return []

    def writers(self) -> frozenset[int]:
        """Workers that have got as far as to say how they are to be connected to."""
        return frozenset(int(writer) for writer in self._ask(b"writers"))

    # ------------------------------------------------------------------ what torch calls

    def set(self, key: str, value: str | bytes) -> None:
        """See torch's Store."""
        self._ask(b"set", key.encode(), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """See torch's Store."""
        return self._await([key], _TIMEOUT)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See torch's Store."""
        return self._await(keys, _TIMEOUT)

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:
        """See torch's Store."""
        self._await(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        """See torch's Store."""
        return int(self._ask(b"add", key.encode(), b"%d" % amount)[0])

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """See torch's Store."""
        sides = [side.encode() if isinstance(side, str) else side for side in (expected, wanted)]
        return self._ask(b"swap", key.encode(), *sides)[0]

    def delete_key(self, key: str) -> bool:
        """See torch's Store."""
        return bool(self._ask(b"delete", key.encode()))

    def check(self, keys: list[str]) -> bool:
        """See torch's Store."""
        return len(self._ask(b"check", *(key.encode() for key in keys))) == len(keys)

    def num_keys(self) -> int:
        """See torch's Store."""
        return int(self._ask(b"count")[0])

    def has_extended_api(self) -> bool:
        """Nothing is there that torch could do without."""
        return False

    def _await(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            found = self._ask(b"await", *(key.encode() for key in keys))
            if found or not keys:
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"nobody in meeting {self._name} has set {keys} within {timeout}"
                )

    def _ask(self, *request: bytes) -> list[bytes]:
        with self._lock:
            try:
                _send(self._connection, request)
                return _receive(self._stream)
            except (EOFError, ValueError, OSError) as error:  # ValueError: the stream is closed
                raise ConnectionError(f"meeting {self._name} was left: {error!r}") from error


def _send(connection: socket, fields: Sequence[bytes]) -> None:
    pieces = [_LENGTH.pack(len(fields))]
    for field in fields:
        pieces += [_LENGTH.pack(len(field)), field]
    connection.sendall(b"".join(pieces))


def _receive(stream: BinaryIO) -> list[bytes]:
    """EOFError if the other end has hung up, ValueError for a message that is too long."""
    return [_read(stream, _size(stream)) for _ in range(_size(stream))]


def _size(stream: BinaryIO) -> int:
    size = int(_LENGTH.unpack(_read(stream, _LENGTH.size))[0])
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return size


def _read(stream: BinaryIO, size: int) -> bytes:
    read = stream.read(size)
    if len(read) < size:
        raise EOFError
    return read
