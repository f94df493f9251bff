"""Events that every worker generates alike, so that none is lost with the one that sends them.

They are numbered; rank 0 sends them to the journal, which takes each number once. The others keep
theirs until the journal has confirmed them, and whoever becomes rank 0 sends what is left.
"""

import threading
from collections import deque
from collections.abc import Callable

from elastix.events import Event

Send = Callable[[Event, int], None]


class ReplicatedEvents:
    """One worker's. Used in the training thread, but for `send_again`.

    Args:
        send: an event and its number, to the journal. Never blocks for long.
        first: whether this worker is the first of its group, as far as it knows at that moment.

    Attributes:
        serial: number of the next one; part of the State.
    """

    def __init__(self, send: Send, first: Callable[[], bool]) -> None:
        self.sequence = 0
        self._send = send
        self._first = first
        self._unconfirmed: deque[tuple[int, Event]] = deque()
        self._confirmed = -1
        self._sending = threading.Lock()

    def emit(self, event: Event) -> None:
        """The next one; it is sent if this worker is the first of its group."""
        with self._sending:
            sequence = self.sequence
            self.sequence += 1
            self._unconfirmed.append((sequence, event))
            if self._first():
                self._send(event, sequence)

    def confirm(self, sequence: int) -> None:
        """The journal has all up to this number."""
        with self._sending:
            self._confirmed = max(self._confirmed, sequence)
            while self._unconfirmed and self._unconfirmed[0][0] <= self._confirmed:
                self._unconfirmed.popleft()

    def send_again(self) -> None:
        """The group is another: the first before may have died before it had told everything.

        Any thread may call it. The training thread may be waiting for just these events, as the
        State that it wants stored is not until the journal has them.
        """
        with self._sending:
            if self._first():
                for sequence, event in self._unconfirmed:
                    self._send(event, sequence)
