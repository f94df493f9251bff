"""Trials that do not fit into memory: a campaign with a gate beside Ray Tune.

    python -m benchmarks.packing --out FILE [--candidates 200]   (16 for a short one)

Random convnets, of which 40 % need more memory than there is: a process may add only so much to
its address space (RLIMIT_AS) beyond what it had before the trial. What each candidate needs is
measured first, each in a fresh process without a limit. Then the same candidates, in one order, run
as a campaign with a gate on two workers, and as trials of Ray Tune on two reused workers, which
has no gate. A trial makes one training step on random images.

`starved_share`: of the trials that the gate let in, those that ran out of memory (goal 1 %).
`fits_refused_share`: of the candidates that fit, those that the gate refused (goal 3 %).
`fits_lost`: candidates that fit, were let in, and have no score (goal 0).
`scored_per_hour`, `tune_scored_per_hour`: trials with a score, over the time from the first
trial's end to the last one's; `over_tune` is the ratio (goal 1.5).
"""

import argparse
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from ConfigSpace import Categorical, ConfigurationSpace, Integer
from torch import nn
from torch.nn import functional as F

import elastix
from benchmarks import record
from elastix.search.config_values import generator
from elastix.search.executors import trial_memory
from elastix.search.executors.packer import quantile
from elastix.search.space import as_space
from elastix.search.trial import Config, Suggestion, Trial, TrialState, config_key

EXCEED = 0.4
SLOTS = 2
STEPS = 1
_PIXELS = 32
SPACE = ConfigurationSpace(
    space=[
        Categorical("width", [8, 16, 24, 32, 48], ordered=True),
        Integer("depth", (1, 8)),
        Categorical("kernel", [1, 3], ordered=True),
        Integer("batch", (64, 768), log=True),
    ]
)


