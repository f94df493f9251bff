"""DeepHyper's CBO (Bayesian optimisation with a random forest as surrogate) through ask and tell.

DeepHyper does not remember pending points (asked twice, it proposes the same one), has state that
cannot be saved, writes into the current directory, and maximises. So no object of it is kept here:
observations and pending points are kept as plain values, and each `ask` makes a CBO, tells it all
of them (pending ones with a constant liar), and asks it.

This is the only file that imports deephyper.

Source: Ginsbourger et al., Kriging is well-suited to parallelize optimization, 2010 (the lie).
"""

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import numpy as np
from ConfigSpace import ConfigurationSpace
from deephyper.hpo import CBO, HpProblem
from deephyper.hpo.utils import get_inactive_value_of_hyperparameter
from deephyper.skopt.moo import MoScalarFunction
from deephyper.skopt.optimizer.optimizer import is_not_improving

from elastix.arguments import checked, require
from elastix.errors import ConfigError
from elastix.search.config_values import BELLS, Parameter, active, choices, generator, plain
from elastix.search.pareto import furthest
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Config, Suggestion, Trial

AcqOptimizer = Literal["auto", "sampling", "mixedga"]

_STRATEGY = "moo_scalarization_strategy"
_LONG_S = 60.0
_POINTS = 3_000
_POINTS_WITH_CONDITIONS = 250  # these are drawn and checked one by one


def problem(space: Space) -> HpProblem:
    """The space in DeepHyper's form: flat, with block sequences as conditional hyperparameters."""
    return HpProblem(space.flat)


class _Observed(NamedTuple):
    """What is kept of a trial. JSON writes it as a list. No losses: it failed. See Trial.reach."""

    values: dict[str, Any]
    losses: list[float] | None
    number: int = -1  # of what an earlier version has saved
    reach: int | None = None


