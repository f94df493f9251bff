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


def merged(results: Results) -> dict[str, Any]:
    """The last value of each metric; None for one that never had any."""
    found: dict[str, Any] = {}
    for _, metrics in sorted(results.items()):
        take_in(found, metrics)
    return found


def losses(
    objectives: Objectives, results: Results, reports: int | None = None
) -> tuple[float, ...] | None:
    """After so many reports, all by default; None without a number for each objective."""
    latest: dict[str, Any] = {}
    missing = set(objectives.names)
    for seq in range(max(results, default=-1) if reports is None else reports - 1, -1, -1):
        found = results.get(seq, {})
        latest |= {name: found[name] for name in missing if found.get(name) is not None}
        missing -= latest.keys()
        if not missing:
            break
    try:
        return objectives.losses(latest)
    except SearchError:
        return None
