"""Who is cut off, from what workers say about whom they cannot reach. Pure.

A worker that fails to connect to its group says which members it could not reach, itself if it
could reach no meeting at all. What fails is the way between two, so each statement is about a pair,
and does not say which of them is to blame. A pair counts when it has failed in two generations and
for longer than the timeout; it is forgotten when both have been in one group. Then:

- whoever says of itself that it is cut off is; unless all who train say so, since then it is the
  meeting that cannot be reached;
- of a newcomer and a worker that trains it is the newcomer: nobody who trains goes on its account;
- else it is the one that occurs in most pairs. Of two that say it of each other, the younger.

One is named at a time, and the others have as long again to show that it was only that one.

An operation may also fail in every group, though all can be connected: a worker has run out of
files, say. Nobody is to blame then, and each new group would be as the last. After some of them, in
which no operation has ended and nobody was lost, the run is given up with what failed last.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastix.errors import TrainError
from elastix.train.control.messages import Suspect

_GROUPS_IN_VAIN = 5
_TIMEOUTS_IN_VAIN = 3

Pair = tuple[int, int]
"""Two workers, the lower id first; one and the same for a worker that has no network."""


def cut_off(
    pairs: Iterable[Pair], trusted: Collection[int], hints: Iterable[Pair] = ()
) -> int | None:
    """The worker to be taken out, if these pairs cannot reach each other; None for nobody.

    Args:
        pairs: see Pair. It is one that occurs in them.
        trusted: workers that train, or all founders before there are any.
        hints: pairs that have failed too, but not for long; they tell which of two it is.
    """
    pairs = set(pairs)
    alone = {a for a, b in pairs if a == b}
    if alone and not alone.issuperset(trusted):
        return max(alone, key=lambda worker: (worker not in trusted, worker))
    accused = {worker for a, b in pairs if a != b for worker in (a, b)}
    accused = {worker for worker in accused if worker not in trusted} or accused
    failing = Counter(worker for a, b in pairs.union(hints) if a != b for worker in (a, b))
    return max(accused, key=lambda worker: (failing[worker], worker), default=None)


@dataclass
class _Failing:
    since: float
    generations: int = 1
    last: int = 0  # the newest of them


class Reachability:
    """Keeps what workers have said. All times are seconds of one monotonic clock.

    Args:
        timeout_s: for so long a pair must have failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._failing: dict[Pair, _Failing] = {}
        self._heard: dict[int, int] = {}  # worker to the newest generation that it suspected
        self._gone: set[int] = set()  # their ids are not given out again
        self._error = ""
        self._vain = _Failing(0.0, 0)  # groups since an operation has ended, or somebody went

    def hear(self, worker: int, message: Suspect, now: float) -> bool:
        """A worker could not connect in a generation, or an operation failed there.

        Returns:
            False if it has said so of this generation already; then nothing changes.
        """
        generation = message.generation
        if self._heard.get(worker, -1) >= generation:
            return False
        self._heard[worker] = generation
        self._error = f"worker {worker}: {message.error}"
        if not self._vain.generations:
            self._vain.since = now
        self._vain.generations += generation > self._vain.last
        self._vain.last = max(generation, self._vain.last)
        for other in message.unreachable - self._gone:  # it was said before it was known
            pair = (min(worker, other), max(worker, other))
            known = self._failing.setdefault(pair, _Failing(now, 0))
            known.generations += known.last != generation  # both may say it
            known.last = generation
        return True

    def was_away(self, seconds: float, now: float) -> None:
        """Nobody could hear anything for so long; what was heard since counts from `now`."""
        for failing in (*self._failing.values(), self._vain):
            failing.since = min(failing.since + seconds, now)

    def settled(self, members: Collection[int]) -> None:
        """These are all in one group."""
        self._drop(pair for pair in self._failing if pair[0] in members and pair[1] in members)

    def progress(self) -> None:
        """An operation has ended."""
        self._vain.generations = 0

    def in_vain(self, now: float) -> TrainError | None:
        """The error that ends the run, if group after group has failed; None as long as it may."""
        for_s, groups = now - self._vain.since, self._vain.generations
        if groups < _GROUPS_IN_VAIN or for_s < _TIMEOUTS_IN_VAIN * self._timeout_s:
            return None
        return TrainError(
            f"an operation of the group failed in {groups} groups one after the other, for "
            f"{for_s:.0f} s (FailureConfig.hang_timeout_s is {self._timeout_s:g}), though no "
            f"worker was lost and none is cut off. The run was stopped. The last error, on "
            f"{self._error}"
        )

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        self._gone.add(worker)
        self.progress()
        self._heard.pop(worker, None)
        self._drop(pair for pair in self._failing if worker in pair)

    def verdict(self, trusted: Collection[int], now: float) -> int | None:
        """The worker that is cut off for good; None for nobody. See `cut_off`."""
        if not self._failing:
            return None
        lasting = [
            pair
            for pair, known in self._failing.items()
            if known.generations > 1 and now - known.since > self._timeout_s
        ]
        found = cut_off(lasting, trusted, self._failing)
        if found is not None:
            self.forget(found)
            for known in self._failing.values():
                known.since, known.generations = now, 0
        return found

    def _drop(self, pairs: Iterable[Pair]) -> None:
        for pair in list(pairs):
            del self._failing[pair]
