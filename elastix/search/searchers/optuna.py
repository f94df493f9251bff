"""Optuna's TPE through ask and tell. Needs the extra `elastix[optuna]`.

This file and search/optuna_journal.py alone import optuna.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

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

from elastix.arguments import checked, require
from elastix.errors import ConfigError
from elastix.search.config_values import Parameter, Values, active, is_uneven, plain
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Config, Suggestion, Trial, config_key

if TYPE_CHECKING:
    from numpy.random import RandomState
    from optuna.storages import InMemoryStorage

_STARTUP = 10  # of TPESampler


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

    Its random proposals at the beginning are drawn from the space's distributions. What it proposes
    later follows from results alone.

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS'11.

    Args:
        options: arguments of TPESampler. Pending points count as bad ones, unless you pass
            constant_liar=False. The seed is the campaign's.

    Raises:
        ConfigError: TPESampler does not take the options.
    """

    history = HistoryOnceStarted()
    proposes_parents = False
    _drawn = 0  # of one that an earlier version has started, and Tune has pickled

    @property
    def hears_of_paused(self) -> bool:
        """See Searcher. They count as pruned; with several objectives Optuna knows no pruning."""
        return self.history.objectives == 1

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - Optuna's own
        self.options = {"constant_liar": True, **options}
        try:
            with warnings.catch_warnings():  # "experimental": that is told when it is used
                warnings.simplefilter("ignore")
                TPESampler(**{"seed": 0, **self.options})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Optuna's TPESampler does not take {options}: {str(error).rstrip('.')}. Nothing "
                "was started."
            ) from error
        require(
            "seed" not in options,
            f"seed={options.get('seed')!r}: proposals go by the campaign's seed. Nothing was "
            "started. Give RunConfig(seed=...).",
        )
        require(
            options.get("constraints_func") is None,
            "constraints_func: it would know a trial's configuration alone, and what it says is "
            "forgotten when a campaign goes on, and of trials at rungs. Nothing was started. Give "
            "Space(..., valid=...): what that does not allow is never proposed.",
        )

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher."""
        self.history = SearchHistory.begin(space, objectives, seed)
        # [config, losses or None if failed, is pending, reach], in order
        self._log: list[list[Any]] = []
        self._numbers: dict[str, int] = {}
        self._study = _quiet_study(objectives)
        uneven = any(map(is_uneven, self.history.space.flat.values()))
        # Optuna would draw these evenly.
        self._drawn = int(self.options.get("n_startup_trials", _STARTUP)) if uneven else 0

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
        if self._drawn and self._known() < self._drawn:
            return self._fresh(rng)
        self._study.sampler = TPESampler(seed=int(rng.randint(2**31)), **self.options)
        trial = self._study.ask()
        config = suggest(trial, history.space)
        if history.is_new(config) and history.space.is_valid(config):
            self._numbers[config_key(config)] = trial.number
            self._log.append([config, None, True, None])
            self._revise(trial.number, self._log[-1])  # as it is when the state is read again
            return config
        self._study.tell(trial, state=State.FAIL)  # Optuna ignores what failed
        self._log.append([config, None, False, None])
        return self._fresh(rng)

    def _known(self) -> int:
        """How many trials Optuna learns from."""
        liar = self.options["constant_liar"]
        return sum(losses is not None or (pending and liar) for _, losses, pending, _ in self._log)

    def _fresh(self, rng: "RandomState") -> Config | None:
        """A random one by the space's own distributions."""
        fresh = self.history.fresh(rng)
        if fresh is not None:
            self._add(fresh, None, pending=True)
        return fresh

    def _add(
        self,
        config: Config,
        losses: Sequence[float] | None,
        pending: bool,
        reach: int | None = None,
    ) -> None:
        """Enter a trial that Optuna did not propose."""
        if pending or losses is not None:
            self._numbers[config_key(config)] = len(self._log)
        self._log.append([config, None if losses is None else list(losses), pending, reach])
        self._study.add_trial(self._frozen(*self._log[-1]))

    def _frozen(
        self, config: Config, losses: Sequence[float] | None, pending: bool, reach: int | None
    ) -> optuna.trial.FrozenTrial:
        """A trial in Optuna's form; one that did not run to its end is pruned."""
        params, distributions = parameters(self.history.space, config)
        pruned = losses is not None and reach is not None
        state = State.RUNNING if pending else State.FAIL if losses is None else State.COMPLETE
        return optuna.trial.create_trial(
            state=State.PRUNED if pruned else state,
            values=None if losses is None or pruned else list(losses),
            intermediate_values={reach: losses[0]} if losses and reach is not None else None,
            params=params,
            distributions=distributions,
        )

    def _revise(self, number: int, entry: list[Any]) -> None:
        """Replace a trial by what it has become. Optuna itself lets none go on that has ended."""
        self._log[number] = entry
        frozen, storage = self._frozen(*entry), cast("InMemoryStorage", self._study._storage)
        frozen.number = number
        frozen._trial_id = storage.get_trial_id_from_study_id_trial_number(
            self._study._study_id, number
        )
        storage._set_trial(frozen._trial_id, frozen)

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. A failed trial is ignored."""
        self.history.tell(trials)
        for trial in trials:
            losses = list(trial.losses) if trial.scored else None
            reach = trial.reach if losses and self.history.objectives == 1 else None
            number = self._numbers.get(trial.suggestion.key)
            if number is None:
                if self.history.space.is_valid(trial.config):
                    self._add(trial.config, losses, pending=False, reach=reach)
                continue
            _, _, pending, before = self._log[number]
            if reach is not None or before is not None:
                self._revise(number, [trial.config, losses, False, reach])
            elif pending:
                self._study.tell(number, losses, State.FAIL if losses is None else State.COMPLETE)
                self._log[number] = [trial.config, losses, False, None]
            elif self.history.space.is_valid(trial.config):
                self._add(trial.config, losses, pending=False)

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return {**self.history.state_dict(), "log": [list(entry) for entry in self._log]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
        self._log, self._numbers = [], {}
        self._study = _quiet_study(self.history.objectives)
        for config, losses, pending, *reach in state_dict["log"]:  # an earlier version has no reach
            self._add(config, losses, pending, *reach)


def _quiet_study(objectives: int) -> optuna.Study:
    """A study in memory, made without the announcement that Optuna prints."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(directions=["minimize"] * objectives)
    finally:
        optuna.logging.set_verbosity(level)
