"""Rungs: whether a trial goes on after a report, pauses until it may be promoted, or stops.

Pure: no clock, no store, no executor. A rule is told how far a trial has come and what its losses
are; it answers with a Verdict. Several objectives are compared by Pareto rank (pareto.py).

Invariant: the verdict on a report that is repeated after a crash does not count the trial twice,
and a trial that was promoted from a rung is not held at that rung again.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, ClassVar, Protocol, runtime_checkable

from elastix.arguments import check_fields, checked
from elastix.errors import ConfigError
from elastix.search.ordered import Ordered
from elastix.search.pareto import Losses, order


class Verdict(StrEnum):
    """What happens to a trial after a report."""

    CONTINUE = "continue"
    PAUSE = "pause"  # keep its State; `promotable` may name it later
    STOP = "stop"


@runtime_checkable
class Rungs(Protocol):
    """Decides. One loop calls it; the same calls give the same verdicts.

    If it has `levels`, trials pause after so many reports, and a report there is told of when the
    trial has paused or ended. If it says `follows_from_reports = True`, its state is not kept, and
    a campaign that goes on tells it all reports again.
    """

    def report(self, number: int, level: int, losses: Losses) -> Verdict:
        """A trial has losses at a resource level (its epochs so far, 1 after the first)."""
        ...

    def promotable(self) -> list[int]:
        """Paused trials that may go on, best first, the highest rung first.

        A trial is named until `promote` says that it goes on, or `drop` that it does not.
        """
        ...

    def promote(self, number: int) -> None:
        """A trial that was paused, or was to pause and did not, goes on from where it stands."""
        ...

    def drop(self, number: int) -> None:
        """A trial is over (finished, failed, given up); it is not promoted any more."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All it knows, as JSON values."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what another one of the same arguments knew."""
        ...


@dataclass
class _Rung:
    """Who has come to a rung, and who of them is held there.

    With one objective both are kept in order, by loss and then by number, so that who is among the
    best is found by a search; with several, all are sorted into fronts.

    Attributes:
        losses: of each that has come, the latest.
        ordered: of those with a finite loss.
        held: of those of them that are paused here.
        paused: all that are.
        passed: who may not be held here again.
    """

    losses: dict[int, Losses] = field(default_factory=dict)
    ordered: Ordered[tuple[float, int]] = field(default_factory=Ordered)
    held: Ordered[tuple[float, int]] = field(default_factory=Ordered)
    paused: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    _order: list[int] | None = field(default=None, init=False, repr=False)  # of several objectives

    def put(self, number: int, losses: Losses) -> None:
        """It has come, or comes again; with other losses it is held no more."""
        if self.losses.get(number) == losses:
            return
        self.release(number)
        if number in self.losses:
            _take(self.ordered, self.losses[number], number)
        self.losses[number] = losses
        self._order = None
        if _single(losses):
            self.ordered.add((losses[0], number))

    def hold(self, number: int) -> None:
        """It pauses here."""
        if number not in self.paused:
            self.paused.add(number)
            if _single(self.losses[number]):
                self.held.add((self.losses[number][0], number))

    def release(self, number: int) -> None:
        """It does not, or no more."""
        if number in self.paused:
            self.paused.remove(number)
            _take(self.held, self.losses[number], number)

    def is_best(self, number: int, count: int) -> bool:
        """Whether it is among so many of the best; never without finite losses."""
        own = self.losses[number]
        if _single(own):
            return self.ordered.below((own[0], number)) < count
        return number in self._ranked(count)

    def promotable(self, count: int) -> list[int]:
        """Who is paused and among so many of the best, best first."""
        if not self.paused or not count:
            return []
        if all(len(losses) == 1 for losses in islice(self.losses.values(), 1)):
            if not self.ordered:
                return []
            return [number for _, number in self.held.until(self.ordered.at(count - 1))]
        return [number for number in self._ranked(count) if number in self.paused]

    def _ranked(self, count: int) -> list[int]:
        if self._order is None:  # a sort into fronts costs the square of their number
            numbers = sorted(self.losses)
            self._order = [numbers[i] for i in order([self.losses[n] for n in numbers])]
        return [n for n in self._order[:count] if all(map(math.isfinite, self.losses[n]))]


def _take(ordered: Ordered[tuple[float, int]], losses: Losses, number: int) -> None:
    if _single(losses):
        ordered.remove((losses[0], number))


@checked
@dataclass
class Asha:
    """Asynchronous successive halving that pauses and promotes.

    Rungs are at `first`, `first * eta`, `first * eta**2` .. levels, below `last`. At each, a trial
    goes on if it is among the best 1/eta of all that have come there; otherwise it pauses. As more
    come, a paused one may turn out to be among the best 1/eta, and is promoted. From `last` on no
    trial is held; the train function ends by itself.

    A paused trial costs nothing but its stored State, so nothing is ever stopped here.

    Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys'20.

    Attributes:
        first: level of the lowest rung.
        eta: the best 1/eta of the trials at a rung go on.
        last: level from which on trials are left alone.
    """

    first: int = 1
    eta: int = 3
    last: int = 81
    _rungs: dict[int, _Rung] = field(default_factory=dict, init=False, repr=False)
    _paused: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # by trial

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.first <= self.last or self.eta < 2:
            raise ConfigError(
                f"Asha(first={self.first!r}, eta={self.eta!r}, last={self.last!r}): whole numbers "
                "with 1 <= first <= last, and eta >= 2. Nothing was started."
            )

    @property
    def levels(self) -> list[int]:
        """Where the rungs are, lowest first."""
        found, level = [], self.first
        while level < self.last:
            found.append(level)
            level *= self.eta
        return found

    def report(self, number: int, level: int, losses: Losses) -> Verdict:
        """See Rungs. A trial that reports less often than at every rung is held at the next one."""
        due = [rung for rung in self.levels if rung <= level < rung * self.eta]
        if not due or level >= self.last:
            return Verdict.CONTINUE
        level = due[0]
        rung = self._rungs.setdefault(level, _Rung())
        if number in rung.passed:
            return Verdict.CONTINUE
        rung.put(number, tuple(losses))
        if rung.is_best(number, self._count(rung)):
            rung.passed.add(number)
            self.drop(number)
            return Verdict.CONTINUE
        if self._paused.get(number) != level:
            self.drop(number)
        rung.hold(number)
        self._paused[number] = level
        return Verdict.PAUSE

    def _count(self, rung: _Rung) -> int:
        """How many are the best there."""
        return len(rung.losses) // self.eta

    def promotable(self) -> list[int]:
        """See Rungs."""
        rungs = [rung for _, rung in sorted(self._rungs.items(), reverse=True)]
        return [number for rung in rungs for number in rung.promotable(self._count(rung))]

    def promote(self, number: int) -> None:
        """See Rungs."""
        level = self._paused.get(number)
        if level is not None:
            self._rungs[level].passed.add(number)
            self.drop(number)

    def drop(self, number: int) -> None:
        """See Rungs. Its losses still count for the others."""
        level = self._paused.pop(number, None)
        if level is not None:
            self._rungs[level].release(number)

    def state_dict(self) -> dict[str, Any]:
        """See Rungs."""
        # In columns: a list for each trial would have Python's collector look through all there is.
        return {
            "columns": [
                {
                    "level": level,
                    "numbers": list(rung.losses),
                    "losses": [repr(loss) for losses in rung.losses.values() for loss in losses],
                    "passed": sorted(rung.passed),
                    "paused": sorted(rung.paused),
                }
                for level, rung in self._rungs.items()
            ]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Rungs."""
        self._rungs, self._paused = {}, {}
        columns = state_dict["columns"] if "columns" in state_dict else _columns(state_dict)
        for column in columns:
            rung = self._rungs[column["level"]] = _Rung(passed=set(column["passed"]))
            numbers, losses = column["numbers"], _floats(column["losses"])
            each = len(losses) // max(1, len(numbers))
            for place, number in enumerate(numbers):
                rung.put(number, losses[place * each : (place + 1) * each])
            for number in column["paused"]:
                rung.hold(number)
                self._paused[number] = column["level"]


