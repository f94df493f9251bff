"""What a joiner is told by a live peer while training goes on: a State, then each operation.

A holder of the State runs a CatchUpSender: joiners connect to it, are given the State as it is at
the holder's next boundary, and then how each operation of the group ended, a step's gradients and
buffers included. A joiner runs a CatchUpReceiver, which takes all that in behind its train
function's back. The group need not know: a joiner that dies or is slow costs its donor a
connection.

Both sides bound what they hold: a joiner that falls too far behind is dropped, and starts over.
A shadow acknowledges what it has received, since nothing may be told to the journal before that.
One that does not for long is dropped.
Not here: what is told (catch_up_messages), who is let in and how (door), what the joiner does with
it (joiner), and when it comes in (membership).

Wire: a message is a line of JSON and, if it says so, bytes of tensors after it.
"""

import contextlib
import json
import math
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from elastix.comm.network import catch_up_wire as wire
from elastix.comm.network import transfer
from elastix.comm.network.door import CATCH_UP, Address, Door, enter, hang_up
from elastix.comm.protocol.catch_up_messages import (
    Digest,
    DigestMark,
    Entering,
    Given,
    Told,
    Watched,
)
from elastix.errors import StateError
from elastix.state import State, raw_bytes

QUEUE_BYTES = 1 << 30
"""How much of what is not sent, or not used, either side keeps."""

QUEUE_STEPS = 2
"""A donor keeps as many messages in any case: a step's gradients alone may be larger."""


PATIENCE_S = 10.0
"""A shadow that has something to acknowledge and does not for so long is dropped."""

_DIGEST, _RECEIVED, _ABLE, _UNABLE = b"d", b"a", b"s", b"u"
"""What a joiner says: it wants a digest; it has the State, or one more operation; a shadow, whether
it can store States."""


@dataclass
class _Message:
    head: dict[str, Any]
    parts: Sequence[torch.Tensor] = ()
    later: Callable[[], "_Message"] | None = None  # made by the sender, if it takes long

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class _Subscriber:
    """One joiner, as its donor sees it. The training thread appends, its own threads send and hear.

    Args:
        connection: to it.
        worker: its id.
        on_news: called when `holds` changes; by any thread.

    Attributes:
        fed: it is given the State, and told what follows.
        steps: told with their gradients.
        wants_digest: it has asked for one.
        stores: it is a shadow that can store States.
        holds: number of the operation before which it has all; infinite for who is no shadow.
    """

    def __init__(self, connection: socket.socket, worker: int, on_news: Callable[[], None]) -> None:
        self.worker = worker
        self.fed = False
        self.steps = 0
        self.wants_digest = False
        self.stores = False
        self.holds = math.inf
        self._told = 0  # number of the next operation
        self._on_news = on_news
        self._connection = connection
        self._changed = threading.Condition()
        self._queue: deque[_Message] = deque()
        self._queued_bytes = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self, operation: int) -> None:
        """From now on it is told; the next operation has that number."""
        self.fed = True
        self._told = self._given = operation
        ready = select.poll()  # of a connection that is open: whoever sends may hang up at once
        ready.register(self._connection, select.POLLIN)
        threading.Thread(target=self._send, name=f"feed-{self.worker}", daemon=True).start()
        name = f"heed-{self.worker}"
        threading.Thread(target=self._hear, args=(ready,), name=name, daemon=True).start()

    def tell(self, message: _Message) -> None:
        """How an operation ended."""
        self.steps += len(message.parts) > 1
        self._told += 1
        self.append(message)

    def append(self, message: _Message) -> None:
        with self._changed:
            self._queued_bytes += message.nbytes
            self._queue.append(message)
            self._changed.notify()
            large = sum(1 for waiting in self._queue if waiting.parts)
        if self._queued_bytes > QUEUE_BYTES and large > QUEUE_STEPS:
            self.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        hang_up(self._connection, keep=True)

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._closed)
                    if self._closed:
                        break
                    message = self._queue.popleft()
                made = message.later() if message.later is not None else message
                self._connection.sendall(json.dumps(made.head).encode() + b"\n")
                for part in made.parts:
                    if part.numel():
                        self._connection.sendall(part.numpy().data)
                with self._changed:
                    self._queued_bytes -= message.nbytes
        except (OSError, StateError):
            pass  # the joiner is gone, or was too slow; or the State could not be copied
        finally:  # whatever else happens here, the joiner must not wait for it
            self._closed = True
            hang_up(self._connection)
            self._on_news()

    def _hear(self, ready: select.poll) -> None:
        """What it says: each byte is a message. One that says nothing for too long is dropped."""
        try:
            while not self._closed:
                if not ready.poll(1000 * PATIENCE_S):
                    if self._told > self.holds:
                        break
                    continue
                said = self._connection.recv(1)
                if not said:
                    break
                if said == _DIGEST:
                    self.wants_digest = True
                elif said in (_ABLE, _UNABLE):
                    self.stores = said == _ABLE
                elif said == _RECEIVED:
                    self.holds = self._given if math.isinf(self.holds) else self.holds + 1
                    self._on_news()
        except OSError:
            pass  # it is gone
        finally:
            self.close()
            self._on_news()


