"""What the report tells of a campaign: a small record per trial, and what follows from them. Pure.

The records are filled from the campaign's own (see sources.py); nothing here knows how a trial
was found or run.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from elastix.flat import flatten
from elastix.search.pareto import dominates

Mode = Literal["min", "max"]
_FOREST = 100  # trees
_LATEST = 1000  # trials that it learns from
_ENOUGH = 10  # scored trials before importance is told


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial.

    Attributes:
        number: from 0 in its campaign.
        config: plain JSON values, nested or not.
        state: waiting, running, interrupted, paused, finished, stopped, failed or refused.
        values: of the objectives, as the train function reported them; empty without a score.
        curve: the first objective after each report, in order.
        ref: of its stored model.
        parent: number of the trial it was changed from.
        provider: number of the trial whose tensors it began with, if another one.
        inherited: share of its tensors' bytes that came from there, 0 to 1; None for nothing.
        epochs: passes over the data that it made.
        lineage_epochs: those, and those of the ancestors its tensors come from.
        asked_s, started_s, finished_s: seconds since the Unix epoch.
        losses: workers lost while it ran.
        starved: how often it ran out of memory and was run again.
        peak_bytes: the most that its worker held; 0: unknown.
        traceback: of a train function that raised.
    """

    number: int
    config: Mapping[str, Any]
    state: str
    values: tuple[float, ...] = ()
    curve: tuple[float, ...] = ()
    ref: str | None = None
    parent: int | None = None
    provider: int | None = None
    inherited: float | None = None
    epochs: float = 0.0
    lineage_epochs: float = 0.0
    asked_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    losses: int = 0
    starved: int = 0
    peak_bytes: int = 0
    traceback: str | None = None

    @property
    def scored(self) -> bool:
        """It may be compared with others."""
        return (
            self.state not in ("failed", "refused")
            and bool(self.values)
            and all(map(math.isfinite, self.values))
        )


@dataclass(frozen=True, kw_only=True)
class CampaignRecord:
    """One campaign.

    Attributes:
        objectives: names of the metrics and "min" or "max" for each; the first decides on best.
        facts: what else is worth telling, by name: searcher, executor, inheritance.
        budget: of trials; None without one.
        began, last: of the campaign and of its latest event, seconds since the Unix epoch.
        controls: the best, run again without inheritance; `parent` says which.
        idle_s: of the time from `began` to `last`, how long no process was at work.
        outcome: finished, failed or interrupted; empty while it goes on.
        message: why it failed.
    """

    name: str
    objectives: tuple[tuple[str, Mode], ...]
    trials: tuple[TrialRecord, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    began: float = 0.0
    last: float = 0.0
    idle_s: float = 0.0
    controls: tuple[TrialRecord, ...] = ()
    outcome: str = "finished"
    message: str = ""

    @property
    def metric(self) -> str:
        """The first objective."""
        return self.objectives[0][0]

    @cached_property
    def scored(self) -> tuple[TrialRecord, ...]:
        """Trials that can be compared, in order."""
        return tuple(trial for trial in self.trials if trial.scored)

    @property
    def best(self) -> TrialRecord | None:
        """By the first objective; of equal ones the earliest. Controls decide, if one has one."""
        controls = [control for control in self.controls if control.scored]
        return min(controls or self.scored, key=self.loss, default=None)

    def loss(self, trial: TrialRecord) -> float:
        """The first objective, lower is better."""
        return self._losses(trial)[0]

    def _losses(self, trial: TrialRecord) -> tuple[float, ...]:
        pairs = zip(trial.values, self.objectives, strict=True)
        return tuple(value if mode == "min" else -value for value, (_, mode) in pairs)

    @cached_property
    def by_number(self) -> Mapping[int, TrialRecord]:
        """Trials by number."""
        return {trial.number: trial for trial in self.trials}

    def ancestry(self, trial: TrialRecord) -> list[TrialRecord]:
        """A trial and those it derives from, nearest first."""
        known = self.by_number
        line = {trial.number: trial}
        while (parent := known.get(-1 if trial.parent is None else trial.parent)) is not None:
            if parent.number in line:
                break
            line[parent.number] = trial = parent
        return list(line.values())

    def best_so_far(self, trials: Iterable[TrialRecord]) -> Iterator[TrialRecord]:
        """Those of `trials`, in the order given, that are better than all before."""
        bar = math.inf
        for trial in trials:
            if trial.scored and self.loss(trial) < bar:
                bar = self.loss(trial)
                yield trial

    def front(self) -> list[TrialRecord]:
        """Trials that no other one beats in every objective, by the first of them.

        With one objective the second is the epochs that went into the tensors: what it cost.
        """
        points = [(self._costs(trial), trial) for trial in self.scored]
        points.sort(key=lambda point: (point[0], point[1].number))  # whoever is beaten comes later
        front: list[tuple[tuple[float, ...], TrialRecord]] = []
        for costs, trial in points:
            if not any(dominates(other, costs) for other, _ in front):
                front.append((costs, trial))
        return [trial for _, trial in front]

    def _costs(self, trial: TrialRecord) -> tuple[float, ...]:
        losses = self._losses(trial)
        return losses if len(losses) > 1 else (*losses, trial.lineage_epochs)


def columns(trials: Sequence[TrialRecord]) -> dict[str, list[Any]]:
    """Parameters that differ between trials, by name; None where a trial does not have one."""
    rows = [flatten(trial.config, lists="all") for trial in trials]
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in found.items() if len(set(map(repr, values))) > 1}


@dataclass(frozen=True)
class Importance:
    """How much of the score's differences each parameter explains.

    Attributes:
        shares: by parameter, the greatest first, their sum 1.
        explained: R2 of the forest on trials that a tree had not seen; little trust below 0.
    """

    shares: Mapping[str, float]
    explained: float


def importance(campaign: CampaignRecord) -> Importance | None:
    """Permutation importance in a forest of trees over the scored trials.

    Source: Breiman, Random Forests, 2001.

    Returns:
        None if fewer than ten trials have a score, nothing varies, or nothing was found.
    """
    from sklearn.ensemble import RandomForestRegressor  # a second to import
    from sklearn.inspection import permutation_importance

    trials = campaign.scored[-_LATEST:]
    varied = columns(trials)
    target = np.array([campaign.loss(trial) for trial in trials])
    if len(trials) < _ENOUGH or not varied or np.ptp(target) == 0:
        return None
    table = np.column_stack([_codes(values) for values in varied.values()])
    ranks = np.argsort(np.argsort(target)).astype(float)  # one diverged trial must not decide
    forest = RandomForestRegressor(
        _FOREST, oob_score=True, min_samples_leaf=2, max_features=0.5, random_state=0
    )
    forest.fit(table, ranks)
    found = permutation_importance(forest, table, ranks, n_repeats=5, random_state=0)
    raw = np.clip(found["importances_mean"], 0.0, None)
    if raw.sum() <= 0:
        return None
    pairs = zip(varied, (raw / raw.sum()).tolist(), strict=True)
    return Importance(dict(sorted(pairs, key=lambda pair: -pair[1])), float(forest.oob_score_))


def _codes(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Numbers as they are; other values by their order; what is not there below all others."""
    if all(v is None or _is_number(v) for v in values):
        numbers = [v for v in values if v is not None]
        absent = min(numbers) - 1.0
        return np.array([absent if v is None else float(v) for v in values])
    order = {text: i for i, text in enumerate(sorted({str(v) for v in values if v is not None}))}
    return np.array([-1.0 if v is None else float(order[str(v)]) for v in values])


def _is_number(value: Any) -> bool:  # noqa: ANN401 - of a configuration
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
