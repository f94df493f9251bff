"""The failure detector: who is silent, who holds up all others, who is slow. Pure.

Workers send a Heartbeat a few times within the timeout. Four things are told apart:

- *silent*: no heartbeat at all. The process is stopped, its host is dead, or one of its threads
  keeps the interpreter to itself.
- *holding up*: heartbeats come, but the training thread passes no place that it would note, and all
  others wait for it. It hangs in user code, or in a library.
- *unreachable*: heartbeats come, but others cannot connect to it, however often the group is made
  anew; see reachability.
- *slow*: it gets on, and takes longer than the others for the same work.

If all wait for each other, nobody is to blame, and the group is made anew.

Two more end the run: workers that are in different calls, which no one of them could complete, and
an operation that fails in group after group.

What to do about it is the conductor's business. Of thousands of workers each sends a heartbeat a
second, so neither a heartbeat nor the question whether all is well looks at all of them: who was
heard of, and who moved, is kept in order of time, and paces in order of size.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from elastix.comm.protocol.calls import apart
from elastix.errors import TrainError
from elastix.train.control.messages import Heartbeat, Suspect
from elastix.train.control.reachability import Reachability

_SLOW_STEPS = 20
"""Steps over which a worker's pace is taken."""

_ENTERING = "enter", "meet"
"""Phases in which members wait for each other between two operations."""

_STILL = 10
"""So many timeouts all may wait for each other: a large tensor takes its time on a slow network."""

_DEAF = 3
"""So many timeouts nobody may be heard of: it may be this process that is cut off."""


@dataclass
class _Watched:
    beat: Heartbeat
    heard: float  # when the last one came
    moved: float  # when the last one came that differed
    entered_step: int | None = None  # committed steps when it came into the group
    since: tuple[float, Heartbeat] | None = None  # where its pace is taken from
    busy_s: float | None = None  # own work for a step


