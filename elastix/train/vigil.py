"""Who is silent, who holds up all others, and who is slow: from workers' signs of life. Pure.

Workers send a Heartbeat a few times within the timeout. Four things are told apart:

- *silent*: no sign at all. The process is stopped, its host is dead, or one of its threads keeps
  the interpreter to itself.
- *holding up*: signs come, but the training thread passes no place that it would note, and all
  others wait for it. It hangs in user code, or in a library.
- *unreachable*: signs come, but others cannot connect to it, however often the group is made anew;
  see doubts.
- *slow*: it gets on, and takes longer than the others for the same work.

Two more end the run: workers that are in different calls, which no one of them could complete, and
an operation that fails in group after group.

What to do about it is the controller's business.
"""

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastix.comm.calls import apart
from elastix.errors import TrainError
from elastix.train.control.messages import Heartbeat
from elastix.train.doubts import Doubts

_SLOW_STEPS = 20
"""Steps over which a worker's pace is taken."""


@dataclass
class _Watched:
    sign: Heartbeat
    heard: float  # the last sign of all
    moved: float  # the last that differed
    waits: float | None  # since when it has waited, without a break
    entered_step: int | None = None  # committed steps when it came into the group
    since: tuple[float, Heartbeat] | None = None  # where its pace is taken from
    busy_s: float | None = None  # own work for a step


class Vigil:
    """Keeps the last sign of each worker. All times are seconds of one monotonic clock.

    Args:
        timeout_s: of silence, and of holding up the others.
        first_step_s: what a worker may take for its first step in the group, with others waiting:
            compilers and caches are at work then.
    """

    def __init__(self, timeout_s: float, first_step_s: float) -> None:
        self.timeout_s = timeout_s
        self._first_step_s = max(timeout_s, first_step_s)
        self._watched: dict[int, _Watched] = {}
        self._doubts = Doubts(timeout_s)

    def hear(self, worker: int, sign: Heartbeat, now: float) -> None:
        """A sign of life has come."""
        known = self._watched.get(worker)
        if known is None:
            entered = sign.step if sign.generation else None
            self._watched[worker] = _Watched(sign, now, now, now if sign.waiting else None, entered)
            return
        before, here = ((s.passed, s.generation, s.waiting, s.waited_s) for s in (known.sign, sign))
        moved = before != here
        if sign.call[0] != known.sign.call[0]:
            self._doubts.progress()
        if sign.step > known.sign.step or sign.generation != known.sign.generation:
            self._take_pace(known, sign, now)
        if not sign.waiting:
            known.waits = None
        elif moved:
            known.waits = now
        if moved:
            known.moved = now
        if known.entered_step is None and sign.generation:
            known.entered_step = sign.step
        known.sign, known.heard = sign, now

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._watched.pop(worker, None)
        self._doubts.forget(worker)

    def step(self, worker: int) -> int:
        """Committed steps at a worker's last sign; 0 if there was none."""
        return self._watched[worker].sign.step if worker in self._watched else 0

    def silent(self, now: float) -> list[int]:
        """Workers that have given no sign for longer than the timeout."""
        return [w for w, known in self._watched.items() if now - known.heard > self.timeout_s]

    def holding_up(self, members: Iterable[int], now: float) -> list[int]:
        """Members that have not moved for longer than the timeout while all others wait for them.

        Nobody, if all of them compute or all of them wait.
        """
        watched = {w: self._watched[w] for w in members if w in self._watched}
        waits = [known.waits for known in watched.values() if known.waits is not None]
        stuck = [w for w, known in watched.items() if known.waits is None]
        if not waits or not stuck:
            return []
        patience = {w: self._patience(watched[w]) for w in stuck}
        unmoved = all(now - watched[w].moved > patience[w] for w in stuck)
        return stuck if unmoved and now - max(waits) > max(patience.values()) else []

    def doubt(
        self, worker: int, generation: int, error: str, unreachable: Iterable[int], now: float
    ) -> bool:
        """A worker failed in `generation`, and could not reach these; see Doubts.hear."""
        return self._doubts.hear(worker, generation, error, unreachable, now)

    def settled(self, members: Collection[int]) -> None:
        """All of them are in one group: what failed between them before is forgotten."""
        self._doubts.settled(members)

    def unreachable(self, trusted: Collection[int], now: float) -> int | None:
        """The worker that others cannot reach, if for longer than the timeout; told once.

        Args:
            trusted: workers that have the State, or all members before anybody has.
            now: as ever.
        """
        return self._doubts.verdict(trusted, now)

    def hopeless(self, now: float) -> TrainError | None:
        """The error that ends a run which would never get on; None as long as it may.

        Workers wait for each other in different calls, or an operation fails again and again.
        """
        numbered: dict[int, dict[int, int]] = {}
        for worker, known in self._watched.items():
            number, kind = known.sign.call
            if kind:
                numbered.setdefault(number, {})[worker] = kind
        for number, kinds in numbered.items():
            fault = apart(number, kinds)
            if fault is not None:
                return fault
        return self._doubts.in_vain(now)

    def slow(self, members: Iterable[int], factor: float) -> dict[int, float]:
        """Members whose own work for a step takes `factor` times that of the others, or more.

        Returns:
            Worker to how many times the median of the others it takes.
        """
        pace = {w: self._watched[w].busy_s for w in members if w in self._watched}
        known = {w: busy for w, busy in pace.items() if busy is not None}
        found = {}
        for worker, busy in known.items():
            others = [other for w, other in known.items() if w != worker]
            if others and (usual := statistics.median(others)) > 0 and busy >= factor * usual:
                found[worker] = busy / usual
        return found

    def _patience(self, known: _Watched) -> float:
        settled = known.entered_step is not None and known.sign.step > known.entered_step
        return self.timeout_s if settled else self._first_step_s

    def _take_pace(self, known: _Watched, sign: Heartbeat, now: float) -> None:
        """Own work for a step, over stretches in one group."""
        if known.since is None or sign.generation != known.since[1].generation:
            known.since = (now, sign)
            known.busy_s = None
            return
        then, before = known.since
        steps = sign.step - before.step
        if steps >= _SLOW_STEPS:
            known.busy_s = (now - then - (sign.waited_s - before.waited_s)) / steps
            known.since = (now, sign)
