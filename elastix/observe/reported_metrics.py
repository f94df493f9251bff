"""What a run reported: its history step by step, and the best value of one metric. Pure folds.

A report counts as long as its step does: what came after the step that a run went back to is void.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from elastix.events import (
    Event,
    Reported,
    Resumed,
    RunStarted,
    StateDropped,
    StateStored,
    comparable,
    take_in,
)


@dataclass(frozen=True)
class BestValue:
    """The best value of the metric that checkpoints go by.

    Attributes:
        step: after which it was reported.
        ref: of the State of that step; "" if none is stored.
    """

    metric: str
    value: float
    step: int
    ref: str = ""


class BestSoFar:
    """Follows one metric: `CheckpointConfig.best` as the run was started with it."""

    def __init__(self) -> None:
        self.metric: str | None = None
        self._mode = "max"
        self._found: list[BestValue] = []  # each better than the one before

    @property
    def value(self) -> BestValue | None:
        """The best until now; None if nothing was reported under that name."""
        return self._found[-1] if self._found else None

    def add(self, event: Event) -> None:
        """Count one more event."""
        match event:
            case RunStarted():
                goal = (event.checkpoint.get("best"), event.checkpoint.get("mode", "max"))
                if goal != (self.metric, self._mode):
                    self.metric, self._mode = goal
                    self._found.clear()
            case Reported():
                self._report(event.metrics.get(self.metric or ""), event.step)
            case Resumed():
                self._found = [best for best in self._found if best.step <= event.step]
            case StateStored():
                self._mark(event.step, "", event.ref)
            case StateDropped():
                self._mark(event.step, event.ref, "")

    def _report(self, reported: Any, step: int) -> None:  # noqa: ANN401 - whatever it was
        value = comparable(reported)
        if value is None or self.metric is None:
            return
        best = self.value
        if best is None or (value > best.value if self._mode == "max" else value < best.value):
            self._found.append(BestValue(self.metric, value, step))

    def _mark(self, step: int, before: str, after: str) -> None:
        """Note which State has a value: it is stored after its step was reported."""
        self._found = [
            replace(best, ref=after) if best.step == step and best.ref in (before, "") else best
            for best in self._found
        ]


def history(events: Iterable[Event]) -> list[dict[str, Any]]:
    """A row for each step with a report: `step`, `seconds` since the run began, the metrics.

    Reports of one step share a row, the later ones counting. A metric that is called as one of the
    other columns is in `reported:NAME`.
    """
    rows: dict[int, dict[str, Any]] = {}
    began: float | None = None
    for event in events:
        if isinstance(event, RunStarted):
            began = event.t if began is None else began
        elif isinstance(event, Resumed):
            rows = {step: row for step, row in rows.items() if step <= event.step}
        elif isinstance(event, Reported):
            seconds = event.t - (event.t if began is None else began)
            row = rows.setdefault(event.step, {"step": event.step, "seconds": seconds})
            take_in(row, {_column(name): value for name, value in event.metrics.items()})
    return [rows[step] for step in sorted(rows)]


def _column(metric: str) -> str:
    return f"reported:{metric}" if metric in ("step", "seconds") else metric
