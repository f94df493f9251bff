"""The lines within a crew: its followers' to their speaker. Words go as JSON, one a line.

The speaker has a Door, each follower enters it. A line that breaks, says what is no word, or is not
read any more says one thing: a process of the worker is lost, and so is the worker.

Not here: what is said, and when (protocol.crew); who may come in (door).
"""

import base64
import json
import socket
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import torch

from elastix.comm.network.door import CREW, Address, Door, enter, hang_up
from elastix.comm.protocol.crew import (
    Contribute,
    Crew,
    Go,
    Going,
    Gone,
    Held,
    Meeting,
    Prepared,
    Release,
    StoreHere,
    TakeOver,
    There,
    Word,
)
from elastix.comm.protocol.follower import Follower
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.standing import Standing
from elastix.state import raw_bytes

MOST_BYTES = 1 << 30
"""Of a word. It holds the ids of all workers, or the payload of a round, in which an exact
evaluation has a row for each batch."""

_SEND_S = 10
"""Whoever does not read for so long is as good as lost."""

_WORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Meeting, Going, Contribute, TakeOver, Gone, Go, Release, StoreHere),
        *(Prepared, Held, There, Standing),
    )
}
_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float64, torch.float32)}


def encoded(word: Word) -> bytes:
    """One line."""
    fields: dict[str, Any] = dict(vars(word))
    if isinstance(word, Gone):
        fields = {"operation": word.operation, **vars(word.outcome)}
        result = word.outcome.result.detach().cpu().contiguous()
        fields["result"] = {
            "dtype": str(result.dtype),
            "shape": list(result.shape),
            "bytes": base64.b64encode(raw_bytes(result).numpy().tobytes()).decode(),
        }
    return json.dumps({"word": type(word).__name__, **fields}).encode() + b"\n"


def decoded(line: bytes) -> Word:
    """What a line says.

    Raises:
        ValueError: it is no word.
    """
    try:
        fields = json.loads(line)
        kind = _WORDS[fields.pop("word")]
        if kind is Gone:
            operation = int(fields.pop("operation"))
            fields["result"] = _tensor(**fields["result"])
            return Gone(operation, OperationOutcome(**_with_tuples(fields)))
        return cast("Word", kind(**_with_tuples(fields)))
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"no word: {line[:100]!r}") from error


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def _tensor(dtype: str, shape: list[int], bytes: str) -> torch.Tensor:  # noqa: A002 - a field
    raw = bytearray(base64.b64decode(bytes, validate=True))
    flat = torch.frombuffer(raw, dtype=_DTYPES[dtype]) if raw else torch.empty(0, device="cpu")
    return flat.to(_DTYPES[dtype]).reshape(shape)


class SpeakersLines:
    """The speaker's end of all its lines.

    Args:
        host: the address to listen at.
        secret: of the run.
        crew: hears what is said.
        notify: called, from any thread, after something was.
        on_broken: called, from any thread, when a line breaks.

    Attributes:
        address: where followers enter.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        crew: Crew,
        notify: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._crew = crew
        self._notify = notify
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._lines: dict[int, socket.socket] = {}
        self._closed = False
        self._door = Door(host, CREW, secret, self._welcome)
        self.address: Address = self._door.address

    def say(self, word: Word) -> None:
        """Tell all followers; whoever cannot be told is lost."""
        line = encoded(word)
        with self._lock:
            lines = list(self._lines.values())
        for connection in lines:
            try:
                connection.sendall(line)
            except OSError:
                self._break()

    def close(self) -> None:
        """Hang up on all."""
        self._closed = True
        self._door.close()
        with self._lock:
            for line in self._lines.values():
                hang_up(line, keep=True)

    def _welcome(self, connection: socket.socket, place: int) -> None:
        with self._lock:
            fits = 1 <= place < self._crew.size and place not in self._lines and not self._closed
            if fits:
                self._lines[place] = connection
        if not fits:
            hang_up(connection)
            return
        _settle(connection)
        with connection, connection.makefile("rb") as stream:
            for word in _words(stream):
                self._crew.hear(place, word)  # type: ignore[arg-type]  # what followers say
                self._notify()
        self._break()

    def _break(self) -> None:
        if not self._closed:
            self._crew.broken = True
            self._on_broken()
            self._notify()


class FollowersLine:
    """A follower's end.

    Args:
        address: where the speaker listens.
        secret: of the run.
        place: this process's.
        follower: hears what is said.
        notify, on_broken: see SpeakersLines.

    Raises:
        OSError: the speaker cannot be reached.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        place: int,
        follower: Follower,
        notify: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._follower = follower
        self._notify = notify
        self._on_broken = on_broken
        self._closed = False
        self._lock = threading.Lock()
        self._connection = enter(address, CREW, secret, place)
        _settle(self._connection)
        threading.Thread(target=self._hear, name="crew", daemon=True).start()

    def say(self, word: Word) -> None:
        """Tell the speaker; if it is lost, this is heard of otherwise. Any thread."""
        try:
            with self._lock:
                self._connection.sendall(encoded(word))
        except OSError:
            self._break()

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        hang_up(self._connection, keep=True)

    def _hear(self) -> None:
        with self._connection, self._connection.makefile("rb") as stream:
            for word in _words(stream):
                self._follower.hear(word)  # type: ignore[arg-type]  # what speakers say
                self._notify()
        self._break()

    def _break(self) -> None:
        if not self._closed:
            self._follower.broken = True
            self._on_broken()
            self._notify()


def _words(stream: BinaryIO) -> "list[Word] | Any":  # noqa: ANN401 - a generator of them
    """Until the line ends, or something else than a word comes."""
    while True:
        try:
            line = stream.readline(MOST_BYTES + 1)
            if not line.endswith(b"\n"):
                return
            yield decoded(line)
        except (OSError, ValueError):
            return


def _settle(connection: socket.socket) -> None:
    """Reading may take for ever, writing may not."""
    seconds = _SEND_S.to_bytes(8, "little") + bytes(8)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
