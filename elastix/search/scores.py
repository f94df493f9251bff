"""What the reports of a trial come to: the last value of each metric, and its losses. Pure.

None is no value: a report that has it for a metric says nothing new of that metric.
"""

from collections.abc import Mapping
from typing import Any

from elastix.errors import SearchError
from elastix.events import take_in
from elastix.search.trial import Objectives

Results = Mapping[int, Mapping[str, Any]]
"""Reports by their place, from 0."""


def merged(results: Results) -> Mapping[str, Any]:
    """The last value of each metric; None for one that never had any.

    Where the last report says all of that, it is this report itself: as a rule it does, and a
    campaign holds both for each of its trials.
    """
    found: dict[str, Any] = {}
    last: Mapping[str, Any] = {}
    for _, last in sorted(results.items()):
        take_in(found, last)
    return last if _same(last, found) else found


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether these are the same values under the same names, in the same order."""
    pairs = zip(a.items(), b.items(), strict=False)
    return len(a) == len(b) and all(m == n and x is y for (m, x), (n, y) in pairs)


class Latest:
    """The last value of each metric of one trial, whose reports come one by one, in any order.

    Attributes:
        seq: place of the last report; -1 before any.
    """

    def __init__(self, results: Results) -> None:
        self.seq = -1
        self._found: dict[str, tuple[int, Any]] = {}  # with the place of its report
        for seq, metrics in results.items():
            self.add(seq, metrics)

    def add(self, seq: int, metrics: Mapping[str, Any]) -> None:
        """One more report."""
        self.seq = max(self.seq, seq)
        for name, value in metrics.items():
            if value is not None and (name not in self._found or self._found[name][0] <= seq):
                self._found[name] = seq, value

    def losses(self, objectives: Objectives) -> tuple[float, ...] | None:
        """None without a number for each objective."""
        found = self._found
        try:
            return objectives.losses({n: found[n][1] for n in objectives.names if n in found})
        except SearchError:
            return None


def losses(objectives: Objectives, results: Results) -> tuple[float, ...] | None:
    """After all reports; None without a number for each objective."""
    return Latest(results).losses(objectives)