@checked
class DeepHyper:
    """Bayesian optimisation with DeepHyper's CBO.

    Args:
        initial: number of random configurations at the start. By default twice the number of
            hyperparameters plus one.
        trial_s: roughly how long a trial takes, in seconds; only used by `acq_optimizer="auto"`.
        acq_optimizer: how the next point is found. "mixedga", DeepHyper's default, takes about
            0.7 s of CPU time per suggestion; "sampling" takes 0.05 s, and its results were no
            worse. "auto" uses "mixedga" for trials of a minute or longer.
        options: further arguments of CBO, such as surrogate_model or acq_func. Of those for several
            objectives, bounds and weights are in DeepHyper's sense: more is better, so a metric of
            mode "min" counts by its negative. If trials are paused or stopped early, it is given
            places in place of values, see `_losses`.

    Raises:
        ConfigError: impossible numbers, no such `acq_optimizer`, or a strategy that remembers what
            it was asked.
    """

    history = HistoryOnceStarted()
    proposes_parents = False
    hears_of_paused = True

    def __init__(
        self,
        initial: int | None = None,
        trial_s: float = 0.0,
        acq_optimizer: AcqOptimizer = "auto",
        **options: Any,  # noqa: ANN401 - DeepHyper's own
    ) -> None:
        if initial is not None and initial < 1:
            raise ConfigError(
                f"initial={initial!r}: a whole number >= 1, or None. Nothing was started."
            )
        if trial_s < 0:
            raise ConfigError(f"trial_s={trial_s!r}: seconds, a number >= 0. Nothing was started.")
        self.initial = initial
        chosen = "mixedga" if trial_s >= _LONG_S else "sampling"
        self.acq_optimizer = chosen if acq_optimizer == "auto" else acq_optimizer
        self.options = options
        require(
            not isinstance(options.get(_STRATEGY), MoScalarFunction),
            f"{_STRATEGY}={options.get(_STRATEGY)!r}: an object that remembers what it was asked, "
            "so a campaign that goes on would ask it something else. Nothing was started. Give the "
            f"name of a strategy, and moo_scalarization_weight.",
        )
        self._observed: list[_Observed] = []

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher.

        Raises:
            ConfigError: a hyperparameter has a normal or beta distribution, which DeepHyper
                cannot convert for its surrogate, or text beside numbers; or DeepHyper does not take
                the options. The message names them.
        """
        self.history = SearchHistory.begin(space, objectives, seed)
        for name, hyperparameter in self.history.space.flat.items():
            if isinstance(hyperparameter, BELLS):
                raise ConfigError(
                    f"{name} is a {type(hyperparameter).__name__}, which DeepHyper cannot model. "
                    "Nothing was started. Make it uniform, on a logarithmic scale perhaps, or use "
                    "another searcher."
                )
            kinds = {type(choice) for choice in choices(hyperparameter) or ()} - {type(None)}
            if str in kinds and len(kinds) > 1:
                raise ConfigError(
                    f"{name} has text and numbers as choices, which DeepHyper takes for text. "
                    "Nothing was started. Write all of them as text, or use another searcher."
                )
        self._problem = problem(self.history.space)
        self._inactive = {
            name: plain(get_inactive_value_of_hyperparameter(hyperparameter))
            for name, hyperparameter in self.history.space.flat.items()
        }
        if self.initial is None:
            self.initial = 2 * len(self._inactive) + 1
        if self.options:
            self._check_options(objectives)

    def _check_options(self, objectives: int) -> None:
        """Now, and not after the first random trials."""
        for name in ("moo_lower_bounds", "moo_scalarization_weight"):
            given = self.options.get(name)
            require(
                not isinstance(given, list | tuple) or len(given) == objectives,
                f"{name}={given!r} with {objectives} objectives: one number for each. Nothing was "
                "started.",
            )
        try:
            with self._search({}) as search:
                search._setup_optimizer()
        except Exception as error:  # pydantic's own among others
            raise ConfigError(
                f"DeepHyper does not take {self.options}: {error}. Nothing was started."
            ) from error

    @contextmanager
    def _search(self, options: Mapping[str, Any]) -> Iterator[CBO]:
        """A CBO that has been told nothing.

        Args:
            options: take the place of others.
        """
        history = self.history
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield CBO(
                self._problem,
                random_state=int(generator(history.seed, history.count).randint(2**31)),
                log_dir=scratch,
                checkpoint_history_to_csv=False,
                **{**self._settings(), **options},
            )

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher."""
        found: list[Suggestion] = []
        scored = sum(each.losses is not None for each in self._observed)
        proposed = self._propose(n) if scored >= (self.initial or 1) else []
        for place in range(n):
            rng = self.history.rng()
            config = proposed[place] if place < len(proposed) else None
            if config is None or not self.history.is_new(config):
                config = self.history.fresh(rng)
            if config is None:
                break
            found.append(self.history.propose(Suggestion(config)))
        return found

    def _propose(self, n: int) -> list[Config]:
        """DeepHyper's own proposals; they may be known already, or not allowed and left out."""
        history = self.history
        observed = self._losses()
        results: list[tuple[dict[str, Any], Any]] = [
            (each.values, "F" if losses is None else _objective(losses))
            for each, losses in zip(self._observed, observed, strict=True)
        ]
        told = [losses for losses in observed if losses is not None]
        lie = _objective(np.max(told, axis=0).tolist())  # the worst: stay away from what is pending
        results += [(self._values(pending.config), lie) for pending in history.pending.values()]
        try:
            asked = self._asked(n, results, self._bounds())
        except (KeyError, ValueError):  # ConfigSpace's errors are ValueErrors
            if self.acq_optimizer != "mixedga":
                raise
            # It looks for values in place of forbidden ones also where these are inactive.
            asked = self._asked(n, results, {**self._bounds(), "acq_optimizer": "sampling"})
        found = []
        for values in asked:
            with suppress(
                ConfigError
            ):  # not allowed; what is gets the space's own 1, for NumPy's 1.0
                found.append(history.space.check(history.space.from_flat(values)))
        return found

    def _asked(
        self, n: int, results: Sequence[tuple[dict[str, Any], Any]], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """What a CBO of these options proposes once it knows the results."""
        with self._search(options) as search:
            # What these would hold if it had been asked for all of it: where its schedules of
            # exploration and of the surrogate stand, and what it must not propose again.
            search._num_asked = len(results)
            search._setup_optimizer()
            names = self._problem.hyperparameter_names
            search._opt.sampled.extend([values[name] for name in names] for values, _ in results)
            self._take_inactive(search._opt.space)
            self._refine(search._opt)
            search.tell(results)
            return list(search.ask(n))

    def _take_inactive(self, space: Any) -> None:  # noqa: ANN401 - DeepHyper's
        """Have it take what it has found also where it would refuse inactive values.

        It gives them the lower bound. On a logarithmic scale that may come back a little lower, as
        0.03 does, and forbidden clauses may be about it.
        """
        deactivate = space.deactivate_inactive_dimensions
        flat, names = self.history.space.flat, space.dimension_names

        def taken(point: list[Any]) -> list[Any]:
            try:
                return list(deactivate(point))
            except ValueError:  # as ConfigSpace's errors are
                found = dict(zip(names, point, strict=True))
                values = active(flat, lambda name: _within(flat[name], found[name]))
                return [values.get(name, self._inactive[name]) for name in names]

        space.deactivate_inactive_dimensions = taken

    def _refine(self, optimizer: Any) -> None:  # noqa: ANN401 - DeepHyper's
        """Make the surrogate as fine as it would be if each result had been told by itself.

        With each one after which the search has got no better for some time DeepHyper lowers what
        a split must gain. Told everything at once it would do so once at most.
        """
        schedule = optimizer.base_estimator_scheduler
        observed = self._losses()
        # It scales several objectives as it goes.
        if schedule is None or any(losses is not None and len(losses) > 1 for losses in observed):
            return
        scores = [math.inf if losses is None else losses[0] for losses in observed]
        first, patience = optimizer.n_initial_points_, schedule["patience"]
        times = sum(
            is_not_improving(scores[:told], patience, first) for told in range(first, len(scores))
        )
        model = optimizer.base_estimator_
        known = model.get_params()
        lowered = {
            name: type(known[name])(known[name] * change["factor"] ** times)
            for name, change in schedule["params"].items()
            if name in known
        }
        model.set_params(**lowered)

    def _losses(self) -> list[list[float] | None]:
        """Of each, None if it failed; places from 0 instead, if some did not run to their end.

        Losses of trials that have come equally far can be compared, others cannot. DeepHyper's own
        scaling of what a forest learns makes places of losses as well. There is a place for each
        objective: how DeepHyper weighs them is a matter of its options.
        """
        losses = [each.losses for each in self._observed]
        scored = [place for place, each in enumerate(losses) if each is not None]
        reach = [self._observed[place].reach for place in scored]
        if all(each is None for each in reach):
            return losses
        columns = zip(*(losses[place] or () for place in scored), strict=True)
        places = zip(*(_places(column, reach) for column in columns), strict=True)
        for place, found in zip(scored, places, strict=True):
            losses[place] = list(found)
        return losses

    def _bounds(self) -> dict[str, Any]:
        """`moo_lower_bounds` among places: after the last of the furthest trials that keeps it."""
        bounds = self.options.get("moo_lower_bounds")
        there = [each for each in self._observed if each.losses is not None]
        if bounds is None or all(each.reach is None for each in there):
            return {}
        most = max(_far(each.reach) for each in there)
        columns = zip(
            *(each.losses or () for each in there if _far(each.reach) == most), strict=True
        )
        kept = [
            None if bound is None else 1.0 - sum(loss <= -bound for loss in column)
            for bound, column in zip(bounds, columns, strict=True)
        ]
        return {"moo_lower_bounds": kept}

    def _settings(self) -> dict[str, Any]:
        conditions = bool(self._problem.space.conditions or self._problem.space.forbidden_clauses)
        points = _POINTS_WITH_CONDITIONS if conditions else _POINTS
        kwargs = {"n_points": points, "max_total_failures": -1}  # the campaign counts failures
        return {
            # So many results are there before it is asked; its schedules begin at that number.
            "n_initial_points": self.initial or 1,
            "acq_optimizer": self.acq_optimizer,
            "acq_optimizer_kwargs": kwargs,
            **self.options,
        }

    def _values(self, config: Config) -> dict[str, Any]:
        """A value for every hyperparameter; inactive ones as DeepHyper represents them."""
        return self._inactive | self.history.space.to_flat(config)

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. A failed trial counts as the worst one so far."""
        self.history.tell(trials)
        told = {trial.number: trial for trial in trials}  # of the same one the latest
        self._observed = [each for each in self._observed if each.number not in told]
        for trial in told.values():
            losses = list(trial.losses) if trial.scored else None
            if self.history.space.is_valid(trial.config):
                self._observed.append(
                    _Observed(self._values(trial.config), losses, trial.number, trial.reach)
                )

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return {**self.history.state_dict(), "observed": [list(each) for each in self._observed]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
        self._observed = [_Observed(*values) for values in state_dict["observed"]]


def _places(losses: Sequence[float], reach: Sequence[int | None]) -> list[float]:
    """Of each the number of those that are better; see pareto.furthest."""
    ranked = furthest([(loss,) for loss in losses], reach)
    found = [0.0] * len(losses)
    for rank, i in enumerate(ranked):
        ahead = ranked[rank - 1] if rank else i
        tied = rank and (losses[ahead], reach[ahead]) == (losses[i], reach[i])
        found[i] = found[ahead] if tied else float(rank)
    return found


def _within(hyperparameter: Parameter, value: Any) -> Any:  # noqa: ANN401 - of any kind
    """The value, or the bound beyond which rounding has brought it."""
    if choices(hyperparameter) is not None:
        return value
    bounds: Any = hyperparameter
    return min(max(value, plain(bounds.lower)), plain(bounds.upper))


def _far(reach: int | None) -> float:
    return math.inf if reach is None else reach


def _objective(losses: Sequence[float]) -> Any:  # noqa: ANN401 - one number or several
    """DeepHyper maximises."""
    negative = [-loss for loss in losses]
    return negative[0] if len(negative) == 1 else negative
