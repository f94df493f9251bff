"""Which processes the workers are, where workers are crews: who is where, and who is free. Pure.

A process has a number, which never changes. It is at a place of a worker; or *free*: its worker is
lost, it is well, and can be at the same place of another (its State comes from the rail). At no
other: what torch remembers of a mesh is where this process was in it. Or it is on its way out of a
lost worker. If it does not come out in time, user code keeps it, and it is ended: it was of no use
to anybody.

A process is of a *site*: those of one worker are of one. A site is a node if they have to be on the
same; else there is one site.

Not here: when a worker is started or lost (conductor), and what a process is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastix.comm.protocol.membership import Membership
from elastix.train.checkpoint.assembly import CheckpointEnded, Order
from elastix.train.control.messages import (
    OF_EACH,
    Dismiss,
    FromWorker,
    Heartbeat,
    HeldPart,
    OutcomeKind,
    ToWorker,
)
from elastix.train.control.run_state import RunState

OUT_S = 15.0
"""So long a process may take to come out of a lost worker: user code may be at work in it."""


@dataclass
class _Process:
    worker: int | None = None
    place: int = 0
    site: str = ""
    up: bool = False  # it has said something, ever
    until: float | None = None  # on its way out of a lost worker, until then
    ended: bool = False  # its part of the run is over
    beat: Heartbeat | None = None
    kept: HeldPart | None = None
    distrusted: bool = False  # what it has of the State is not what others have


_OF_ALL = (OutcomeKind.FINISHED, OutcomeKind.LEFT, OutcomeKind.HALTED, OutcomeKind.DISMISSED)
"""Ends to which all processes of a worker come."""


class Crews:
    """See the module.

    Args:
        size: how many processes each worker is.
        room: how many further processes there may be, by site.
        again: whether a process that is lost makes room for another.

    Attributes:
        room: how many further processes there may be now, by site. Whoever knows better may say so.
        coming: how many there may be later, at any site.
    """

    def __init__(self, size: int, room: Mapping[str, int], *, again: bool) -> None:
        self.room = dict(room)
        self.coming = 0
        self._size = size
        self._again = again
        self._processes: dict[int, _Process] = {}
        self._next = 0
        self._heard: dict[int, set[int]] = {}  # by worker: places heard of since its last heartbeat
        self._founding: dict[int, int] = {}  # by place, the free processes that the next worker is
        self._founder: int | None = None

    # ------------------------------------------------------------------ as it is

    @property
    def free(self) -> list[int]:
        """Processes whose worker is lost, ready to be part of another."""
        return [n for n, p in self._processes.items() if p.worker is None]

    @property
    def workers(self) -> int:
        """For how many more workers there are processes, or room; one may have to make room.

        While some are on their way out, of those that are free alone: a fresh process takes longer.
        """
        if any(process.until is not None for process in self._processes.values()):
            return sum(self._complete(site) for site in self._sites())
        return sum(self._at_site(site) // self._size for site in self._sites())

    @property
    def more(self) -> bool:
        """Whether there may be a further one, when those on their way out have come."""
        coming = self.coming + sum(p.until is not None for p in self._processes.values())
        return any(self._at_site(s) + coming >= self._size for s in self._sites() or [""])

    def _sites(self) -> list[str]:
        return sorted({*self.room, *(self._processes[number].site for number in self.free)})

    def _complete(self, site: str) -> int:
        places = [p.place for p in map(self._processes.get, self.free) if p and p.site == site]
        return min(places.count(place) for place in range(self._size))

    def _at_site(self, site: str) -> int:
        free = sum(self._processes[number].site == site for number in self.free)
        return free + self.room.get(site, 0)

    def at(self, process: int) -> tuple[int, int] | None:
        """Worker and place of a process; None if it is free, or gone."""
        found = self._processes.get(process)
        return None if found is None or found.worker is None else (found.worker, found.place)

    def of(self, worker: int) -> list[int]:
        """The processes of a worker, by place, as far as they are there."""
        found = [(p.place, n) for n, p in self._processes.items() if p.worker == worker]
        return [number for _, number in sorted(found)]

    def site(self, worker: int) -> str:
        """Where the processes of a worker are."""
        return self._processes[self.of(worker)[0]].site

    def ended(self, process: int) -> bool:
        """Whether its part of the run is over."""
        return process in self._processes and self._processes[process].ended

    def overdue(self, now: float) -> list[int]:
        """Processes that have not come out of a lost worker in time: to be ended."""
        out = ((n, p.until) for n, p in self._processes.items())
        return [number for number, until in out if until is not None and now >= until]

    # ------------------------------------------------------------------ what happens

    def start(self, worker: int) -> tuple[list[int], list[int]]:
        """The processes that a new worker is to be, by place; and those that make room for it.

        Whoever was at the place before, and is free, is there again; numbers that are new are of
        processes to be started. Of several sites it is the one where the most are there already.

        Raises:
            ValueError: there is neither room nor a process for it.
        """
        fits = [site for site in self._sites() if self._at_site(site) >= self._size]
        if not fits:
            raise ValueError(f"no room for worker {worker}")
        founding, self._founding = self._founding, {}
        if founding:
            self._founder = worker
            site = self._processes[founding[0]].site
        else:
            site = max(fits, key=lambda site: len(self._waiting(site)))
        waiting, room = founding or self._waiting(site), self.room.get(site, 0)
        chosen, ended = [], []
        for place in range(self._size):
            number = waiting.get(place)
            if number is None:
                number, self._next = self._next, self._next + 1
                room -= 1
            chosen.append(number)
            self._processes[number] = _Process(worker, place, site, up=number in waiting.values())
        while room < 0:  # free ones at places that are taken
            ended.append(next(n for n in self.free if self._processes[n].site == site))
            del self._processes[ended[-1]]
            room += 1
        self.room[site] = room
        self._heard[worker] = set()
        return chosen, ended

    def _waiting(self, site: str) -> dict[int, int]:
        """By place a free process of that site."""
        free = [number for number in self.free if self._processes[number].site == site]
        return {self._processes[number].place: number for number in reversed(free)}

    def take_over(self, workers: Mapping[int, Sequence[tuple[int, str]]], known: int) -> None:
        """These workers were found at work.

        Args:
            workers: by worker its processes with their sites, in the order of their places.
            known: numbers below that may be taken.
        """
        self._next = known
        for worker, processes in workers.items():
            self._heard[worker] = set()
            for place, (number, site) in enumerate(processes):
                self._processes[number] = _Process(worker, place, site, up=True)

    def passed_on(self, process: int, worker: int, message: FromWorker) -> FromWorker | None:
        """What its worker is taken to say, if a process says that; None for nothing.

        The one at place 0 speaks for all. Each has snapshots of its own, may tell of what it sees
        of others, and hears the notice to go; signs of life are put together.
        """
        at = self.at(process)
        if at is None or at[0] != worker:
            return None  # it was of that worker, which is lost
        self._processes[process].up = True
        if isinstance(message, Heartbeat):
            return self.beat(process, message)
        return message if at[1] == 0 or isinstance(message, OF_EACH) else None

    def hears(self, process: int, to: int | None, message: ToWorker) -> int | None:
        """The worker in whose name a process is told that, if it is; None if it is not meant.

        What changes a group, and what ends a checkpoint or a run, is for all of a worker.
        """
        at = self.at(process)
        if at is None or to not in (None, at[0]):
            return None
        if isinstance(message, Order):
            return at[0] if message.place == at[1] else None
        of_all = isinstance(message, Membership | Dismiss | CheckpointEnded)
        return at[0] if of_all or at[1] == 0 else None

    def beat(self, process: int, beat: Heartbeat) -> Heartbeat | None:
        """A process gives a sign of life: that of its worker, if one is to be passed on.

        A worker is as alive as its most silent place. One whose process is not up yet is not
        silent: its start may take minutes, while mates that were of a lost worker are there at
        once. A worker waits for others only if all its places wait, in elastix: else one of them
        keeps the others waiting, and nobody outside does.
        """
        found = self._processes.get(process)
        if found is None or found.worker is None or found.until is not None:
            return None
        found.up, found.beat = True, beat
        heard = self._heard[found.worker]
        heard.add(found.place)
        mates = [self._processes[n] for n in self.of(found.worker)]
        up = {mate.place for mate in mates if mate.up}
        if len(mates) < self._size or 0 not in up or not up <= heard:
            return None
        heard.clear()
        beats = [mate.beat for mate in mates if mate.beat is not None]
        waiting = len(beats) == self._size and all(one.waiting for one in beats)
        return replace(beats[0], waiting=waiting, passed=sum(one.passed for one in beats))

    def break_up(self, worker: int, now: float) -> list[int]:
        """A worker is lost: those of its processes that are to come out."""
        mates = [n for n in self.of(worker) if not self._processes[n].ended]
        for number in mates:
            self._processes[number].until = now + OUT_S
        return mates

    def freed(self, process: int, kept: HeldPart | None = None) -> None:
        """It has come out, and has kept that of the State."""
        found = self._processes.get(process)
        if found is not None:
            kept = None if found.distrusted else kept
            self._processes[process] = _Process(
                place=found.place, site=found.site, up=True, kept=kept
            )

    # ------------------------------------------------------------------ no worker is whole

    def distrust(self, worker: int) -> None:
        """It is lost because it has another State than the others: nobody goes on from that."""
        for number in self.of(worker):
            self._processes[number].distrusted = True

    @property
    def leaving(self) -> bool:
        """Whether some are on their way out of a lost worker."""
        return any(process.until is not None for process in self._processes.values())

    def found_from(self, state: RunState, after: int) -> HeldPart | None:
        """Let the next worker be free processes that have all parts of one State, if there are.

        The run goes back. What others have of steps that are given up is forgotten: steps of the
        same numbers come again, and parts of the two do not go together.

        Args:
            state: what the journal has.
            after: a State that is no further than this step is of no use.

        Returns:
            Which State it is, with the events that the journal lacks; None if a part of each is
            lost, or an event.
        """
        parts: dict[tuple[Any, ...], list[int]] = {}
        for number in self.free:
            kept = self._processes[number].kept
            if kept is not None and kept.step > after:
                site = self._processes[number].site
                key = kept.step, kept.following, kept.places, kept.asked, site
                parts.setdefault(key, []).append(number)
        stands, found = after, None
        for key in sorted(parts, reverse=True):
            founding, found = self._of_one_step(parts[key], state)
            if found is not None:
                self._founding, stands = founding, found.step
                break
        for process in self._processes.values():
            if process.kept is not None and process.kept.step > stands:
                process.kept = None
        return found

    def _of_one_step(
        self, numbers: Sequence[int], state: RunState
    ) -> tuple[dict[int, int], HeldPart | None]:
        """By place those who have a State in parts, and that; some may have taken its step again.

        Who was given the State after the step goes with those whom the journal knows.
        """
        there = [self._processes[number] for number in numbers]
        kept = [(p.place, n, p.kept) for p, n in zip(there, numbers, strict=True) if p.kept]
        taken = {one.generation for _, _, one in kept if one.generation is not None}
        generations: list[int | None] = [*sorted(taken, reverse=True)] or [None]
        for generation in generations:
            fits = [part for part in kept if part[2].generation in (generation, None)]
            places = {place: number for place, number, _ in fits}
            if len(places) < self._size:
                continue
            fits.sort(key=lambda part: -part[0])  # what the first place would say counts
            told = dict(untold for _, _, one in fits for untold in one.untold)
            one = fits[0][2]
            lacks = range(state.sequence + 1, one.following)
            if not set(lacks) <= told.keys():
                continue
            later = state.copy()
            for number in lacks:
                later.take(told[number], number)
            if later.takes(one.step, generation):
                untold = tuple((number, told[number]) for number in lacks)
                return places, replace(one, generation=generation, untold=untold)
        return {}, None

    @property
    def founding(self) -> bool:
        """Whether all those that the next worker is to be are there yet."""
        return bool(self._founding)

    def founds(self, worker: int) -> bool:
        """Whether its processes have come with the parts of one State."""
        return worker == self._founder

    # ------------------------------------------------------------------ start and end

    def over(self, process: int, kind: OutcomeKind) -> bool:
        """Its part of the run is over, in that way: whether that is its worker's end.

        What all come to, the one at place 0 says for them; whatever else befalls one is what
        befalls its worker.
        """
        self._processes[process].ended = True
        return kind not in _OF_ALL or self._processes[process].place == 0

    def gone(self, process: int) -> int | None:
        """A process has ended: the worker that is lost by it, if one is."""
        found = self._processes.pop(process, None)
        if found is None:
            return None
        if process in self._founding.values():
            self._founding = {}
        self.room[found.site] = self.room.get(found.site, 0) + self._again
        lost = found.worker is not None and not found.ended and found.until is None
        return found.worker if lost else None
