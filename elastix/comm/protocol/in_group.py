"""What a member of a group keeps of it, whether it speaks for its worker or follows. Pure.

Here is what to do where a want that meets peers cannot be had, how the State is handed over, and
how a group is left. Not here: when to enter which group; see group_protocol and follower.
"""

from __future__ import annotations

from typing import Any

from elastix.comm.protocol.participant import Joined
from elastix.comm.protocol.wants import (
    Abandon,
    Await,
    Build,
    Course,
    Doubt,
    Failed,
    GiveState,
    GroupHandle,
    Superseded,
    TakeState,
    Want,
)


class InGroup:
    """A member's groups, and its doubts about them.

    Attributes:
        generation: the newest one that it knows of as its own.
        group: the group in use; None while there is none.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.group: GroupHandle | None = None
        self._circle: GroupHandle | None = None  # in which the State is being given
        self._doubted = 0

    @property
    def superseded(self) -> bool:
        """Whether it is not worth waiting for the members of the group any longer."""
        raise NotImplementedError

    def doubts(self, generation: int) -> bool:
        """Whether to ask for a generation after this one: once, however often it fails."""
        first = generation > self._doubted
        self._doubted = max(self._doubted, generation)
        return first

    def _ask(self, want: Want) -> Course[Any]:
        """What a want that meets peers is answered with. If it fails, wait to be superseded."""
        try:
            return (yield want)
        except Failed as failed:  # its traceback would keep the group and its sockets until gc
            error, unreachable = failed.error, failed.unreachable
        # Only a hint: the controller knows who is dead, or starts a new generation.
        if self.doubts(self.generation):
            yield Doubt(self.generation, error, unreachable)
        yield Await(lambda: self.superseded)
        raise Superseded

    def _hand_over(
        self, group: GroupHandle, mine: int, ranks: tuple[int, ...], *, founding: bool
    ) -> Course[Joined | None]:
        """Give or take the State, if that is on this member; what it cost if it was taken.

        Args:
            group: in which it is done.
            mine: rank of this member there.
            ranks: of the donor, and of who is given the State; nobody else need take part.
            founding: the run begins here.
        """
        if mine not in ranks:
            return None
        circle, root = group, ranks[0]
        if len(ranks) < len(group.members):
            members = tuple(group.members[rank] for rank in ranks)
            circle = yield from self._ask(Build(group.generation, members, scope="transfer"))
            self._circle, root = circle, 0
        joined: Joined | None = None
        if mine == ranks[0]:
            yield from self._ask(GiveState(circle, founding=founding))
        else:
            joined = yield from self._ask(TakeState(circle, root))
        if self._circle is not None:
            self._circle = None
            yield Abandon(circle)
        return joined

    def _leave(self) -> Course[None]:
        abandoned = self.group, self._circle
        self.group = self._circle = None
        for group in abandoned:
            if group is not None:
                yield Abandon(group)
