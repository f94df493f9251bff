"""Who is in the group: the controller's state machine. Pure; no clock, no threads, no messages.

A Membership is a generation and its members in rank order. The Roster issues one after another:

- *urgent* ones, when a member is lost or the group is in doubt: every member drops what it waits
  for and meets the others in the new generation;
- *proposals*, when newcomers wait or members are to leave: the members enter one at a step boundary
  that they agree on in a commit round. A proposal with newcomers is followed by another only when
  they are in, so a newcomer may start to enter at once.

Invariants: generations only grow; an urgent membership holds only workers that have the State
(unless nobody has it yet); a worker that was taken out never comes back under the same id.

With thousands of members each of them confirms each generation, so what is asked then (who is
still on the way in, have all confirmed) is counted and not looked up. Only a new generation takes a
copy of the member list.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import filterfalse, islice

_DONORS = 8
"""A joiner is told of so many peers; when it has lost them all it asks again."""


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
        waiting: workers that are ready and in no membership, spares among them, in order.
        watching: joiners that are catching up outside the group, in order.
        level_shadows: shadows that hold what the group does, in order. One of them is let in where
            a worker without the State would be, which can be the shadow then.
        leaving: members that were asked to leave and have not left.
        founded: somebody has had the State.
    """

    def __init__(self, founders: int, size: int | None = None, min_workers: int = 1) -> None:
        self.newest = Membership(0, ())
        self.holders: set[int] = set()
        self.waiting: dict[int, None] = {}
        self.watching: dict[int, None] = {}
        self.level_shadows: dict[int, None] = {}
        self.leaving: list[int] = []
        self.founded = False
        self._founders = founders
        self._size = size
        self._min_workers = min_workers
        self._finished: set[int] = set()
        self._members: set[int] = set()  # of the newest membership
        self._entering: set[int] = set()  # of them, those that have not confirmed it
        self._dead: set[int] = set()  # of them, known to be lost when nobody had the State any more
        self._settled = 0  # how many of them have confirmed the newest generation
        self._let_go: dict[int, tuple[int, ...]] = {}  # by proposal: members that leave there
        self._admitted: dict[int, int] = {}  # worker to the generation that let it in
        self._confirmed: dict[int, int] = {}  # worker to the newest generation it was in
        self._last_with: dict[int, int] = {}  # former member to the last generation it is in
        self._last_urgent = 0
        self._turn = 0
        self._caught_up: set[int] = set()  # of those waiting, joiners that hold what the group does
        self._stood_in: set[int] = set()  # of those on the way in, shadows

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
        """Members of the newest membership that have not confirmed to be in the group."""
        return tuple(w for w in self.newest.members if w in self._entering)

    @property
    def members(self) -> Collection[int]:
        """Those of the newest membership, to be looked up quickly."""
        return self._members

    @property
    def settled(self) -> bool:
        """Every member has confirmed to be in the newest generation, and uses no older group."""
        return self._settled == len(self._members)

    def take_over(
        self,
        generation: int,
        holders: Iterable[int],
        waiting: Iterable[int],
        founding: Iterable[int] = (),
    ) -> Membership | None:
        """Go on where another Roster was lost, from what the workers say of themselves.

        Args:
            generation: the newest that any of them has heard of.
            holders: workers that have the State.
            waiting: other workers that are ready.
            founding: workers that were about to found the group: if one has the State, all have.
        """
        self._disband(generation)
        self.holders = set(holders)
        self.waiting = dict.fromkeys(waiting)
        self.founded = bool(self.holders)
        members = tuple(sorted(self.holders.union(founding)))
        if not members:
            return self._advance()
        self._admitted |= dict.fromkeys(members, generation + 1)
        issued = self._issue(members, come=members, urgent=True, cause="new controller")
        if self.founded:  # yet nobody else comes in before all of them have confirmed
            self.holders.update(founding)
        return issued

    def start_over(self, heir: int | None = None, founders: int | None = None) -> Membership | None:
        """Nobody in the group has the State any more: found it anew; whoever is ready takes part.

        An heir outside who has it is the group until others are let in. With `founders` as many
        as that are enough from now on.
        """
        self._founders = founders or self._founders
        again = self._unequipped(self._dead)
        self.level_shadows.clear()  # whom they followed is lost, so they ask for another
        self._put_back(worker for worker in again if worker not in self._stood_in)
        self._stood_in.clear()
        self._disband(self.newest.generation)
        self.founded = heir is not None
        self.holders.clear()
        self.leaving.clear()
        self._stop_watching()
        if heir is None:
            return self._advance()
        self._admitted[heir] = self.newest.generation + 1
        return self._issue((heir,), come=(heir,), urgent=True, cause="shadow")

    def found_with(self, founders: int) -> Membership | None:
        """Nobody has had the State yet; as many as that are enough to begin."""
        self._founders = founders
        return self._advance()

    def ready(self, worker: int) -> Membership | None:
        """A worker is up to `prepare` and wants to be let in; or it has lost whom it watched.

        It is in `watching` afterwards if it is to catch up first.
        """
        if worker in self._members:
            return None  # its proposal stands, and it is given the State in the group
        self._drop(worker)
        taken = len(self.waiting) + len(self.watching) + len(self.level_shadows)
        if self._runs and self._room > taken:
            self.watching[worker] = None
            return None
        self.waiting[worker] = None
        return self._advance()

    def level(self, worker: int) -> Membership | None:
        """A joiner has caught up."""
        if worker not in self.watching:
            return None
        del self.watching[worker]
        self.waiting[worker] = None
        self._caught_up.add(worker)
        return self._advance()

    def shadow_level(self, worker: int) -> Membership | None:
        """A shadow was found to hold what the group does, and does not take part."""
        if worker in self._members:
            return None
        self.level_shadows[worker] = None
        return self._advance()

    def shadow_lonely(self, worker: int) -> Membership | None:
        """A shadow follows nobody any more: it cannot come in at the boundary that is agreed on."""
        entering = worker in self._entering and worker in self._stood_in
        issued = self._regroup(cause="doubt") if entering else None
        self.level_shadows.pop(worker, None)
        return issued

    def donors(self) -> tuple[int, ...]:
        """Some members that a joiner may catch up from, in the order in which it should try them.

        Each call begins with another one, so that several joiners burden several donors.
        """
        members = self.newest.members
        first = self._turn % len(members) if members else 0
        self._turn += 1
        around = (members[(first + i) % len(members)] for i in range(len(members)))
        absent = self._entering.union(self.leaving)
        able = (w for w in around if w in self.holders and w not in absent)
        return tuple(islice(able, _DONORS)) or tuple(sorted(self.holders)[:_DONORS])

    @property
    def _runs(self) -> bool:
        """Whether the group takes steps, so that it should not be made to wait for a newcomer."""
        return (
            self.founded and not self._finished and len(self.holders) >= max(1, self._min_workers)
        )

    @property
    def _room(self) -> float:
        """How many more workers the group may have."""
        go = sum(w in self._members for w in self.leaving)
        return math.inf if self._size is None else self._size - (len(self._members) - go)

    def entered(self, worker: int, generation: int) -> Membership | None:
        """A member confirms that it has the State and is in the group of `generation`."""
        back = self._part_with(generation)
        if back:
            self._confirm(worker, generation)
            return self._regroup(*back, cause="leave")
        if not self._confirm(worker, generation):
            return None  # it was taken out in the meantime, and will learn of it
        if self._dead:  # they were lost when nobody else was known to have the State
            return self._regroup(cause="loss")
        return self._advance()

    def _confirm(self, worker: int, generation: int) -> bool:
        admitted = self._admitted.get(worker, generation + 1)
        if worker not in self._members or generation < admitted:
            return False
        if not self.founded:  # whoever leaves a founding knows that all founders have the State
            self.holders |= self._entering
        self.holders.add(worker)
        self._entering.discard(worker)
        self._stood_in.discard(worker)
        newest = self.newest.generation
        self._settled += (generation == newest) - (self._confirmed.get(worker) == newest)
        self._confirmed[worker] = generation
        self.founded = True
        return True

    def _part_with(self, generation: int) -> list[int]:
        """Somebody was in `generation`: all had agreed to go on without whom it let go.

        Such a one may not have heard of it, since its last round failed. Its State is older than
        what the others have committed since, so it must not lead a group when they are gone.

        Returns:
            Those who were called back when that was not known, and are not in a group since.
        """
        gone = self._let_go.pop(generation, ())
        gone = tuple(w for w in gone if self._confirmed.get(w, 0) < generation)
        self.holders.difference_update(gone)
        self.leaving = [w for w in self.leaving if w not in gone]
        return [w for w in gone if w in self._members]

    @property
    def all_go(self) -> bool:
        """Whether all members were asked to leave: they stay, as somebody has to have the State."""
        few = len(self.leaving) < len(self._members)  # nearly always: this is asked all the time
        return not few and bool(self._members) and self._members <= set(self.leaving)

    def leave(self, worker: int) -> Membership | None:
        """A worker is to go, at a boundary: its node is to be taken away, or it is too slow."""
        if worker in self.waiting or worker in self.watching or worker in self.level_shadows:
            # The caller ends it.
            self._drop(worker)
            return None
        if worker in self.leaving:
            if worker not in self._members and worker not in self.holders:  # put back since
                self.leaving.remove(worker)
            return None
        if worker not in self._members or worker in self._finished:
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
            return self._regroup(worker, cause="leave")
        return self._advance()

    def _drop(self, worker: int) -> None:
        """It is not outside any more."""
        for outside in (self.waiting, self.watching, self.level_shadows):
            outside.pop(worker, None)
        self._caught_up.discard(worker)

    def _put_back(self, workers: Iterable[int]) -> None:
        """They were on their way in."""
        for worker in workers:
            (self.level_shadows if worker in self._stood_in else self.waiting)[worker] = None
            self._stood_in.discard(worker)

    def _stop_watching(self) -> None:
        """The group stands still: nobody need catch up with it from outside."""
        self.waiting |= self.watching
        self.watching = {}

    def lost(self, worker: int) -> Membership | None:
        """A worker is dead, or is to be treated as dead."""
        self._stood_in.discard(worker)
        if worker in self.waiting or worker in self.watching or worker in self.level_shadows:
            self._drop(worker)
            return None
        self.holders.discard(worker)
        goes_anyway = worker in self.leaving
        if goes_anyway:
            self.leaving.remove(worker)
        if worker in self._finished or not (goes_anyway or worker in self._members):
            return None
        return self._regroup(worker, cause="loss")

    def doubt(self, generation: int) -> Membership | None:
        """Collectives fail in `generation` although nobody is known to be dead."""
        if generation < self._last_urgent:
            return None  # that group is history
        return self._regroup(cause="doubt")

    def finished(self, worker: int, generation: int) -> Membership | None:
        """A member is through with the train function; it left from the group of `generation`.

        Whoever meets in a newer one would wait for it in vain.
        """
        self._finished.add(worker)
        self.holders.discard(worker)
        self._entering.discard(worker)
        if worker in self.leaving:
            self.leaving.remove(worker)
        back = self._part_with(generation)
        if back or self._awaited(worker, generation):
            return self._regroup(worker, *back, cause="end")
        return None

    def _awaited(self, worker: int, generation: int) -> bool:
        """Whether others may wait for it in a group that came after the one it left."""
        last = self._last_with.get(worker, 0)
        return (self.newest.generation if worker in self._members else last) > generation

    def _regroup(self, *without: int, cause: str) -> Membership | None:
        """An urgent membership of those who have the State; of all, before anybody has it."""
        # Whoever is to leave has its share of the step in hand until it is gone.
        stay = [w for w in self.leaving if w not in self._members and w in self.holders]
        gone = self._dead | ((self._finished | set(without)) & self._members)
        if not self.founded:
            # None or all of them have the State, and they will find out which. Nobody else may
            # come in before that.
            rest = self._members_but(gone)
            if rest:
                return self._issue(rest, gone=gone, urgent=True, cause=cause)
            self._disband(self.newest.generation)
            return self._advance()
        again = self._unequipped(gone)
        stay = [w for w in stay if w not in without]
        members = self._members_but(gone.union(again)) + tuple(stay)
        if not self._runs:
            self._stop_watching()
        if not members:
            self._dead = gone
            return None
        self._put_back(again)
        gone.update(again)
        return self._issue(members, gone=gone, come=stay, urgent=True, cause=cause)

    def _unequipped(self, but: Collection[int]) -> list[int]:
        """Members that have not got the State yet, `but` these."""
        lacking = self._entering - self.holders
        return [w for w in self.newest.members if w in lacking and w not in but] if lacking else []

    def _advance(self) -> Membership | None:
        if self._finished:
            return None
        if not self.founded:
            if self._members or len(self.waiting) < self._founders:
                return None
            return self._admit(set(), self._founders, urgent=True, cause="start")
        if not self._runs:
            self._stop_watching()
        if self._entering or not self.holders:
            return None
        if not self.newest.urgent and not self._settled:
            return None  # who waits for more members enters a proposal unasked: all must the same
        go = {w for w in self.leaving if w in self._members}
        room = int(min(self._room, len(self.waiting)))
        if room > 0:
            # Somebody has to give the newcomers the State, even if it is to leave.
            go = go if len(go) < len(self._members) else set()
            return self._admit(go, room, urgent=False, cause="join")
        if go and len(go) < len(self._members):
            return self._issue(self._members_but(go), gone=go, urgent=False, cause="leave")
        return None

    def _admit(self, go: set[int], room: int, urgent: bool, cause: str) -> Membership:
        newcomers = tuple(sorted(map(self._stand_in, sorted(self.waiting)[:room])))
        for worker in newcomers:
            self._drop(worker)
            self._admitted[worker] = self.newest.generation + 1
        members = self._members_but(go) + newcomers
        return self._issue(members, gone=go, come=newcomers, urgent=urgent, cause=cause)

    def _stand_in(self, worker: int) -> int:
        """Who comes in where this one would: a shadow, if there is one, needs no State."""
        shadow = next(iter(self.level_shadows), None)
        if shadow is None or worker in self._caught_up:
            return worker
        del self.level_shadows[shadow]
        self._stood_in.add(shadow)
        return shadow

    def _members_but(self, gone: Collection[int]) -> tuple[int, ...]:
        """The newest membership without these, in its order."""
        members = self.newest.members
        return tuple(filterfalse(gone.__contains__, members)) if gone else members

    def _disband(self, generation: int) -> None:
        """There is no group any more; the next one has a higher number."""
        self._last_with |= dict.fromkeys(self._members, self.newest.generation)
        self.newest = Membership(generation, ())
        self._members.clear()
        self._entering.clear()
        self._dead = set()
        self._settled = 0

    def _issue(
        self,
        members: tuple[int, ...],
        *,
        gone: Collection[int] = (),
        come: Iterable[int] = (),
        urgent: bool,
        cause: str,
    ) -> Membership:
        """The next generation.

        Args:
            members: of it.
            gone: who was in the one before and is not in this one.
            come: who is in this one and was not in the one before.
            urgent: see Membership.
            cause: see Membership.
        """
        for worker in gone:
            self._last_with[worker] = self.newest.generation
            self._members.discard(worker)
            self._entering.discard(worker)
        for worker in come:
            self._members.add(worker)
            if worker not in self.holders and worker not in self._finished:
                self._entering.add(worker)
        self._settled, self._dead = 0, set()
        self.newest = Membership(self.newest.generation + 1, members, urgent, cause)
        if urgent:
            self._last_urgent = self.newest.generation
        elif gone:
            self._let_go[self.newest.generation] = tuple(gone)
        return self.newest
