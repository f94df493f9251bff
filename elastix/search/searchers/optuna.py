"""Optuna's TPE through ask and tell. Needs the extra `elastix[optuna]`.

This file and search/optuna_journal.py alone import optuna.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from ConfigSpace import ConfigurationSpace, Constant
from ConfigSpace.hyperparameters import (
    CategoricalHyperparameter,
    OrdinalHyperparameter,
)
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import TPESampler
from optuna.trial import TrialState as State

from elastix.arguments import checked
from elastix.search.config_values import Parameter, Values, active, plain
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Config, Suggestion, Trial, config_key


def distribution(hyperparameter: Parameter) -> BaseDistribution:
    """A hyperparameter as an Optuna distribution. Ordered choices become integers."""
    if isinstance(hyperparameter, CategoricalHyperparameter):
        return CategoricalDistribution([plain(choice) for choice in hyperparameter.choices])
    if isinstance(hyperparameter, OrdinalHyperparameter):
        return IntDistribution(0, len(hyperparameter.sequence) - 1)
    if isinstance(hyperparameter, Constant):
        return CategoricalDistribution([plain(hyperparameter.value)])
    low, high = plain(hyperparameter.lower), plain(hyperparameter.upper)  # type: ignore[attr-defined]
    log = bool(getattr(hyperparameter, "log", False))
    whole = isinstance(low, int) and isinstance(high, int)
    return IntDistribution(low, high, log) if whole else FloatDistribution(low, high, log)


def suggest(trial: optuna.Trial, space: Space) -> Config:
    """Get a configuration from an Optuna trial; inactive hyperparameters are not suggested.

    You can use it in an objective of your own: `build(suggest(trial, space))`.
    """
    flat = space.flat
    values = active(flat, lambda name: _suggested(trial, flat[name]))
    return space.from_flat(values)


def _suggested(trial: optuna.Trial, hyperparameter: Parameter) -> Any:  # noqa: ANN401
    value = trial._suggest(hyperparameter.name, distribution(hyperparameter))
    if isinstance(hyperparameter, OrdinalHyperparameter):
        return hyperparameter.sequence[value]
    return value


def parameters(space: Space, config: Config) -> tuple[Values, dict[str, BaseDistribution]]:
    """A configuration in Optuna's form: parameters and their distributions."""
    flat = space.flat
    params, distributions = {}, {}
    for name, value in space.to_flat(config).items():
        hyperparameter = flat[name]
        if isinstance(hyperparameter, OrdinalHyperparameter):
            value = list(hyperparameter.sequence).index(value)
        params[name] = value
        distributions[name] = distribution(hyperparameter)
    return params, distributions


@checked
class Optuna:
    """Optuna's TPE (tree-structured Parzen estimator).

    Args:
        options: arguments of TPESampler. Pending points count as bad ones, unless you pass
            constant_liar=False.
    """

    history = HistoryOnceStarted()
    proposes_parents = False

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - Optuna's own
        self.options = {"constant_liar": True, **options}

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher."""
        self.history = SearchHistory.begin(space, objectives, seed)
        self._log: list[list[Any]] = []  # [config, losses or None if failed, is pending], in order
        self._numbers: dict[str, int] = {}
        self._study = _quiet_study(objectives)

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher."""
        found = []
        for _ in range(n):
            config = self._propose()
            if config is None:
                break
            found.append(self.history.propose(Suggestion(config)))
        return found

    def _propose(self) -> Config | None:
        history = self.history
        rng = history.rng()
        self._study.sampler = TPESampler(seed=int(rng.randint(2**31)), **self.options)
        trial = self._study.ask()
        config = suggest(trial, history.space)
        if history.is_new(config) and history.space.is_valid(config):
            self._numbers[config_key(config)] = trial.number
            self._log.append([config, None, True])
            return config
        self._study.tell(trial, state=State.FAIL)  # Optuna ignores what failed
        self._log.append([config, None, False])
        fresh = history.fresh(rng)
        if fresh is not None:
            self._add(fresh, None, pending=True)
        return fresh

    def _add(self, config: Config, losses: Sequence[float] | None, pending: bool) -> None:
        """Enter a trial that Optuna did not propose."""
        params, distributions = parameters(self.history.space, config)
        state = State.RUNNING if pending else State.FAIL if losses is None else State.COMPLETE
        self._numbers[config_key(config)] = len(self._log)
        self._log.append([config, None if losses is None else list(losses), pending])
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state,
                values=None if losses is None else list(losses),
                params=params,
                distributions=distributions,
            )
        )

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. A failed trial is ignored."""
        self.history.tell(trials)
        for trial in trials:
            losses = list(trial.losses) if trial.scored else None
            number = self._numbers.get(trial.suggestion.key)
            if number is None or not self._log[number][2]:
                if self.history.space.is_valid(trial.config):
                    self._add(trial.config, losses, pending=False)
                continue
            self._study.tell(number, losses, State.FAIL if losses is None else State.COMPLETE)
            self._log[number] = [trial.config, losses, False]

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return {**self.history.state_dict(), "log": [list(entry) for entry in self._log]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
        self._log, self._numbers = [], {}
        self._study = _quiet_study(self.history.objectives)
        for config, losses, pending in state_dict["log"]:
            self._add(config, losses, pending)


def _quiet_study(objectives: int) -> optuna.Study:
    """A study in memory, made without the announcement that Optuna prints."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(directions=["minimize"] * objectives)
    finally:
        optuna.logging.set_verbosity(level)
