"""What the controller tells a worker, and how a blocked training thread hears of it at once.

The control thread publishes; the training thread waits for "what I wait for is done, OR the
group has changed". One condition serves both, so neither polls.
"""

import threading
import time
from collections.abc import Callable

from elastix.comm.door import Address
from elastix.comm.membership import Membership


class News:
    """Thread-safe mailbox of memberships. Any thread may call any method.

    Attributes:
        members: members of every generation heard of, by generation.
        heard_at: when it was heard of first, in seconds of time.monotonic.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent = Membership(0, ())
        self._proposed = Membership(0, ())
        self._dismissed: Exception | None = None
        self._invitation: tuple[Address, ...] = ()
        self._on_proposal: Callable[[Membership], None] | None = None
        self._on_urgent: Callable[[], None] | None = None
        self.members: dict[int, tuple[int, ...]] = {}
        self.heard_at: dict[int, float] = {}

    @property
    def urgent(self) -> Membership:
        """The newest membership that must be entered at once."""
        return self._urgent

    @property
    def proposed(self) -> Membership:
        """The newest proposal; to be entered at an agreed boundary if nothing urgent came after."""
        return self._proposed

    def on_proposal(self, listener: Callable[[Membership], None]) -> None:
        """Call `listener` with each new proposal, in the thread that publishes it."""
        self._on_proposal = listener

    def on_urgent(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each membership to enter at once, in the thread that publishes."""
        self._on_urgent = listener

    def publish(self, membership: Membership) -> None:
        """Announce a membership. Old news, arriving late, changes nothing."""
        fresh = membership.generation > max(self._urgent.generation, self._proposed.generation)
        if fresh and not membership.urgent and self._on_proposal is not None:
            self._on_proposal(membership)
        with self._changed:
            self.members[membership.generation] = membership.members
            self.heard_at.setdefault(membership.generation, time.monotonic())
            if membership.urgent and membership.generation > self._urgent.generation:
                self._urgent = membership
            if not membership.urgent and membership.generation > self._proposed.generation:
                self._proposed = membership
            self._changed.notify_all()
        if fresh and membership.urgent and self._on_urgent is not None:
            self._on_urgent()

    def invite(self, donors: tuple[Address, ...]) -> None:
        """Catch up from one of these peers, the first of them if it is there."""
        with self._changed:
            self._invitation = donors
            self._changed.notify_all()

    @property
    def invitation(self) -> tuple[Address, ...]:
        """Peers that a joiner may catch up from, in order; empty if it was not invited."""
        return self._invitation

    @property
    def dismissed(self) -> Exception | None:
        """Why workers that wait for others need wait no longer; None while they should."""
        return self._dismissed

    def dismiss(self, reason: Exception) -> None:
        """Nobody else will come."""
        with self._changed:
            self._dismissed = reason
            self._changed.notify_all()

    def notify(self) -> None:
        """Make waiting threads look again at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Block until `until()` holds; it is looked at after every notification."""
        with self._changed:
            self._changed.wait_for(until)
