"""The inbox of a training thread, and how a blocked one hears at once of what arrives there.

The control thread publishes; the training thread waits for "what I wait for is done, OR the
group has changed". One condition serves both, so neither polls.
"""

import threading
import time
from collections.abc import Callable

from elastix.comm.network.door import Address
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.membership import Membership


class ThreadSafeInbox(Inbox):
    """Thread-safe. Any thread may call any method.

    Attributes:
        heard_at: when a generation was heard of first, in seconds of time.monotonic.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._on_proposal: Callable[[Membership], None] | None = None
        self._on_urgent: Callable[[], None] | None = None
        self.heard_at: dict[int, float] = {}

    def on_proposal(self, listener: Callable[[Membership], None]) -> None:
        """Call `listener` with each new proposal, in the thread that publishes it."""
        self._on_proposal = listener

    def on_urgent(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each membership to enter at once, in the thread that publishes."""
        self._on_urgent = listener

    def publish(self, membership: Membership) -> None:
        """See Inbox."""
        fresh = self.fresh(membership)
        if fresh and not membership.urgent and self._on_proposal is not None:
            self._on_proposal(membership)
        with self._changed:
            self.heard_at.setdefault(membership.generation, time.monotonic())
            before = self.urgent
            super().publish(membership)
            urgent = self.urgent is not before  # also if a later proposal came first
            self._changed.notify_all()
        if urgent and self._on_urgent is not None:
            self._on_urgent()

    def invite(self, donors: tuple[Address, ...], *, shadow: bool = False) -> None:
        """See Inbox."""
        with self._changed:
            super().invite(donors, shadow=shadow)
            self._changed.notify_all()

    def dismiss(self, reason: Exception) -> None:
        """See Inbox."""
        with self._changed:
            super().dismiss(reason)
            self._changed.notify_all()

    def store_soon(self) -> None:
        """See Inbox."""
        with self._changed:
            super().store_soon()
            self._changed.notify_all()

    def notify(self) -> None:
        """Make waiting threads look again at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def learn(self, generation: int, members: tuple[int, ...]) -> None:
        """See Inbox."""
        with self._changed:
            super().learn(generation, members)
            self.heard_at.setdefault(generation, time.monotonic())

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `until()` holds, or so long; it is looked at after every notification."""
        with self._changed:
            self._changed.wait_for(until, timeout_s)
