"""No-op trials per second: what an executor costs when the trial costs nothing.

    python -m benchmarks.executor --out FILE [--repeats 7] [--trials 600]
    python -m benchmarks.executor --out FILE --waiting 1000 10000 100000

One after the other, on the same two slots of one local Ray: elastix's pool under a whole campaign
(searcher, trial database and journal on disk, store open), a bare loop over actors of Ray,
DeepHyper's Ray evaluator, and Ray Tune with reused actors. Counted from the first result to the
last, so that starting workers is not part of it; Tune and DeepHyper make fewer trials, as they
take longer. The median of the repeats is reported, and the range: whole runs of Tune go at one of
two paces, the quicker twice the other.

The second is about size: what the campaign's own loop (searcher, rungs, trial database) costs a
trial, in CPU time, where so many trials are made by an executor that runs 1,000 at once and costs
nothing, without Ray. `loop_growth` is the cost at the most trials over that at the fewest (flat
is 1).
"""

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

import elastix
from benchmarks import record
from elastix.search.campaign_loop import Loop, LoopTerms
from elastix.search.executors.executor import Ended, EndedKind, Work
from elastix.search.rungs import Asha, Median, Rungs
from elastix.search.searchers.random import Random
from elastix.search.trial import Objectives, Trial
from elastix.search.trial_database import TrialDatabase

SLOTS = 2
RUNNING = 1000
_AT_ONCE = 50
FEWER = {"deephyper_ray": 5, "tune_reuse": 5}


def noop(ctx: elastix.Context) -> None:
    """What every system here runs, in its own words."""
    ctx.report(score=ctx.config["x"])


def _space() -> Any:  # noqa: ANN401 - a ConfigurationSpace
    from ConfigSpace import ConfigurationSpace, Float

    return ConfigurationSpace(space=[Float("x", (0.0, 1.0))])


def elastix_pool(trials: int) -> float:
    """A campaign with all that belongs to one."""
    folder = tempfile.mkdtemp(prefix="elastix-executor-")
    try:
        results = elastix.Campaign(
            noop,
            space=_space(),
            searcher=Random(),
            metric="score",
            budget=elastix.Budget(trials=trials, parallel=SLOTS),
            run=elastix.RunConfig(name="noop", store=folder),
            quiet=True,
        ).run()
        if unfinished := [trial for trial in results if not trial.scored]:
            raise RuntimeError(f"{len(unfinished)} trials have no score: {unfinished[0].traceback}")
        ended = sorted(trial.finished_s or 0.0 for trial in results)
    finally:
        shutil.rmtree(folder)
    return _rate(ended)


def bare_pool(trials: int) -> float:
    """Two actors and ray.wait."""

    class Worker:
        def run(self, config: Mapping[str, float]) -> float:
            return config["x"]

    workers: list[Any] = [ray.remote(Worker).remote() for _ in range(SLOTS)]
    ray.get([worker.run.remote({"x": 0.0}) for worker in workers])
    ended = []
    live = {worker.run.remote({"x": 0.5}): worker for worker in workers}
    left = trials - len(live)
    while live:
        (done,), _ = ray.wait(list(live), num_returns=1)
        worker = live.pop(done)
        ray.get(done)
        ended.append(time.time())
        if left:
            live[worker.run.remote({"x": 0.5})] = worker
            left -= 1
    for worker in workers:
        ray.kill(worker)
    return _rate(ended)


def _deephyper_noop(job: Any) -> float:  # noqa: ANN401 - DeepHyper's RunningJob
    return float(job["x"])


def deephyper_ray(trials: int) -> float:
    """Its evaluator alone, without a search around it."""
    from deephyper.evaluator import Evaluator

    evaluator = Evaluator.create(
        _deephyper_noop,
        method="ray",
        method_kwargs={"num_cpus": SLOTS, "num_cpus_per_task": 1, "num_workers": SLOTS},
    )
    ended: list[float] = []
    evaluator.submit([{"x": 0.5}] * SLOTS)
    submitted = SLOTS
    while len(ended) < trials:
        jobs = evaluator.gather("BATCH", size=1)
        jobs = jobs[0] if isinstance(jobs, tuple) else jobs
        ended += [time.time()] * len(jobs)
        more = min(len(jobs), trials - submitted)
        if more:
            evaluator.submit([{"x": 0.5}] * more)
            submitted += more
    evaluator.close()
    return _rate(ended)


