"""What the controller has told a member: memberships, donors, and that nobody will come. Pure.

And that all members are to go, so that somebody has to store the State.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastix.comm.protocol.membership import Membership

if TYPE_CHECKING:
    from elastix.comm.network.door import Address


class Inbox:
    """It may change at any moment while a member waits.

    Attributes:
        urgent: the newest membership that must be entered at once.
        proposed: the newest proposal; to be entered at an agreed boundary if nothing urgent came
            after.
        members: members of every generation heard of, by generation.
        invitation: peers that a joiner may catch up from, in order; empty if it was not invited.
        shadow: it was invited to follow for good, and comes in when all others are lost.
        dismissed: why whoever waits for others need wait no longer; None while they should.
        stores: the State is wanted at the next boundary, or at that at which the group stands
            still; until it is on its way.
    """

    def __init__(self) -> None:
        self.urgent = Membership(0, ())
        self.proposed = Membership(0, ())
        self.members: dict[int, tuple[int, ...]] = {}
        self.invitation: tuple[Address, ...] = ()
        self.shadow = False
        self.dismissed: Exception | None = None
        self.stores = False

    def fresh(self, membership: Membership) -> bool:
        """Whether it is newer than all that was heard of."""
        return membership.generation > max(self.urgent.generation, self.proposed.generation)

    def publish(self, membership: Membership) -> None:
        """Announce a membership. Old news, arriving late, changes nothing."""
        self.members[membership.generation] = membership.members
        if membership.urgent:
            if membership.generation > self.urgent.generation:
                self.urgent = membership
        elif membership.generation > self.proposed.generation:
            self.proposed = membership

    def learn(self, generation: int, members: tuple[int, ...]) -> None:
        """These are the members of that generation, of which the controller has yet to tell."""
        self.members.setdefault(generation, members)

    def invite(self, donors: tuple[Address, ...], *, shadow: bool = False) -> None:
        """Catch up from one of these peers, the first of them if it is there.

        Whoever is a shadow once stays one.
        """
        self.invitation = donors
        self.shadow = self.shadow or shadow

    def dismiss(self, reason: Exception) -> None:
        """Nobody else will come."""
        self.dismissed = reason

    def store_soon(self) -> None:
        """All members are to go, and nobody may be left."""
        self.stores = True
