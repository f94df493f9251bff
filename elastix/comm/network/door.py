"""A listening socket that only workers of this run get through.

Whoever connects proves that it knows the run's secret, and so does whoever listens: each by a keyed
hash over a number that the other has just drawn, so that a greeting that was overheard is of no use
again. A greeting has a fixed length and must be over within seconds. Until then a caller is nobody:
it is told nothing but the drawn number, holds up nobody, and when too many wait, the one that has
waited longest is dropped.

What passes through an open door is neither encrypted nor signed: see DESIGN.

Source: mutual challenge and response with HMAC (RFC 2104), as in ISO/IEC 9798-4.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

Address = tuple[str, int]
"""Host and port."""

CATCH_UP, MEETING, CREW = "catch-up", "meeting", "crew"
"""What doors are for. A proof that was made for one is worth nothing at another."""

SECRET_BYTES = 32
"""How long a run's secret is."""

_GREETING_S = 5.0
_AT_ONCE = 64
"""Callers that are being greeted; those of a run need a few milliseconds."""

_NUMBER_BYTES = 32
_PROOF_BYTES = 32
_NAME = struct.Struct("!q")
_NOBODY = -1
_PAUSE_S = 0.1
_GIVE_UP = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    # What was sent and never acknowledged; the kernel alone would try for a quarter of an hour. Not
    # less: whoever compiles its first step may not read for minutes.
    "TCP_USER_TIMEOUT": 300_000,
}


def draw_secret() -> bytes:
    """For a run that begins. Whoever has it is taken for one of its workers."""
    return secrets.token_bytes(SECRET_BYTES)


class Refused(ConnectionError):
    """The other end does not know the secret, or says that we do not."""


class Door:
    """Listens, and hands over those who belong to the run.

    Args:
        host: the address to listen at, and under which others reach this process.
        purpose: CATCH_UP, MEETING or CREW.
        secret: of the run.
        welcome: called with each connection, blocking and without a time-out, and the id of the
            worker at its other end; in a thread of its own, which it may keep.

    Attributes:
        address: where to connect.
    """

    def __init__(
        self,
        host: str,
        purpose: str,
        secret: bytes,
        welcome: Callable[[socket.socket, int], None],
    ) -> None:
        self._purpose = purpose
        self._secret = _checked(secret)
        self._welcome = welcome
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: Address = (host, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name=purpose, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more. Those who are in stay."""
        self._closed.set()
        hang_up(self._listener)
        with self._lock:
            for stranger in self._strangers:
                hang_up(stranger, keep=True)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the caller has gone already, or this process has too many files open
                self._closed.wait(_PAUSE_S)
                continue
            with self._lock:
                if len(self._strangers) >= _AT_ONCE:
                    hang_up(self._strangers.pop(0), keep=True)
                self._strangers.append(connection)
            name = f"{self._purpose}-greeting"
            thread = threading.Thread(
                target=self._greet, args=(connection,), name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give: this caller may try again
                self._turn_away(connection)
                self._closed.wait(_PAUSE_S)

    def _turn_away(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)
        hang_up(connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            caller = _admit(connection, self._purpose, self._secret)
        except (OSError, EOFError):
            caller = _NOBODY
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)
            else:
                caller = _NOBODY  # it was dropped
        if caller == _NOBODY or self._closed.is_set():
            hang_up(connection)
        else:
            self._welcome(connection, caller)


def enter(address: Address, purpose: str, secret: bytes, me: int) -> socket.socket:
    """Connect to a Door of this run as worker `me`; blocks for some seconds at most.

    Raises:
        OSError: nobody is there, or does not answer in time; Refused if it is not one of the run.
    """
    connection = socket.create_connection(address, _GREETING_S)
    try:
        _apply(connection, purpose, _checked(secret), me)
    except EOFError as error:
        connection.close()
        raise Refused(f"{address[0]}:{address[1]} hung up on worker {me}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def answers(address: Address, purpose: str, secret: bytes) -> bool:
    """Whether a worker of this run answers at its door; blocks for some seconds at most."""
    try:
        hang_up(enter(address, purpose, secret, _NOBODY))
    except OSError:
        return False
    return True


def unreachable(doors: Mapping[int, Address], purpose: str, secret: bytes) -> frozenset[int]:
    """Of those workers, the ones that do not answer at their doors; asks all at once."""
    with ThreadPoolExecutor(max(1, min(len(doors), _AT_ONCE))) as pool:
        found = pool.map(lambda door: answers(door, purpose, secret), doors.values())
        return frozenset(worker for worker, there in zip(doors, found, strict=True) if not there)


def hang_up(connection: socket.socket, keep: bool = False) -> None:
    """End a connection, also for a thread that waits for it; `keep` its number until it is gone."""
    with contextlib.suppress(OSError):  # not connected any more
        connection.shutdown(socket.SHUT_RDWR)
    if not keep:
        connection.close()


def _admit(connection: socket.socket, purpose: str, secret: bytes) -> int:
    """The listening end of a greeting; the caller's id."""
    deadline = time.monotonic() + _GREETING_S
    ours = secrets.token_bytes(_NUMBER_BYTES)
    connection.settimeout(_GREETING_S)
    connection.sendall(ours)
    theirs = _read(connection, _NUMBER_BYTES, deadline)
    name = _read(connection, _NAME.size, deadline)
    proof = _read(connection, _PROOF_BYTES, deadline)
    said = ours + theirs + name
    if not hmac.compare_digest(proof, _proof(secret, purpose, b"caller", said)):
        raise Refused("a stranger")
    connection.sendall(_proof(secret, purpose, b"host", said))
    _settle(connection)
    return int(_NAME.unpack(name)[0])


def _apply(connection: socket.socket, purpose: str, secret: bytes, me: int) -> None:
    """The calling end of a greeting."""
    deadline = time.monotonic() + _GREETING_S
    theirs = _read(connection, _NUMBER_BYTES, deadline)
    ours, name = secrets.token_bytes(_NUMBER_BYTES), _NAME.pack(me)
    said = theirs + ours + name
    connection.sendall(ours + name + _proof(secret, purpose, b"caller", said))
    proof = _read(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, purpose, b"host", said)):
        raise Refused("whoever listens there is not of this run")
    _settle(connection)


def _proof(secret: bytes, purpose: str, side: bytes, said: bytes) -> bytes:
    """Of whoever knows the secret; `said` has a fixed length."""
    return hmac.digest(secret, b"|".join((b"elastix", purpose.encode(), side, said)), "sha256")


def _checked(secret: bytes) -> bytes:
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"a run's secret has {SECRET_BYTES} bytes, not {len(secret)}")
    return secret


def _settle(connection: socket.socket) -> None:
    """For as long as both want.

    A host that is gone without a word is noticed within a minute, or within five by whoever is
    sending to it.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _GIVE_UP.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes, or EOFError; TimeoutError at the deadline, however slowly they trickle in."""
    read = b""
    while len(read) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(size - len(read))
        if not piece:
            raise EOFError("the other end hung up")
        read += piece
    return read
