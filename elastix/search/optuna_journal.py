"""A campaign as a journal file of Optuna's, for optuna-dashboard. Needs `elastix[optuna]`.

Not here: Optuna as a searcher (searchers/optuna.py).
"""

import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from elastix.errors import Conflict

if TYPE_CHECKING:
    from elastix.search.results import Results
    from elastix.search.trial import Trial

_WHOLE = 2**53  # Optuna makes floats of numbers, and beyond that these lack whole ones

_STATES = {
    "waiting": TrialState.WAITING,
    "running": TrialState.RUNNING,
    "paused": TrialState.COMPLETE,
    "finished": TrialState.COMPLETE,
    "stopped": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "refused": TrialState.FAIL,
}


def write(results: "Results", path: Path, flat: "Iterable[Mapping[str, Any]]") -> Path:
    """Write every trial, with the values in the user's sense.

    Args:
        results: of the campaign.
        path: of the journal; `optuna-dashboard PATH` opens it.
        flat: the configurations, one for each trial, blocks spread out.

    Raises:
        Conflict: the file is there already; nothing was changed.
    """
    if path.exists():
        raise Conflict(f"{path} is there already. Nothing was changed. Choose another name.")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=results.facts["name"],
        storage=JournalStorage(JournalFileBackend(str(path))),
        directions=[
            "minimize" if mode == "min" else "maximize" for mode in results.objectives.modes
        ],
    )
    with warnings.catch_warnings():  # "experimental" for years
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(results.objectives.names))
    configs = [dict(config) for config in flat]
    distributions = _distributions(configs)
    frozen = [
        _frozen(trial, config, distributions, results)
        for trial, config in zip(results, configs, strict=True)
    ]
    study.add_trials(frozen)
    return path


def _frozen(
    trial: "Trial",
    config: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    results: "Results",
) -> FrozenTrial:
    state = _STATES[trial.state.value]
    scored = trial.scored and state is TrialState.COMPLETE
    ended = trial.finished_s if state.is_finished() else None
    found = optuna.trial.create_trial(
        state=state if scored or state is not TrialState.COMPLETE else TrialState.FAIL,
        values=list(results.objectives.values(trial.losses)) if scored else None,
        params=dict(config),
        distributions={name: distributions[name] for name in config},
        intermediate_values=_curve(trial, results),
        user_attrs={
            "trial": trial.number,
            "epochs": trial.epochs,
            "lineage_epochs": trial.lineage_epochs,
            "inherited": float((trial.inherited or {}).get("share", 0.0)),
            "parent": trial.suggestion.parent_number,
            "ref": trial.ref,
        },
    )
    found.datetime_start = datetime.fromtimestamp(trial.started_s) if trial.started_s else None
    if found.state.is_finished():
        found.datetime_complete = datetime.fromtimestamp(ended or trial.asked_s or 0.0)
    return found


def _curve(trial: "Trial", results: "Results") -> dict[int, float]:
    """The first objective after each report; Optuna has no curves for several."""
    if len(results.objectives.names) > 1:
        return {}
    name = results.objectives.names[0]
    values = {step: found.get(name) for step, found in enumerate(trial.results, start=1)}
    return {step: float(v) for step, v in values.items() if isinstance(v, int | float)}


def _distributions(configs: Iterable[Mapping[str, Any]]) -> dict[str, BaseDistribution]:
    """As wide as what was tried: the dashboard wants ranges, and spaces may have been changed."""
    seen: dict[str, list[Any]] = {}
    for config in configs:
        for name, value in config.items():
            seen.setdefault(name, []).append(value)
    return {name: _distribution(values) for name, values in seen.items()}


def _distribution(values: list[Any]) -> BaseDistribution:
    kinds = {type(value) for value in values}
    exact = all(abs(value) <= _WHOLE for value in values if type(value) is int)
    if kinds == {int} and exact:
        return IntDistribution(min(values), max(values))
    if kinds <= {int, float} and exact:
        return FloatDistribution(float(min(values)), float(max(values)))
    return CategoricalDistribution(list(dict.fromkeys(values)))