def build(config: Config) -> nn.Module:
    """A plain convnet on images of 3 channels."""
    width, kernel = config["width"], config["kernel"]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 1)]
    for _ in range(config["depth"]):
        layers += [
            nn.Conv2d(width, width, kernel, padding="same"),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def inputs(config: Config) -> Sequence[torch.Tensor]:
    """A batch."""
    return (torch.zeros(config["batch"], 3, _PIXELS, _PIXELS),)


def train(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """So many steps; the last loss."""
    images = torch.rand(config["batch"], 3, _PIXELS, _PIXELS)
    labels = torch.randint(10, (config["batch"],))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _once(config: Config) -> float:
    model = build(config)
    return train(config, model, torch.optim.AdamW(model.parameters()))


SMALLEST = {"width": 8, "depth": 1, "kernel": 3, "batch": 16}


def candidates(count: int, seed: int = 7) -> list[Config]:
    """Random ones, all different."""
    found: dict[str, Config] = {}
    rng = generator(seed, 0)
    while len(found) < count:
        config = as_space(SPACE).sample(rng)
        found[config_key(config)] = config
    return list(found.values())


# ------------------------------------------------------------------------------------- the limit


@contextmanager
def limited(most: int | None) -> Iterator[None]:
    """This process may add so many bytes to its address space; None: as many as it likes.

    What torch sets up in its first step does not count.
    """
    torch.set_num_threads(1)
    _once(SMALLEST)
    if most is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (trial_memory.status("VmSize") + most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _needs(config: Config) -> int:
    with limited(None):
        before = trial_memory.status("VmSize")
        _once(config)
        return max(0, trial_memory.status("VmPeak") - before)


def needs(configs: Iterable[Config]) -> dict[str, int]:
    """What each candidate adds to a process; in fresh ones."""
    known = list(configs)
    _once(SMALLEST)  # what is imported by the first step is, before the forks
    with get_context("fork").Pool(SLOTS, maxtasksperchild=1) as pool:
        found = pool.map(_needs, known, chunksize=1)
    return {config_key(config): added for config, added in zip(known, found, strict=True)}


# ------------------------------------------------------------------------------------ the systems


class Listed:
    """A searcher that proposes a list."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self._configs = list(configs)
        self._next = 0

    def start(self, space: Any, *, objectives: int = 1, seed: int = 0) -> None:  # noqa: ANN401
        """See Searcher."""

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher."""
        found = self._configs[self._next : self._next + n]
        self._next += len(found)
        return [Suggestion(config) for config in found]

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher."""

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self._next = state_dict["next"]


def run_campaign(
    configs: Sequence[Config], most: int | None = None, base: int | None = None
) -> list[Trial]:
    """All candidates, by a campaign; with a gate if it is known what its workers hold anyway."""
    gate = None if most is None or base is None else elastix.Gate(build, inputs, memory=base + most)

    def candidate(ctx: elastix.Context) -> None:
        with limited(most):
            model = build(ctx.config)
            model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters()))
            ctx.report(loss=train(ctx.config, model, optimizer))

    with tempfile.TemporaryDirectory(prefix="elastix-packing-") as folder:
        results = elastix.Campaign(
            candidate,
            space=SPACE,
            searcher=Listed(configs),
            metric="loss",
            mode="min",
            budget=elastix.Budget(trials=len(configs), parallel=SLOTS),
            inherit=elastix.InheritConfig(mode="none"),
            run=elastix.RunConfig(name="packing", store=folder),
            gate=gate,
            quiet=True,
        ).run()
    return list(results)


def run_tune(configs: Sequence[Config], most: int) -> tuple[int, list[float]]:
    """The same by Ray Tune: how many have a score, and when each trial was over."""
    from ray import tune

    ended: list[float] = []

    class Times(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:  # noqa: ANN401
            ended.append(time.time())

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:  # noqa: ANN401
            ended.append(time.time())

    def trainable(config: Mapping[str, Any]) -> None:
        with limited(most):
            tune.report({"loss": _once(config["candidate"])})

    with tempfile.TemporaryDirectory(prefix="elastix-tune-") as folder:
        grid = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space={"candidate": tune.grid_search(list(configs))},
            tune_config=tune.TuneConfig(max_concurrent_trials=SLOTS, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[Times()]),
        ).fit()
        scored = sum("loss" in (grid[n].metrics or {}) for n in range(len(grid)))
    return scored, ended


def per_hour(scored: int, ended: Sequence[float]) -> float:
    """Trials an hour."""
    return 3600 * scored / (max(ended) - min(ended))


def claims(
    trials: Sequence[Trial], need: Mapping[str, int], most: int, tune: tuple[int, list[float]]
) -> dict[str, float]:
    """A key for each claim."""
    refused = [trial for trial in trials if trial.state is TrialState.REFUSED]
    let_in = [trial for trial in trials if trial.state is not TrialState.REFUSED]
    fits = {number for number, t in enumerate(trials) if need[config_key(t.config)] <= most}
    scored = [trial for trial in let_in if trial.scored]
    starved = [t for t in let_in if t.starved or trial_memory.out_of_memory(t.traceback or "")]
    own = per_hour(len(scored), [trial.finished_s or 0.0 for trial in let_in])
    theirs = per_hour(*tune)
    return {
        "candidates": len(trials),
        "exceed_share": 1 - len(fits) / len(trials),
        "refused": len(refused),
        "starved_share": len(starved) / max(1, len(let_in)),
        "fits_refused_share": len([t for t in refused if t.number in fits]) / max(1, len(fits)),
        "fits_lost": len([t for t in let_in if t.number in fits and not t.scored]),
        "scored": len(scored),
        "tune_scored": tune[0],
        "scored_per_hour": own,
        "tune_scored_per_hour": theirs,
        "over_tune": own / theirs,
    }


def main() -> None:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--candidates", type=int, default=200)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")  # or it waits for whatever else runs here
    if "MALLOC_ARENA_MAX" not in os.environ:  # or each thread reserves 64 MiB of addresses
        os.environ["MALLOC_ARENA_MAX"] = "1"  # malloc looks once, as a process begins
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.packing", *sys.argv[1:]])
    configs = candidates(options.candidates)
    began = time.monotonic()
    need = needs(configs)
    print(f"measured what {len(configs)} need in {time.monotonic() - began:.0f} s", flush=True)
    most = round(quantile([float(n) for n in need.values()], 1 - EXCEED))
    import ray  # after the forks

    quiet = logging.ERROR
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, logging_level=quiet)
    base = max(trial.base_bytes for trial in run_campaign(candidates(4, seed=8)))
    print(f"a worker holds {base >> 20} MiB and may add {most >> 20} MiB", flush=True)
    trials = run_campaign(configs, most, base)
    print(f"the campaign has ended after {time.monotonic() - began:.0f} s", flush=True)
    tune = run_tune(configs, most)
    ray.shutdown()
    found = {name: round(value, 4) for name, value in claims(trials, need, most, tune).items()}
    for name, value in found.items():
        print(f"{name:24} {value}")
    record.save(options.out, found)


if __name__ == "__main__":
    main()
