"""Slices of a batch: how many each worker computes, and who has one when its worker is lost. Pure.

A slice is a consecutive part of a global batch, and the unit of work. All workers must agree on
whose each slice is without asking each other, in the middle of a step in which members are lost.
So the owner is a function of what all have, and of who is left: of nothing that has happened.

Each slice has an order in which all members stand; its owner is the first of them who is left.
Members only get fewer within a step. So whoever has computed a slice stays its owner, whatever
meetings it has missed, and no slice is computed twice for the same gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heapify, heapreplace
from statistics import median_low
from typing import Any

TOLD = 8
"""So many workers say in a step how fast they are; of more, others do in the next."""

_WORTH = Fraction(9, 10)
"""Shares change if the slowest then needs less than this part of its time."""

_HOPE = Fraction(99, 100)
"""In each step a worker without a slice is taken to need so much of what it needed before."""


def shares(us: Sequence[int], slices: int) -> tuple[int, ...]:
    """How many slices each worker computes so that the last one is through as early as can be.

    Each slice in turn goes to who would be through with it first; of equals to the first. For
    slices of one size no other division is through earlier.

    Args:
        us: how long one slice takes each.
        slices: how many there are.
    """
    counts = [0] * len(us)
    through = [(time, rank) for rank, time in enumerate(us)]
    heapify(through)
    for _ in range(slices):
        when, rank = through[0]
        counts[rank] += 1
        heapreplace(through, (when + us[rank], rank))
    return tuple(counts)


@dataclass(frozen=True)
class Assignment:
    """Whose the slices of one batch are.

    Attributes:
        members: among whom they were divided, in rank order.
        counts: how many each of them computes if nobody is lost: consecutive ones.
        us: how long one takes each of them.
    """

    members: tuple[int, ...]
    counts: tuple[int, ...]
    us: tuple[int, ...]
    _known: dict[frozenset[int], dict[int, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def planned(self) -> tuple[int, ...]:
        """By slice, the worker that computes it if nobody is lost."""
        return tuple(m for m, n in zip(self.members, self.counts, strict=True) for _ in range(n))

    def owners(self, alive: Collection[int]) -> tuple[int, ...]:
        """By slice, the worker that computes it if these are left.

        Somebody who was no member has a part in it only if no member is left.
        """
        lost = frozenset(rank for rank, member in enumerate(self.members) if member not in alive)
        if len(lost) == len(self.members):
            return (min(alive),) * sum(self.counts)
        return tuple(self.members[self._first(lost, *at)] for at in enumerate(self._ranks))

    @property
    def _ranks(self) -> list[int]:
        return [rank for rank, count in enumerate(self.counts) for _ in range(count)]

    def _first(self, lost: frozenset[int], number: int, rank: int) -> int:
        """In the order of this slice, which begins with `rank`, the first who is not lost."""
        before: frozenset[int] = frozenset()
        while rank in lost:
            before |= {rank}
            rank = self._next(before)[number]
        return rank

    def _next(self, before: frozenset[int]) -> dict[int, int]:
        """For each slice whose order begins with just these, in any order: who comes next.

        They are divided over the others as `shares` would, on top of what those have when `before`
        are lost.
        """
        if before in self._known:
            return self._known[before]
        load, left = list(self.counts), []
        for number, rank in enumerate(self._ranks):
            if rank in before:
                heir = self._heir(before, number, rank)
                if heir is None:
                    left.append((number, rank))
                else:
                    load[heir] += 1
        others = [rank for rank in range(len(self.members)) if rank not in before]
        found: dict[int, int] = {}
        for number, first in left:

            def through(rank: int, first: int = first) -> tuple[int, int]:
                return (load[rank] + 1) * self.us[rank], (rank - first) % len(self.members)

            found[number] = heir = min(others, key=through)
            load[heir] += 1
        self._known[before] = found
        return found

    def _heir(self, lost: frozenset[int], number: int, rank: int) -> int | None:
        """The first of a slice's order who is not lost; None if all before that one are `lost`."""
        before: frozenset[int] = frozenset()
        while rank in lost:
            before |= {rank}
            if before == lost:
                return None
            rank = self._next(before)[number]
        return rank


class Paces:
    """How fast workers compute the slices of one loader, and whose slices follow from it.

    Part of the State. Shares stay as they are until others would be through clearly earlier, so
    that they settle. Of who has no slice nothing can be measured: it is taken to get faster, until
    it is given one again.
    """

    def __init__(self) -> None:
        self._us: dict[int, int] = {}
        self._settled: dict[int, int] = {}  # by worker, in rank order: shares of the next step

    def assign(self, members: Sequence[int], slices: int) -> Assignment:
        """Whose the slices of the next batch are, if it is divided among these."""
        us, settled = self._times(members), tuple(self._settled.values())
        stays = tuple(self._settled) == tuple(members) and sum(settled) == slices
        return Assignment(tuple(members), settled if stays else shares(us, slices), us)

    def agreed(self, assignment: Assignment, told: Mapping[int, int]) -> None:
        """A step counts.

        Args:
            assignment: of its batch.
            told: how long one slice took these, in microseconds; 0 from who had none.
        """
        members, counts = assignment.members, assignment.counts
        for worker, time in told.items():
            if time > 0:
                self._us[worker] = time
            elif worker in self._us:
                self._us[worker] = max(1, int(self._us[worker] * _HOPE))
        self._us = {worker: time for worker, time in self._us.items() if worker in members}
        us = self._times(members)
        best = shares(us, sum(counts))
        if _last(best, us) < _WORTH * _last(counts, us):
            counts = best
        self._settled = dict(zip(members, counts, strict=True))

    def newcomers(self, members: Sequence[int]) -> tuple[int, ...]:
        """Those of the next step's members that were not members in the last one."""
        return tuple(member for member in members if member not in self._settled)

    def _times(self, members: Sequence[int]) -> tuple[int, ...]:
        """How long a slice takes each; of whom nothing is known, as long as most."""
        known = [self._us[member] for member in members if member in self._us]
        usual = median_low(known) if known else 1
        return tuple(self._us.get(member, usual) for member in members)

    def state_dict(self) -> dict[str, Any]:
        """As it is between two steps."""
        return {
            "us": [list(pair) for pair in self._us.items()],
            "settled": [list(pair) for pair in self._settled.items()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As it was."""
        self._us = dict(state_dict.get("us", ()))
        self._settled = dict(state_dict.get("settled", ()))


def tellers(members: Sequence[int], step: int) -> tuple[int, ...]:
    """Who says in this step how fast it is: all if they are few, else so many in turn."""
    if len(members) <= TOLD:
        return tuple(members)
    return tuple(members[(step * TOLD + place) % len(members)] for place in range(TOLD))


def _last(counts: Sequence[int], us: Sequence[int]) -> int:
    """When the last one is through."""
    return max(count * time for count, time in zip(counts, us, strict=True))
