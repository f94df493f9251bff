"""Events that every worker generates alike, so that none is lost with the one that sends them.

They are numbered; rank 0 sends them to the journal, which takes each number once. The others keep
theirs until the journal has confirmed them, and whoever becomes rank 0 sends what is left.
"""

from collections import deque
from collections.abc import Callable

from elastix.events import Event

Send = Callable[[Event, int], None]


class AlikeEvents:
    """One worker's. Used in the training thread.

    Args:
        send: an event and its number, to the journal.

    Attributes:
        serial: number of the next one; part of the State.
    """

    def __init__(self, send: Send) -> None:
        self.serial = 0
        self._send = send
        self._unconfirmed: deque[tuple[int, Event]] = deque()
        self._confirmed = -1

    def emit(self, event: Event, first: bool) -> None:
        """The next one; it is sent if this worker is the first of its group."""
        serial = self.serial
        self.serial += 1
        self._unconfirmed.append((serial, event))
        if first:
            self._send(event, serial)

    def confirm(self, serial: int) -> None:
        """The journal has all up to this number."""
        self._confirmed = max(self._confirmed, serial)
        while self._unconfirmed and self._unconfirmed[0][0] <= self._confirmed:
            self._unconfirmed.popleft()

    def send_again(self) -> None:
        """The first before this worker may have died before it had told the journal everything."""
        for serial, event in self._unconfirmed:
            self._send(event, serial)
