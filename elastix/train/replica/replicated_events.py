"""Events that every worker generates alike, so that none is lost with the one that sends them.

They are numbered; rank 0 sends them to the journal, which takes each number once. The others keep
theirs until the journal has confirmed them, and whoever becomes rank 0, or ends the run with an
error, sends what is left. Who is given a State is given with it what is not confirmed: all those
that have made it may be lost before they have told it. What shadows have not received yet is held
back: if all workers were lost, nobody would have the State that the journal told of.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile

from elastix.events import Event

Send = Callable[[Event, int], None]
Untold = tuple[int, int, Event]
"""An event with its number, and that of the operation after those that have led to it."""


class ReplicatedEvents:
    """One worker's. Used in the training thread, but for `send_again`.

    Args:
        send: an event and its number, to the journal. Never blocks for long.
        first: whether this worker is the first of its group, as far as it knows at that moment.
        operation: number of the next one; what was before it has led to the event.
        held: number of the operation before which all shadows have received all.

    Attributes:
        sequence: number of the next one; part of the State.
    """

    def __init__(
        self,
        send: Send,
        first: Callable[[], bool],
        operation: Callable[[], int],
        held: Callable[[], float],
    ) -> None:
        self.sequence = 0
        self._send = send
        self._first = first
        self._operation = operation
        self._held = held
        self._unconfirmed: deque[Untold] = deque()
        self._sent = -1
        self._confirmed = -1
        self._sending = threading.Lock()

    @property
    def since(self) -> int:
        """This worker has all from that number on."""
        return self._unconfirmed[0][0] if self._unconfirmed else self.sequence

    def emit(self, event: Event) -> None:
        """The next one; it is sent if this worker is the first of its group."""
        with self._sending:
            self._unconfirmed.append((self.sequence, self._operation(), event))
            self.sequence += 1
            self._send_due()

    def catch_up(self, sequence: int) -> None:
        """All have agreed on a step: what they tell of it has the same number.

        Whoever was the first may have told something alone (`if ctx.rank == 0: ctx.report(..)`).
        """
        self.sequence = max(self.sequence, sequence)

    def untold(self, before: int) -> tuple[tuple[int, Event], ...]:
        """Those before that number which the journal may not have, with their numbers."""
        with self._sending:
            return tuple(
                (number, event) for number, _, event in self._unconfirmed if number < before
            )

    def hand_on(self) -> tuple[Untold, ...]:
        """What led to the State as it is, and the journal may not have: for who is given that."""
        with self._sending:
            return tuple(self._unconfirmed)

    def go_on(self, sequence: int, untold: Iterable[Untold]) -> None:
        """This worker was given a State: the number of its next event, and what was handed on.

        What it has of its own may end before that begins, and passes for all up to here no longer.
        """
        with self._sending:
            self.sequence, self._sent = sequence, -1
            self._unconfirmed = deque(one for one in untold if one[0] > self._confirmed)

    def send_held(self) -> None:
        """Shadows have received more, or are gone. Any thread may call it."""
        with self._sending:
            self._send_due()

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
            self._sent = -1
            self._send_due()

    def send_unconfirmed(self) -> None:
        """The run is about to end with this worker's error, and nothing is heard after that."""
        with self._sending:
            self._send_rest()

    def _send_due(self) -> None:
        if self._first():
            self._send_rest()

    def _send_rest(self) -> None:
        held = self._held()
        # From the end: a worker that makes no steps has nothing confirmed, and keeps them all.
        unsent = takewhile(lambda kept: kept[0] > self._sent, reversed(self._unconfirmed))
        for sequence, operation, event in reversed([*unsent]):
            if operation > held:
                return
            self._send(event, sequence)
            self._sent = sequence
