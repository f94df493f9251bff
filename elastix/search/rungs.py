"""Rungs: whether a trial goes on after a report, pauses until it may be promoted, or stops.

Pure: no clock, no store, no executor. A rule is told how far a trial has come and what its losses
are; it answers with a Verdict. Several objectives are compared by Pareto rank (pareto.py).

Invariant: the verdict on a report that is repeated after a crash does not count the trial twice,
and a trial that was promoted from a rung is not held at that rung again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from elastix.errors import ConfigError
from elastix.search.pareto import Losses, order


class Verdict(StrEnum):
    """What happens to a trial after a report."""

    CONTINUE = "continue"
    PAUSE = "pause"  # keep its State; `promotable` may name it later
    STOP = "stop"


@runtime_checkable
class Rungs(Protocol):
    """Decides. One loop calls it; the same calls give the same verdicts."""

    def report(self, number: int, level: int, losses: Losses) -> Verdict:
        """A trial has losses at a resource level (its epochs so far, 1 after the first)."""
        ...

    def promotable(self) -> list[int]:
        """Paused trials that may go on, best first, the highest rung first.

        A trial is named until `promote` says that it goes on, or `drop` that it does not.
        """
        ...

    def promote(self, number: int) -> None:
        """A paused trial goes on from where it stands."""
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
class Asha:
    """Asynchronous successive halving that pauses and promotes.

    Rungs are at `first`, `first * eta`, `first * eta**2` .. levels, below `last`. At each, a trial
    goes on if it is among the best 1/eta of all that have come there; otherwise it pauses. As more
    come, a paused one may enter the best 1/eta: then it is promotable. From `last` on nobody is
    held; the train function ends by itself.

    A paused trial costs nothing but its stored State, so nothing is ever stopped here.

    Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys'20.

    Attributes:
        first: level of the lowest rung.
        eta: one of so many goes on.
        last: level from which on trials are left alone.
    """

    first: int = 1
    eta: int = 3
    last: int = 81
    _rungs: dict[int, dict[int, Losses]] = field(default_factory=dict, init=False, repr=False)
    _passed: dict[int, set[int]] = field(default_factory=dict, init=False, repr=False)
    _paused: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not (1 <= self.first <= self.last and self.eta >= 2):
            raise ConfigError(
                f"Asha(first={self.first}, eta={self.eta}, last={self.last}): levels must be "
                "1 <= first <= last, and eta >= 2. Nothing was started."
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
        rung = due[0]
        passed = self._passed.setdefault(rung, set())
        if number in passed:
            return Verdict.CONTINUE
        self._rungs.setdefault(rung, {})[number] = tuple(losses)
        if number in self._best(rung):
            passed.add(number)
            self._paused.pop(number, None)
            return Verdict.CONTINUE
        self._paused[number] = rung
        return Verdict.PAUSE

    def _best(self, rung: int) -> list[int]:
        """The best 1/eta at a rung, best first; never one without finite losses."""
        here = self._rungs[rung]
        numbers = sorted(here)
        ranked = [numbers[i] for i in order([here[n] for n in numbers])]
        return [n for n in ranked[: len(here) // self.eta] if all(map(math.isfinite, here[n]))]

    def promotable(self) -> list[int]:
        """See Rungs."""
        return [
            number
            for rung in sorted(self._rungs, reverse=True)
            for number in self._best(rung)
            if self._paused.get(number) == rung
        ]

    def promote(self, number: int) -> None:
        """See Rungs."""
        rung = self._paused.pop(number, None)
        if rung is not None:
            self._passed.setdefault(rung, set()).add(number)

    def drop(self, number: int) -> None:
        """See Rungs. Its losses still count for the others."""
        self._paused.pop(number, None)

    def state_dict(self) -> dict[str, Any]:
        """See Rungs."""
        return {
            "rungs": [[r, [[n, _texts(v)] for n, v in h.items()]] for r, h in self._rungs.items()],
            "passed": [[rung, sorted(numbers)] for rung, numbers in self._passed.items()],
            "paused": [[number, rung] for number, rung in self._paused.items()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Rungs."""
        self._rungs = {r: {n: _floats(v) for n, v in here} for r, here in state_dict["rungs"]}
        self._passed = {rung: set(numbers) for rung, numbers in state_dict["passed"]}
        self._paused = dict(state_dict["paused"])


@dataclass
class Median:
    """Stops a trial whose best report so far is worse than what most others had by then.

    What another had is the mean of its reports up to the same level. Generous to slow starters:
    the best of one is compared with means of the others.

    Source: Golovin et al., Google Vizier, KDD'17.

    Attributes:
        grace: levels during which nothing is stopped.
        others: how many others must have come as far before anything is stopped.
    """

    grace: int = 1
    others: int = 5
    _reports: dict[int, dict[int, Losses]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.grace < 0 or self.others < 1:
            raise ConfigError(
                f"Median(grace={self.grace}, others={self.others}): grace must be >= 0 and others "
                ">= 1. Nothing was started."
            )

    def report(self, number: int, level: int, losses: Losses) -> Verdict:
        """See Rungs."""
        mine = self._reports.setdefault(number, {})
        mine[level] = tuple(losses)
        if level <= self.grace:
            return Verdict.CONTINUE
        theirs = [
            _mean([v for at, v in reports.items() if at <= level])
            for other, reports in self._reports.items()
            if other != number and max(reports) >= level
        ]
        if len(theirs) < self.others:
            return Verdict.CONTINUE
        finite = [v for v in mine.values() if all(map(math.isfinite, v))]
        best = tuple(map(min, zip(*finite, strict=True))) if finite else (math.inf,)
        place = order([best, *theirs]).index(0)  # the first of equals: a tie is not worse
        return Verdict.STOP if 2 * place > len(theirs) else Verdict.CONTINUE

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
                [number, [[level, _texts(losses)] for level, losses in reports.items()]]
                for number, reports in self._reports.items()
            ]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Rungs."""
        self._reports = {
            number: {level: _floats(losses) for level, losses in reports}
            for number, reports in state_dict["reports"]
        }


def _mean(losses: list[Losses]) -> Losses:
    return tuple(sum(values) / len(values) for values in zip(*losses, strict=True))


def _texts(losses: Losses) -> list[str]:
    return [repr(loss) for loss in losses]  # JSON has no NaN


def _floats(texts: list[str]) -> tuple[float, ...]:
    return tuple(map(float, texts))