def tune_reuse(trials: int) -> float:
    """A function trainable, random search, reuse_actors=True."""
    from ray import tune

    ended: list[float] = []

    class Times(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:  # noqa: ANN401
            ended.append(time.time())

    def run(config: Mapping[str, float]) -> None:
        tune.report({"score": config["x"]})

    folder = tempfile.mkdtemp(prefix="elastix-tune-")
    try:
        tune.Tuner(
            tune.with_resources(run, {"cpu": 1}),
            param_space={"x": tune.uniform(0.0, 1.0)},
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                num_samples=trials,
                max_concurrent_trials=SLOTS,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[Times()]),
        ).fit()
    finally:
        shutil.rmtree(folder)
    return _rate(ended)


def _rate(ended: list[float]) -> float:
    return (len(ended) - 1) / (max(ended) - min(ended))


SYSTEMS: dict[str, Callable[[int], float]] = {
    "elastix_pool": elastix_pool,
    "bare_pool": bare_pool,
    "deephyper_ray": deephyper_ray,
    "tune_reuse": tune_reuse,
}


class Instant:
    """An executor whose trials are over at once: three reports, or as many as a rung asks for."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._live: dict[int, Work] = {}

    @property
    def room(self) -> int:
        """See Executor."""
        return self._slots - len(self._live)

    def submit(self, work: Work) -> None:
        """See Executor."""
        self._live[work.number] = work

    def poll(self, timeout_s: float) -> list[Ended]:
        """Some of them end."""
        del timeout_s
        some = list(self._live.values())[:_AT_ONCE]
        for work in some:
            del self._live[work.number]
        return [self._ended(work) for work in some]

    @staticmethod
    def _ended(work: Work) -> Ended:
        reports = work.until_reports or 3
        kind = EndedKind.PAUSED if work.until_reports else EndedKind.FINISHED
        results = {seq: {"score": work.config["x"]} for seq in range(reports)}
        return Ended(number=work.number, kind=kind, results=results, epochs=reports)

    def halt(self, number: int) -> None:
        """See Executor."""


def _work(trial: Trial, role: str, rung: int | None) -> Work:
    config = trial.config
    return Work(number=trial.number, name=role, config=config, seed=0, until_reports=rung)


def loop_us(trials: int, rungs: Rungs | None) -> float:
    """CPU time of the loop, microseconds a trial."""
    searcher = Random()
    searcher.start(_space(), objectives=1, seed=0)
    with tempfile.TemporaryDirectory() as folder, TrialDatabase(Path(folder)) as database:
        budget = elastix.Budget(trials=trials, epochs=1e12)
        loop = Loop(
            LoopTerms(objectives=Objectives.of("score"), budget=budget),
            database,
            searcher,
            rungs,
            Instant(RUNNING),  # type: ignore[arg-type] # of the executor only what a loop uses
            _work,
            lambda event: None,
        )
        began = time.process_time()
        loop.run()
        return 1e6 * (time.process_time() - began) / trials


RULES: dict[str, Callable[[], Rungs | None]] = {
    "none": lambda: None,
    "median": Median,
    "asha": lambda: Asha(first=1, eta=3, last=9),
}


def measure_waiting(counts: list[int]) -> dict[str, Any]:
    """Each rule at each size."""
    found: dict[str, dict[str, float]] = {}
    for name, rule in RULES.items():
        for count in counts:
            found.setdefault(name, {})[str(count)] = round(loop_us(count, rule()), 1)
            print(
                f"{name:8} {count:8} trials {found[name][str(count)]:8.1f} us a trial", flush=True
            )
    least, most = str(min(counts)), str(max(counts))
    growth = {name: round(row[most] / row[least], 2) for name, row in found.items()}
    return {"loop_us_per_trial": found, "loop_growth": growth}


def measure(repeats: int, trials: int, systems: list[str]) -> dict[str, list[float]]:
    """The rates of each, interleaved: one after the other, then all again."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(repeats):
        for name in systems:
            count = max(8, trials // FEWER.get(name, 1))
            rates[name].append(SYSTEMS[name](count))
            print(f"{number} {name:14} {rates[name][-1]:8.1f} trials/s ({count} trials)")
    return rates


def main() -> None:
    """Measure, print the ratios, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--waiting", type=int, nargs="+", help="the loop's cost at these sizes")
    options = parser.parse_args()
    if options.waiting:
        record.save(options.out, measure_waiting(options.waiting))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, logging_level=logging.ERROR)
    rates = measure(options.repeats, options.trials, options.systems)
    ray.shutdown()
    medians = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    ranges = {name: [round(min(found), 2), round(max(found), 2)] for name, found in rates.items()}
    for name, rate in medians.items():
        ratio = medians.get("elastix_pool", rate) / rate
        least, most = ranges[name]
        print(f"{name:14} {rate:8.1f} trials/s ({least:.0f} to {most:.0f})   pool: {ratio:.1f}x")
    record.save(options.out, {"trials_per_s": medians, "trials_per_s_range": ranges})


if __name__ == "__main__":
    main()
