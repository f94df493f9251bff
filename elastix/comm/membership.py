"""Who is in the group: the controller's state machine. Pure; no clock, no threads, no messages.

A Membership is a generation and its members in rank order. The Roster issues one after another:

- *urgent* ones, when a member is lost or the group is in doubt: every member drops what it waits
  for and meets the others in the new generation;
- *proposals*, when newcomers wait or members are to leave: the members enter one at a step boundary
  that they agree on in a commit round. A proposal with newcomers is followed by another only when
  they are in, so a newcomer may start to enter at once.

Invariants: generations only grow; an urgent membership holds only workers that have the State
(unless nobody has it yet); a worker that was taken out never comes back under the same id.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """One generation of the group. The rank of a worker is its place in `members`."""

    generation: int
    members: tuple[int, ...]
    urgent: bool = True
    cause: str = ""

    @property
    def size(self) -> int:
        """World size."""
        return len(self.members)

    def rank(self, worker: int) -> int:
        """Rank of a member; ValueError for anybody else."""
        return self.members.index(worker)


class Roster:
    """Decides on memberships from what happens to workers.

    Each method takes one occurrence and returns the Membership to be pushed to its members (and
    to whoever was in the one before), or None if nothing changes.

    Args:
        founders: workers that a run begins with.
        size: the largest group; ready workers beyond it are spares. None: as large as may be.
        min_workers: a smaller group stands still, so nobody need catch up with it.

    Attributes:
        newest: the membership issued last; generation 0 without members before the first.
        holders: members known to have the State.
        waiting: workers that are ready and in no membership, spares among them.
        watching: joiners that are catching up outside the group.
        leaving: members that were asked to leave and have not left.
        founded: somebody has had the State.
    """

    def __init__(self, founders: int, size: int | None = None, min_workers: int = 1) -> None:
        self.newest = Membership(0, ())
        self.holders: set[int] = set()
        self.waiting: list[int] = []
        self.watching: list[int] = []
        self.leaving: list[int] = []
        self.founded = False
        self._founders = founders
        self._size = size
        self._min_workers = min_workers
        self._finished: set[int] = set()
        self._admitted: dict[int, int] = {}  # worker to the generation that let it in
        self._confirmed: dict[int, int] = {}  # worker to the newest generation it was in
        self._last_with: dict[int, int] = {}  # worker to the last generation that it is in
        self._last_urgent = 0
        self._turn = 0

    @property
    def extinct(self) -> bool:
        """Somebody had the State once, and nobody has it now."""
        return self.founded and not self.holders and not self._finished

    @property
    def over(self) -> bool:
        """The train function has returned on whoever had the State."""
        return bool(self._finished) and not self.holders

    @property
    def joining(self) -> tuple[int, ...]:
        """Members of the newest membership that have not confirmed to have the State."""
        settled = self.holders | self._finished
        return tuple(w for w in self.newest.members if w not in settled)

    @property
    def settled(self) -> bool:
        """Every member has confirmed to be in the newest generation, and uses no older group."""
        newest = self.newest.generation
        return all(self._confirmed.get(w) == newest for w in self.newest.members)

    def take_over(
        self, generation: int, holders: Iterable[int], waiting: Iterable[int]
    ) -> Membership | None:
        """Go on where another Roster was lost, from what the workers say of themselves.

        Args:
            generation: the newest that any of them has heard of.
            holders: workers that have the State.
            waiting: other workers that are ready.
        """
        self.newest = Membership(generation, ())
        self.holders = set(holders)
        self.waiting = list(waiting)
        self.founded = bool(self.holders)
        if not self.founded:
            return self._advance()
        self._admitted |= dict.fromkeys(self.holders, generation + 1)
        return self._issue(tuple(sorted(self.holders)), urgent=True, cause="new controller")

    def start_over(self) -> Membership | None:
        """Nobody has the State any more: found the group anew; whoever is ready takes part."""
        self.newest = Membership(self.newest.generation, ())
        self.founded = False
        self.holders.clear()
        self.leaving.clear()
        self.waiting, self.watching = self.waiting + self.watching, []
        return self._advance()

    def ready(self, worker: int) -> Membership | None:
        """A worker is up to `prepare` and wants to be let in; or it has lost whom it watched.

        It is in `watching` afterwards if it is to catch up first.
        """
        if worker in self.newest.members:
            return None  # its proposal stands, and it is given the State in the group
        if worker in self.waiting:
            self.waiting.remove(worker)
        if worker in self.watching:
            self.watching.remove(worker)
        if self._runs and self._room > len(self.waiting) + len(self.watching):
            self.watching.append(worker)
            return None
        self.waiting.append(worker)
        return self._advance()

    def level(self, worker: int) -> Membership | None:
        """A joiner has caught up."""
        if worker not in self.watching:
            return None
        self.watching.remove(worker)
        self.waiting.append(worker)
        return self._advance()

    def donors(self) -> tuple[int, ...]:
        """Members that a joiner may catch up from, in the order in which it should try them.

        Each call begins with another one, so that several joiners burden several donors.
        """
        able = [w for w in self.newest.members if w in self.holders and w not in self.leaving]
        able = able or sorted(self.holders)
        first = self._turn % len(able) if able else 0
        self._turn += 1
        return tuple(able[first:] + able[:first])

    @property
    def _runs(self) -> bool:
        """Whether the group takes steps, so that it should not be made to wait for a newcomer."""
        return (
            self.founded and not self._finished and len(self.holders) >= max(1, self._min_workers)
        )

    @property
    def _room(self) -> float:
        """How many more workers the group may have."""
        stay = [w for w in self.newest.members if w not in self.leaving]
        return math.inf if self._size is None else self._size - len(stay)

    def entered(self, worker: int, generation: int) -> Membership | None:
        """A member confirms that it has the State and is in the group of `generation`."""
        admitted = self._admitted.get(worker, generation + 1)
        if worker not in self.newest.members or generation < admitted:
            return None  # it was taken out in the meantime, and will learn of it
        self.holders.add(worker)
        self._confirmed[worker] = generation
        self.founded = True
        return self._advance()

    def leave(self, worker: int) -> Membership | None:
        """A worker is to go, at a boundary: its node is to be taken away, or it is too slow."""
        if worker in (*self.waiting, *self.watching):  # nobody needs it; the caller ends it
            self._drop(worker)
            return None
        if worker not in self.newest.members or worker in {*self.leaving, *self._finished}:
            return None
        self.leaving.append(worker)
        return self._advance()

    def left(self, worker: int, generation: int) -> Membership | None:
        """A member was let go at a boundary, where the others entered `generation`."""
        self._drop(worker)
        self.holders.discard(worker)
        if worker in self.leaving:
            self.leaving.remove(worker)
        if self._awaited(worker, generation):
            return self._regroup(without=worker, cause="leave")
        return self._advance()

    def _drop(self, worker: int) -> None:
        self.waiting = [w for w in self.waiting if w != worker]
        self.watching = [w for w in self.watching if w != worker]

    def lost(self, worker: int) -> Membership | None:
        """A worker is dead, or is to be treated as dead."""
        if worker in (*self.waiting, *self.watching):
            self._drop(worker)
            return None
        self.holders.discard(worker)
        goes_anyway = worker in self.leaving
        if goes_anyway:
            self.leaving.remove(worker)
        if worker in self._finished or not (goes_anyway or worker in self.newest.members):
            return None
        return self._regroup(without=worker, cause="loss")

    def doubt(self, generation: int) -> Membership | None:
        """Collectives fail in `generation` although nobody is known to be dead."""
        if generation < self._last_urgent:
            return None  # that group is history
        return self._regroup(without=None, cause="doubt")

    def finished(self, worker: int, generation: int) -> Membership | None:
        """A member is through with the train function; it left from the group of `generation`.

        Whoever meets in a newer one would wait for it in vain.
        """
        self._finished.add(worker)
        self.holders.discard(worker)
        if worker in self.leaving:
            self.leaving.remove(worker)
        if self._awaited(worker, generation):
            return self._regroup(without=worker, cause="end")
        return None

    def _awaited(self, worker: int, generation: int) -> bool:
        """Whether others may wait for it in a group that came after the one it left."""
        return self._last_with.get(worker, 0) > generation

    def _regroup(self, without: int | None, cause: str) -> Membership | None:
        # Whoever is to leave has its share of the step in hand until it is gone.
        stay = [w for w in self.leaving if w not in self.newest.members and w in self.holders]
        rest = [w for w in (*self.newest.members, *stay) if w != without]
        rest = [w for w in rest if w not in self._finished]
        if not self.founded:
            # None or all of them have the State, and they will find out which. Nobody else may
            # come in before that.
            if rest:
                return self._issue(tuple(rest), urgent=True, cause=cause)
            self.newest = Membership(self.newest.generation, ())
            return self._advance()
        self.waiting = [w for w in rest if w not in self.holders] + self.waiting
        members = tuple(w for w in rest if w in self.holders)
        if not self._runs:
            self.waiting, self.watching = self.waiting + self.watching, []
        if not members:
            return None
        return self._issue(members, urgent=True, cause=cause)

    def _advance(self) -> Membership | None:
        if self._finished:
            return None
        if not self.founded:
            if self.newest.members or len(self.waiting) < self._founders:
                return None
            return self._admit((), self._founders, urgent=True, cause="start")
        if self.joining or not self.holders:
            return None
        stay = tuple(w for w in self.newest.members if w not in self.leaving)
        room = int(min(self._room, len(self.waiting)))
        if room > 0:
            # Somebody has to give the newcomers the State, even if it is to leave.
            return self._admit(stay or self.newest.members, room, urgent=False, cause="join")
        if stay and stay != self.newest.members:
            return self._issue(stay, urgent=False, cause="leave")
        return None

    def _admit(self, members: tuple[int, ...], room: int, urgent: bool, cause: str) -> Membership:
        newcomers = tuple(sorted(self.waiting)[:room])
        self.waiting = [w for w in self.waiting if w not in newcomers]
        self._admitted |= dict.fromkeys(newcomers, self.newest.generation + 1)
        return self._issue(members + newcomers, urgent=urgent, cause=cause)

    def _issue(self, members: tuple[int, ...], urgent: bool, cause: str) -> Membership:
        self.newest = Membership(self.newest.generation + 1, members, urgent, cause)
        self._last_with |= dict.fromkeys(members, self.newest.generation)
        if urgent:
            self._last_urgent = self.newest.generation
        return self.newest