def _columns(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an earlier version has written, trial by trial."""
    passed = dict(state_dict["passed"])
    return [
        {
            "level": level,
            "numbers": [number for number, _ in here],
            "losses": [loss for _, losses in here for loss in losses],
            "passed": passed.get(level, ()),
            "paused": [number for number, at in state_dict["paused"] if at == level],
        }
        for level, here in state_dict["rungs"]
    ]


@dataclass
class _Course:
    """What one trial reported, and the figures that follow from it.

    Attributes:
        last: the highest level.
        sums: of all its losses.
        best: of its finite losses, each by itself; None as long as there are none.
    """

    reports: dict[int, Losses] = field(default_factory=dict)
    last: int = 0
    sums: Losses = ()
    best: Losses | None = None

    def add(self, level: int, losses: Losses) -> None:
        """The next report."""
        self.sums = _each(sum, self.sums, losses) if self.reports else losses
        if all(map(math.isfinite, losses)):
            self.best = losses if self.best is None else _each(min, self.best, losses)
        self.reports[level] = losses
        self.last = level

    @property
    def mean(self) -> Losses:
        """Of its reports so far; empty before the first."""
        return tuple(value / len(self.reports) for value in self.sums)


@dataclass
class _Level:
    """The means of the trials that have come to a level; those of a single loss in order too."""

    means: dict[int, Losses] = field(default_factory=dict)
    ordered: Ordered[float] = field(default_factory=Ordered)

    def put(self, number: int, mean: Losses) -> None:
        self.means[number] = mean
        if _single(mean):
            self.ordered.add(mean[0])

    def take(self, number: int) -> None:
        mean = self.means.pop(number)
        if _single(mean):
            self.ordered.remove(mean[0])


@checked
@dataclass
class Median:
    """Stops a trial whose best report so far is worse than what most others had by then.

    The others count by the mean of their reports up to the same level. This is generous to slow
    starters, whose best report is compared with those means. A trial that is stopped keeps the
    score of its last report, and leaves no model.

    With one objective a report costs one search in an ordered list, however many trials there
    are. With several it costs a sort of all that have come as far into Pareto fronts.

    Source: Golovin et al., Google Vizier, KDD'17.

    Attributes:
        grace: levels during which nothing is stopped.
        others: how many others must have come as far before anything is stopped.
    """

    # What it knows are the reports; whoever has those need not keep its state as well.
    follows_from_reports: ClassVar[bool] = True

    grace: int = 1
    others: int = 5
    _courses: dict[int, _Course] = field(default_factory=dict, init=False, repr=False)
    _levels: dict[int, _Level] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.grace < 0 or self.others < 1:
            raise ConfigError(
                f"Median(grace={self.grace!r}, others={self.others!r}): whole numbers with "
                "grace >= 0 and others >= 1. Nothing was started."
            )

    def report(self, number: int, level: int, losses: Losses) -> Verdict:
        """See Rungs."""
        self._learn(number, level, tuple(losses))
        if level <= self.grace:
            return Verdict.CONTINUE
        others = len(self._levels[level].means) - 1
        if others < self.others:
            return Verdict.CONTINUE
        return Verdict.STOP if 2 * self._better(number, level) > others else Verdict.CONTINUE

    def _learn(self, number: int, level: int, losses: Losses) -> None:
        course = self._courses.setdefault(number, _Course())
        if level > course.last:
            self._append(number, course, level, losses)
            return
        # The trial does again what it had done: all its means from here on may be others.
        for at in range(self.grace + 1, course.last + 1):
            self._levels[at].take(number)
        anew = self._courses[number] = _Course()
        for at, value in sorted({**course.reports, level: losses}.items()):
            self._append(number, anew, at, value)

    def _append(self, number: int, course: _Course, level: int, losses: Losses) -> None:
        """At a level without a report of its own a trial has the mean that it had before."""
        for silent in range(max(course.last, self.grace) + 1, level):
            self._levels.setdefault(silent, _Level()).put(number, course.mean)
        course.add(level, losses)
        if level > self.grace:
            self._levels.setdefault(level, _Level()).put(number, course.mean)

    def _better(self, number: int, level: int) -> int:
        """How many others were better at that level than this trial's best; a tie is not."""
        here = self._levels[level]
        own, best = here.means[number], self._courses[number].best or (math.inf,)
        if len(own) == 1:
            itself = _single(own) and own[0] < best[0]  # as rounding may have it
            return here.ordered.below(best[0]) - itself
        theirs = [here.means[n] for n in self._courses if n != number and n in here.means]
        return order([best, *theirs]).index(0)

    def promotable(self) -> list[int]:
        """Nobody: this rule never pauses."""
        return []

    def promote(self, number: int) -> None:
        """Nothing to do."""

    def drop(self, number: int) -> None:
        """Nothing to do: what it reported still counts for the others."""

    def state_dict(self) -> dict[str, Any]:
        """See Rungs."""
        return {
            "reports": [
                [number, [[level, _texts(losses)] for level, losses in course.reports.items()]]
                for number, course in self._courses.items()
            ]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Rungs."""
        self._courses, self._levels = {}, {}
        for number, reports in state_dict["reports"]:
            for level, losses in reports:
                self._learn(number, level, _floats(losses))


def _each(of: Callable[[Losses], float], a: Losses, b: Losses) -> Losses:
    return tuple(map(of, zip(a, b, strict=True)))


def _single(mean: Losses) -> bool:
    """Whether it is one finite number, which can stand in an ordered list."""
    return len(mean) == 1 and math.isfinite(mean[0])


def _texts(losses: Losses) -> list[str]:
    return [repr(loss) for loss in losses]  # JSON has no NaN


def _floats(texts: list[str]) -> tuple[float, ...]:
    return tuple(map(float, texts))