class FailureDetector:
    """Keeps the last heartbeat of each worker. All times are seconds of one monotonic clock.

    Args:
        timeout_s: of silence, and of holding up the others.
        first_step_s: what a worker may take for its first step in the group, with others waiting:
            compilers and caches are at work then.
    """

    def __init__(self, timeout_s: float, first_step_s: float) -> None:
        self._timeout_s = timeout_s
        self._first_step_s = max(timeout_s, first_step_s)
        self._still_s = _STILL * timeout_s
        self._watched: dict[int, _Watched] = {}
        self._by_heard: OrderedDict[int, None] = OrderedDict()  # who is longest unheard of first
        self._by_moved: OrderedDict[int, None] = OrderedDict()  # who is longest unmoved first
        self._waiting: set[int] = set()
        self._paces: list[tuple[float, int]] = []  # own work for a step and worker, in order
        self._calls: dict[int, dict[int, set[int]]] = {}  # operation to kind to workers in it
        self._mixed: set[int] = set()  # operations with workers in several kinds
        self._reachability = Reachability(timeout_s)

    def hear(self, worker: int, beat: Heartbeat, now: float) -> None:
        """A heartbeat has come."""
        if self._unheard(now):
            self.was_away(now - self._last_heard, now)
        known = self._watched.get(worker)
        if known is None:
            entered = beat.step if beat.generation else None
            self._watched[worker] = _Watched(beat, now, now, entered)
            self._by_heard[worker] = self._by_moved[worker] = None
            if beat.waiting:
                self._waiting.add(worker)
            self._enter_call(worker, beat.call)
            return
        before = known.beat
        self._by_heard.move_to_end(worker)
        known.heard = now
        if (beat.passed, beat.generation, beat.waiting, beat.waited_s) != (
            before.passed,
            before.generation,
            before.waiting,
            before.waited_s,
        ):
            self._by_moved.move_to_end(worker)
            known.moved = now
        if beat.waiting != before.waiting:
            (self._waiting.add if beat.waiting else self._waiting.discard)(worker)
        if beat.call != before.call:
            self._leave_call(worker, before.call)
            self._enter_call(worker, beat.call)
            if beat.call[0] != before.call[0]:
                self._reachability.progress()
        if beat.step > before.step or beat.generation != before.generation:
            self._take_pace(worker, known, beat, now)
        if known.entered_step is None and beat.generation:
            known.entered_step = beat.step
        known.beat = beat

    def was_away(self, seconds: float, now: float) -> None:
        """Nobody could hear anything for so long: it counts neither as silence nor as standing."""
        for known in self._watched.values():
            known.heard = min(known.heard + seconds, now)
            known.moved = min(known.moved + seconds, now)
        self._reachability.was_away(seconds, now)

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        known = self._watched.pop(worker, None)
        if known is not None:
            del self._by_heard[worker], self._by_moved[worker]
            self._waiting.discard(worker)
            self._leave_call(worker, known.beat.call)
            self._set_pace(worker, known, None)
        self._reachability.forget(worker)

    def silent(self, now: float) -> list[int]:
        """Workers from which no heartbeat has come for longer than the timeout.

        Nobody, while that may be for this process, which has heard of nobody.
        """
        if self._deaf(now):
            return []
        found = []
        for worker in self._by_heard:
            if now - self._watched[worker].heard <= self._timeout_s:
                break
            found.append(worker)
        return found

    def holding_up(self, members: Collection[int], now: float) -> list[int]:
        """Members that have not moved for longer than the timeout while all others wait for them.

        Nobody, if all of them compute or all of them wait.
        """
        if not self._waiting or self._deaf(now):
            return []
        if not self._unmoved(members, now, self._timeout_s):
            return []  # somebody gets on, or has only just begun to wait
        watched = {w: self._watched[w] for w in members if w in self._watched}
        waits = [known.moved for known in watched.values() if known.beat.waiting]
        stuck = [w for w, known in watched.items() if not known.beat.waiting]
        if not waits or not stuck:
            return []
        patience = {w: self._patience(watched[w]) for w in stuck}
        unmoved = all(now - watched[w].moved > patience[w] for w in stuck)
        return stuck if unmoved and now - max(waits) > max(patience.values()) else []

    def standing_still(self, members: Collection[int], now: float) -> bool:
        """Whether all members have waited for each other for too long.

        What they wait for must be lost: a network has dropped it and told nobody. Told once; the
        next time must last twice as long, since it may also be large.
        """
        if not self._waiting or self._deaf(now) or not self._unmoved(members, now, self._still_s):
            return False
        beats = [self._watched[w].beat for w in members if w in self._watched]
        together = any(beat.call[1] or beat.phase in _ENTERING for beat in beats)
        if not (together and all(beat.waiting for beat in beats)):
            return False  # else they may wait for newcomers, or for what is stored
        self._still_s *= 2
        return True

    @property
    def _last_heard(self) -> float:
        """When anybody was heard of."""
        return self._watched[next(reversed(self._by_heard))].heard

    def _unheard(self, now: float) -> bool:
        """Whether nobody, of several, was heard of for longer than the timeout."""
        return len(self._watched) > 1 and now - self._last_heard > self._timeout_s

    def _deaf(self, now: float) -> bool:
        """Whether that is so, and may be because this process is cut off from all of them."""
        return self._unheard(now) and now - self._last_heard <= _DEAF * self._timeout_s

    def _unmoved(self, members: Collection[int], now: float, seconds: float) -> bool:
        """Whether no member has moved for so long."""
        last = next((w for w in reversed(self._by_moved) if w in members), None)
        return last is not None and now - self._watched[last].moved > seconds

    def suspect(self, worker: int, message: Suspect, now: float) -> bool:
        """A worker's operation failed, and it could not reach some; see Reachability.hear."""
        return self._reachability.hear(worker, message, now)

    def settled(self, members: Collection[int]) -> None:
        """All of them are in one group: what failed between them before is forgotten."""
        self._reachability.settled(members)

    def unreachable(self, trusted: Collection[int], now: float) -> int | None:
        """The worker that others cannot reach, if for longer than the timeout; told once.

        Args:
            trusted: workers that have the State, or all members before anybody has.
            now: as ever.
        """
        return None if self._deaf(now) else self._reachability.verdict(trusted, now)

    def hopeless(self, now: float) -> TrainError | None:
        """The error that ends a run which would never get on; None as long as it may.

        Workers wait for each other in different calls, or an operation fails again and again.
        """
        for operation in sorted(self._mixed):
            kinds = self._calls[operation].items()
            error = apart(operation, {w: kind for kind, workers in kinds for w in workers})
            if error is not None:
                return error
        return self._reachability.in_vain(now)

    def slow(self, members: Collection[int], factor: float) -> dict[int, float]:
        """Members whose own work for a step takes `factor` times that of the others, or more.

        Returns:
            Worker to how many times the median of the others it takes; the slowest first.
        """
        found: dict[int, float] = {}
        for place in reversed(range(len(self._paces))):
            busy, worker = self._paces[place]
            usual = self._median_without(place)
            if usual <= 0 or busy < factor * usual:
                break  # nor is anybody who is faster
            if worker in members:
                found[worker] = busy / usual
        return found

    def _patience(self, known: _Watched) -> float:
        settled = known.entered_step is not None and known.beat.step > known.entered_step
        return self._timeout_s if settled else self._first_step_s

    def _take_pace(self, worker: int, known: _Watched, beat: Heartbeat, now: float) -> None:
        """Own work for a step, over stretches in one group."""
        if known.since is None or beat.generation != known.since[1].generation:
            known.since = (now, beat)
            self._set_pace(worker, known, None)
            return
        then, before = known.since
        steps = beat.step - before.step
        if steps >= _SLOW_STEPS:
            busy_s = (now - then - (beat.waited_s - before.waited_s)) / steps
            known.since = (now, beat)
            # Who follows from outside the group is compared with nobody.
            self._set_pace(worker, known, busy_s if beat.generation else None)

    def _set_pace(self, worker: int, known: _Watched, busy_s: float | None) -> None:
        if known.busy_s is not None:
            del self._paces[bisect_left(self._paces, (known.busy_s, worker))]
        known.busy_s = busy_s
        if busy_s is not None:
            insort(self._paces, (busy_s, worker))

    def _median_without(self, place: int) -> float:
        """Of all paces but the one at `place`; 0 if there is no other."""
        count = len(self._paces) - 1
        if not count:
            return 0.0
        low, high = (
            self._paces[i if i < place else i + 1][0] for i in ((count - 1) // 2, count // 2)
        )
        return (low + high) / 2

    def _enter_call(self, worker: int, call: tuple[int, int]) -> None:
        operation, kind = call
        if not kind:
            return
        kinds = self._calls.setdefault(operation, {})
        kinds.setdefault(kind, set()).add(worker)
        if len(kinds) > 1:
            self._mixed.add(operation)

    def _leave_call(self, worker: int, call: tuple[int, int]) -> None:
        operation, kind = call
        if not kind:
            return
        kinds = self._calls[operation]
        kinds[kind].discard(worker)
        if not kinds[kind]:
            del kinds[kind]
            if len(kinds) < 2:
                self._mixed.discard(operation)
            if not kinds:
                del self._calls[operation]
