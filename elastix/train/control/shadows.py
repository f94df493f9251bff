"""Shadows: workers that follow the group and are not in it, so that it can be lost. Pure.

A shadow receives every step before the journal is told of it. When all members are lost, the one
that is furthest founds the next generation, and says where it stands. Not here: how it follows
(comm.protocol.joiner), who is in the group (comm.protocol.membership).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from elastix.comm.network.door import Address
from elastix.comm.protocol.membership import Roster
from elastix.events import Event, Resumed, ResumedFromShadow
from elastix.train.control.messages import Succeeded
from elastix.train.control.run_state import RunState
from elastix.train.control.terms import RunTerms

_DONORS = 8  # of which a shadow is told
_LAST_STEPS_S = 2.0  # until all have said where they stand; it takes milliseconds


@dataclass
class _Shadow:
    """One of them.

    Attributes:
        has_state: it has been given one.
        asks: it waits to be told whom to follow.
        operation: the next one, as it said last.
    """

    has_state: bool = False
    asks: bool = True
    operation: int = -1


class Shadows:
    """Those of one run.

    Args:
        terms: of the run.

    Attributes:
        heir: the one that was asked to go on in place of the group, and is not in it yet.
    """

    def __init__(self, terms: RunTerms) -> None:
        self.heir: int | None = None
        self._terms = terms
        self._stored = 0
        self._listens_since: float | None = None
        self._shadows: dict[int, _Shadow] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._shadows

    def __iter__(self) -> Iterator[int]:
        return iter(self._shadows)

    def __len__(self) -> int:
        return len(self._shadows)

    @property
    def lacking(self) -> bool:
        """Whether there are fewer than there are to be."""
        return len(self._shadows) < self._terms.shadows

    @property
    def can_go_on(self) -> bool:
        """Whether one of them has the State, as far as is known."""
        return any(shadow.has_state for shadow in self._shadows.values())

    def takes(self, worker: int, roster: Roster) -> bool:
        """Whether a worker that is ready is a shadow, or becomes one: it has nobody to follow yet.

        The group comes first until it is as large as it began; then shadows, growth, and spares.
        """
        if worker not in self._shadows:
            outside = {*roster.watching, *roster.waiting} - {worker}
            size = len(roster.members) + len(outside)
            if not (self.lacking and roster.holders and size >= self._terms.founders):
                return False
            if worker in roster.members:
                return False  # it was heard before, by another conductor
            roster.lost(worker)  # a spare that waited is a spare no more
        self._shadows.setdefault(worker, _Shadow()).asks = True
        return True

    def invitations(
        self, roster: Roster, address: Callable[[int], Address | None]
    ) -> Iterator[tuple[int, tuple[Address, ...]]]:
        """Shadows that have nobody to follow, each with members that it should try in this order.

        The first member comes first, as it is the one that tells the journal. A spare becomes a
        shadow where one is missing.
        """
        if not roster.holders:
            return  # who has nobody to follow may be needed to found the group
        while self.lacking and roster.waiting and len(roster.members) >= self._terms.max_workers:
            spare = max(roster.waiting)
            roster.lost(spare)
            self._shadows[spare] = _Shadow()
        asking = [worker for worker, shadow in self._shadows.items() if shadow.asks]
        if not asking:
            return
        holders = islice((w for w in roster.newest.members if w in roster.holders), _DONORS)
        donors = tuple(there for w in holders if (there := address(w)) is not None)
        for worker in asking if donors else ():
            self._shadows[worker].asks = False
            yield worker, donors

    def level(self, worker: int, operation: int = -1) -> None:
        """It has a State."""
        shadow = self._shadows.setdefault(worker, _Shadow())
        shadow.has_state, shadow.asks = True, False
        shadow.operation = max(shadow.operation, operation)

    def at(self, worker: int, operation: int) -> None:
        """It has come to that operation."""
        shadow = self._shadows.get(worker)
        if shadow is not None and operation >= 0:
            shadow.has_state = True
            shadow.operation = max(shadow.operation, operation)

    def entered(self, worker: int) -> None:
        """A worker is in the group; if it was a shadow, it is none any more."""
        self._listens_since = None
        self.forget(worker)

    def forget(self, worker: int) -> None:
        """It is gone."""
        self._shadows.pop(worker, None)
        if self.heir == worker:
            self.heir = None

    def listens(self, now: float) -> bool:
        """Whether the furthest is not known yet, all members being lost.

        One of several may have more to do of what it was told, until it says that it has nobody to
        follow.
        """
        able = [shadow for shadow in self._shadows.values() if shadow.has_state]
        if len(able) < 2 or all(shadow.asks for shadow in able):
            return False
        if self._listens_since is None:
            self._listens_since = now
        return now - self._listens_since <= _LAST_STEPS_S

    def call(self, stored: Resumed) -> int | None:
        """The one to go on when all members are lost: the furthest. None if nobody has the State.

        Args:
            stored: what the run would go on from without it.
        """
        self._listens_since = None
        able = [worker for worker, shadow in self._shadows.items() if shadow.has_state]
        if not able:
            return None
        self._stored = stored.step
        self.heir = max(able, key=lambda worker: (self._shadows[worker].operation, -worker))
        return self.heir

    def succeeded(self, worker: int, said: Succeeded, run: RunState) -> list[Event]:
        """The heir says where it is: what belongs into the journal; nothing if it is no use.

        It is of none if the stored State is newer, or if the journal lacks what it has not got
        either; of an exact run also if its State was found to differ. What the journal has beyond
        its State is void, and counted as lost.
        """
        self._shadows.pop(worker, None)
        differs = self._terms.exact and not said.equal
        if differs or said.step < self._stored or said.since > run.sequence + 1:
            return []
        lost = max(0, run.step - said.step)
        resumed = ResumedFromShadow(
            worker=worker,
            step=said.step,
            steps_lost=lost,
            sequence=said.sequence,
            equal=said.equal,
        )
        return [Resumed(step=said.step, ref=""), resumed] if lost else [resumed]
