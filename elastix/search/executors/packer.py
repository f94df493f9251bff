"""Which trial goes where, by memory. Pure: no Ray, no torch, no clock.

A *seat* is a worker that runs one trial after the other; a *host* is what seats share the memory
of: a machine, or one GPU. A trial has a *reservation*: what its worker may hold while it runs,
the worker's own libraries included.

Not here: measuring memory (trial_memory.py), or what becomes of a trial that had too little
(trial_endings).

Invariants: what is reserved on a host, idle seats counted by what they hold anyway, is never more
than the host has, but for what a seat holds idle that came later. A trial that fits no host as it
is goes to the host that can give most, once nothing else runs there, and meanwhile nobody behind it
takes that room. The same calls give the same placements.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

_LEARNED_FROM = 200  # the latest trials
_ENOUGH = 5  # before any of them counts
_QUANTILE = 0.95
_CONSTANT = 16 << 20  # bytes that a prediction lacks however small the model


def quantile(values: list[float], share: float) -> float:
    """The smallest of the values that `share` of them do not exceed. Of none: NaN."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def more(reserved: int, peak: int) -> int:
    """What a trial that had too little gets next: twice that, and 1.5 times its peak at least."""
    return max(2 * reserved, 3 * peak // 2)


class Experience:
    """What trials took beyond what their workers held before, beside what was predicted.

    That is a multiple of the prediction and a constant, found by least squares of the relative
    errors, and a factor that so many of the trials stay below.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=_LEARNED_FROM)  # predicted, taken

    def learn(self, *, predicted: int, base: int, peak: int, idle: int = 0) -> None:
        """A trial is over; all in bytes. One without a prediction or a peak teaches nothing.

        What earlier trials have left in a worker a trial uses again. So it counts as taken, unless
        it is more than what the trial added: then nobody knows how much of it was used.

        Args:
            predicted: by the estimate of a step.
            base: what the worker held when the trial began.
            peak: the most that it held.
            idle: what it holds before any trial; 0: unknown, and then it is `base`.
        """
        idle = min(idle or base, base)
        if predicted > 0 and peak > 0 and base - idle <= max(0, peak - base):
            self._seen.append((predicted, max(0, peak - idle)))

    def expect(self, predicted: int, share: float = _QUANTILE) -> int | None:
        """Bytes beyond its worker's own that this share of trials stays below; None: unknown."""
        if len(self._seen) < _ENOUGH:
            return None
        slope, constant = self._line()
        ratios = [taken / (slope * p + constant) for p, taken in self._seen]
        return math.ceil(quantile(ratios, share) * (slope * predicted + constant))

    def _line(self) -> tuple[float, float]:
        """How often the prediction, and how many bytes beside; both above 0."""
        weights = [(p + _CONSTANT) ** -2 for p, _ in self._seen]
        total = sum(weights)
        mean = sum(w * p for w, (p, _) in zip(weights, self._seen, strict=True)) / total
        level = sum(w * t for w, (_, t) in zip(weights, self._seen, strict=True)) / total
        spread = both = 0.0
        for w, (p, t) in zip(weights, self._seen, strict=True):
            spread += w * (p - mean) ** 2
            both += w * (p - mean) * (t - level)
        slope = both / spread if spread > 0 else 0.0
        constant = level - slope * mean
        if slope > 0 and constant > 0:
            return slope, constant
        return max(level, 1.0) / (mean + _CONSTANT), max(level, 1.0) / (mean / _CONSTANT + 1)


class Reserve:
    """How much is reserved for a trial that has not starved.

    Args:
        wanted: bytes for each; "auto": what most of the latest needed, in proportion to what was
            predicted for them if anything was; None: nothing in particular, an equal part of the
            host.
    """

    def __init__(self, wanted: int | str | None) -> None:
        self._wanted = wanted
        self._experience = Experience()
        self._peaks: deque[float] = deque(maxlen=_LEARNED_FROM)

    def learn(self, *, predicted: int, base: int, peak: int, idle: int = 0) -> None:
        """A trial ended well, or starved at that peak."""
        self._experience.learn(predicted=predicted, base=base, peak=peak, idle=idle)
        if peak > 0:
            self._peaks.append(float(peak))

    def bytes_for(self, predicted: int, idle: int) -> int:
        """For a worker that holds `idle` bytes anyway; 0: an equal part of the host."""
        if self._wanted is None:
            return 0
        if isinstance(self._wanted, int):
            return self._wanted
        expected = self._experience.expect(predicted) if predicted else None
        if expected is not None:
            return idle + expected
        if len(self._peaks) < _ENOUGH:
            return 0
        return math.ceil(quantile(list(self._peaks), _QUANTILE))


@dataclass
class _Host:
    capacity: int
    expected: int = 1  # seats
    used: int = 0  # what its seats reserve, together
    idle: dict[int, int] = field(default_factory=dict)  # bytes that each seat holds anyway
    most: int = 0  # what one trial can have: all but what the other seats hold idle
    equal_part: int = 0  # what a trial gets that wants nothing in particular

    def seated(self) -> None:
        """Seats have come or gone."""
        self.most = self.capacity - sum(self.idle.values()) + min(self.idle.values(), default=0)
        self.equal_part = min(max(1, self.capacity // self.expected), self.most)


@dataclass
class _Seat:
    host: _Host
    idle: int
    held: dict[int, int] = field(default_factory=dict)  # trial to reservation; the first one runs
    reserved: int = 0  # its trials run one after the other

    def reserve(self) -> None:
        """Trials have come or gone, or it has come."""
        before, self.reserved = self.reserved, max([self.idle, *self.held.values()])
        self.host.used += self.reserved - before


@dataclass(frozen=True)
class Placement:
    """A trial goes to a seat.

    Attributes:
        reserved: bytes.
        alone: nothing can run beside it, and no host can give more.
    """

    trial: int
    seat: int
    reserved: int
    alone: bool


class Packer:
    """Places trials on seats, first come first served, each where it fits best."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._seats: dict[int, _Seat] = {}
        self._names: dict[int, str] = {}
        self._at: dict[int, int] = {}  # trial to seat
        self._waiting: dict[int, int] = {}
        self._keeps: dict[int, str] = {}  # a trial that does not fit yet, to the host that will do

    # ------------------------------------------------------------------ who is there

    def enter(self, seat: int, host: str, *, idle: int, capacity: int, expected: int = 1) -> None:
        """A seat is ready.

        Args:
            seat: its number.
            host: whose memory it shares.
            idle: bytes that it holds whether it runs anything or not.
            capacity: bytes that this host's seats may hold; the first one to say so decides.
            expected: how many seats the host will have, for equal parts.
        """
        there = self._hosts.setdefault(host, _Host(capacity))
        there.idle[seat] = max(1, idle)
        there.expected = max(expected, there.expected, len(there.idle))
        there.capacity = max(there.capacity, 1 + sum(there.idle.values()))  # they are there
        there.seated()
        self._seats[seat] = _Seat(there, there.idle[seat])
        self._seats[seat].reserve()
        self._names[seat] = host

    def leave(self, seat: int) -> None:
        """It is gone, with what it held."""
        gone = self._seats.pop(seat, None)
        if gone is None:
            return
        gone.host.used -= gone.reserved
        for trial in gone.held:
            del self._at[trial]
        name = self._names.pop(seat)
        del gone.host.idle[seat]
        gone.host.seated()
        if not gone.host.idle:
            del self._hosts[name]
            self._keeps = {trial: kept for trial, kept in self._keeps.items() if kept != name}

    # ------------------------------------------------------------------ what they do

    def wait(self, trial: int, wanted: int) -> None:
        """A trial wants a seat and so many bytes; 0: an equal part of the host it comes to."""
        self._waiting[trial] = max(0, wanted)

    def forget(self, trial: int) -> bool:
        """It wants none any more; whether it did."""
        self._keeps.pop(trial, None)
        return self._waiting.pop(trial, None) is not None

    def end(self, trial: int) -> None:
        """Its seat is done with it."""
        number = self._at.pop(trial, None)
        if number is not None:
            seat = self._seats[number]
            del seat.held[trial]
            seat.reserve()

    @property
    def waiting(self) -> Mapping[int, int]:
        """Trials without a seat, the first to come first, with what they want."""
        return self._waiting

    @property
    def used(self) -> Mapping[str, tuple[int, int]]:
        """Of each host the bytes that are reserved, and those that there are."""
        return {name: (host.used, host.capacity) for name, host in self._hosts.items()}

    def room(self, depth: int = 1) -> int:
        """How many more trials could come if memory did not matter.

        Args:
            depth: how many trials a seat may hold, of which it runs the first.
        """
        free = sum(max(0, depth - len(seat.held)) for seat in self._seats.values())
        return max(0, free - len(self._waiting))

    def idle_for(self, wanted: int) -> bool:
        """Whether a seat with nothing to do has so many bytes."""
        return any(
            not seat.held and seat.host.capacity - seat.host.used >= max(0, wanted - seat.reserved)
            for seat in self._seats.values()
        )

    def place(self, depth: int = 1) -> list[Placement]:
        """Give seats to those that wait, as far as they fit.

        One that does not fit keeps the host on which it will for itself: nobody behind it is
        placed there before it.
        """
        placed: list[Placement] = []
        kept: set[str] = set()
        largest = max((host.most for host in self._hosts.values()), default=0)
        for trial, wanted in list(self._waiting.items()):
            if len(kept) == len(self._hosts):
                break
            found = self._best(min(wanted, largest), depth, kept)
            if found is None:
                kept.add(self._keeps.setdefault(trial, self._target(min(wanted, largest))))
                continue
            number, need = found
            seat = self._seats[number]
            seat.held[trial] = need
            seat.reserve()
            self._at[trial] = number
            self.forget(trial)
            placed.append(Placement(trial, number, need, need >= largest))
        return placed

    # ------------------------------------------------------------------ by the numbers

    def _best(self, wanted: int, depth: int, kept: set[str]) -> tuple[int, int] | None:
        """The seat with least to do, of these the one whose host has least left afterwards."""
        fit = []
        for number, seat in self._seats.items():
            if len(seat.held) < depth and self._names[number] not in kept:
                host, need = seat.host, wanted or seat.host.equal_part
                left = host.capacity - host.used - max(0, need - seat.reserved)
                if left >= 0:
                    fit.append((len(seat.held), left, number, need))
        if not fit:
            return None
        _, _, number, need = min(fit)
        return number, need

    def _target(self, wanted: int) -> str:
        """The host that will have room for it: of those that can, the one with least to do."""
        able = [
            (host.used, name)
            for name, host in self._hosts.items()
            if host.most >= (wanted or host.equal_part)
        ]
        return min(able)[1]