class CatchUpSender:
    """A holder's side. The training thread calls; joiners are accepted by a thread of its own.

    Args:
        host: under which this process is reached by joiners.
        layout: see GroupDriver.first_entry; joiners compare it with their own.
        secret: of the run; see door.
        on_news: called when `held` changes; by any thread.

    Attributes:
        address: where joiners connect.
    """

    def __init__(
        self,
        host: str,
        layout: Sequence[str],
        secret: bytes,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout = list(layout)
        self._on_news = on_news
        self._lock = threading.Lock()
        self._subscribers: list[_Subscriber] = []
        self._door = Door(host, CATCH_UP, secret, self._subscribe)
        self.address: Address = self._door.address

    @property
    def watched(self) -> bool:
        """Whether anybody is told how operations end."""
        return any(subscriber.fed for subscriber in self._subscribers)

    @property
    def held(self) -> float:
        """Number of the operation before which all shadows have received all; infinite for none."""
        holds = [subscriber.holds for subscriber in self._subscribers if not subscriber.closed]
        return min(holds, default=math.inf)

    @property
    def shadowed(self) -> bool:
        """Whether a shadow follows that can store States."""
        return any(s.stores and not s.closed for s in self._subscribers)

    @property
    def has_shadow(self) -> bool:
        """Whether a shadow follows that has received the State."""
        return not math.isinf(self.held)

    def boundary(
        self,
        copy: Callable[[], Callable[[], State]],
        operation: int,
        digest: Callable[[State], str],
    ) -> None:
        """Give the State to whoever has come since the last boundary, or its digest.

        Args:
            copy: begins to copy the State as it is; what it returns waits for the copy.
            operation: the next one.
            digest: of such a copy.
        """
        if not self._subscribers:
            return
        with self._lock:
            self._subscribers = [s for s in self._subscribers if not s.closed]
        new = [s for s in self._subscribers if not s.fed]
        # A digest means something when the joiner has done a step of its own.
        asking = [s for s in self._subscribers if s.steps and s.wants_digest]
        if not new and not asking:
            return
        state = copy()
        for subscriber in new:
            head = {"say": "state", "operation": operation, "layout": self._layout}
            subscriber.append(_Message({}, later=lambda h=head: _state_message(h, state())))  # type: ignore[misc]
            subscriber.start(operation)
        for subscriber in asking:
            subscriber.wants_digest = False
            subscriber.append(_Message({"say": "mark"}))
            subscriber.append(
                _Message({}, later=lambda: _Message({"say": "digest", "digest": digest(state())}))
            )

    def tell(self, watched: Watched) -> None:
        """An operation is over."""
        head, tensors = wire.head_of(watched)
        message = _Message(head, [raw_bytes(tensor) for tensor in tensors])
        for subscriber in self._subscribers:
            if subscriber.fed:
                subscriber.tell(message)

    def entering(self, generation: int, members: Sequence[int]) -> None:
        """This worker enters a generation at a boundary; joiners among its members do so too."""
        for subscriber in self._subscribers:
            if subscriber.worker in members:
                subscriber.append(_Message({"say": "enter", "generation": generation}))

    def close(self) -> None:
        """Drop everybody."""
        self._door.close()
        with self._lock:
            for subscriber in self._subscribers:
                subscriber.close()

    def _subscribe(self, connection: socket.socket, worker: int) -> None:
        with self._lock:
            self._subscribers = [*self._subscribers, _Subscriber(connection, worker, self._on_news)]


def _state_message(head: dict[str, Any], state: State) -> _Message:
    body, tensors = transfer.describe(state)
    return _Message({**head, "body": body}, [raw_bytes(tensor) for tensor in tensors])


class CatchUpReceiver:
    """A joiner's side. A thread of its own takes in what the donor tells.

    Args:
        donor: address of its CatchUpSender.
        secret: of the run.
        me: this worker's id.
        notify: called, by that thread, whenever there is something new.
        shadow: acknowledge what is received.

    Attributes:
        given: the State; None until it is there.
        failed: the connection has ended; what was told before stays.
    """

    def __init__(
        self,
        donor: Address,
        secret: bytes,
        me: int,
        notify: Callable[[], None],
        *,
        shadow: bool = False,
    ) -> None:
        self.given: Given | None = None
        self.failed = False
        self._notify = notify
        self._changed = threading.Condition()
        self._told: deque[tuple[Told, int]] = deque()
        self._held_bytes = 0
        self._donor = donor
        self._secret = secret
        self._me = me
        self._shadow = shadow
        self._connection: socket.socket | None = None
        threading.Thread(target=self._receive, name="watch", daemon=True).start()

    @property
    def head(self) -> Told | None:
        """What comes next; None if nothing was told that is not used."""
        return self._told[0][0] if self._told else None

    @property
    def backlog(self) -> int:
        """How much was told and is not used."""
        return len(self._told)

    def pop(self) -> Told:
        """Use what comes next."""
        with self._changed:
            told, size = self._told.popleft()
            self._held_bytes -= size
            self._changed.notify()
        return told

    def ask_digest(self) -> None:
        """Ask the donor for the digest of its State at its next boundary."""
        self._say(_DIGEST)

    def say_able(self, able: bool) -> None:
        """Tell the donor whether this shadow can store States."""
        self._say(_ABLE if able else _UNABLE)

    def close(self) -> None:
        """No more of it."""
        with self._changed:
            self.failed = True
            self._changed.notify()
        if self._connection is not None:
            hang_up(self._connection, keep=True)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # `failed` is about to say so
            if self._connection is not None:
                self._connection.sendall(what)

    def _receive(self) -> None:
        try:
            with enter(self._donor, CATCH_UP, self._secret, self._me) as connection:
                self._connection = connection
                with connection.makefile("rb") as stream:
                    while not self.failed and (line := stream.readline()):
                        self._take(json.loads(line), stream)
        except (OSError, EOFError, ValueError):
            pass  # the donor is gone, perhaps in the middle of a message
        finally:  # no memory for what it tells, for example: the training thread must not wait
            self.failed = True
            self._notify()

    def _take(self, head: dict[str, Any], stream: BinaryIO) -> None:
        say = head["say"]
        if say == "state":
            tensors, parts = transfer.rooms(head["body"])
            for part in parts:
                wire.read_into(stream, part)
            state = transfer.assemble(head["body"], tensors)
            self.given = Given(head["operation"], head["layout"], state)
        elif say == "operation":
            self._append(*wire.read_watched(head, stream))
        elif say == "enter":
            self._append(Entering(head["generation"]), 0)
        elif say == "mark":
            self._append(DigestMark(), 0)
        else:
            self._append(Digest(head["digest"]), 0)
        if self._shadow and say in {"state", "operation"}:
            self._say(_RECEIVED)
        self._notify()

    def _append(self, told: Told, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held_bytes <= QUEUE_BYTES or self.failed)
            self._told.append((told, size))
            self._held_bytes += size
