"""Population based training beside Ray Tune's, and beside a random search with rungs.

    python -m benchmarks.population --out FILE [--seeds 10] [--members 8] [--epochs 12]

Three data sets (benchmarks.ensemble has them): digits, mnist1d and breast cancer, each cut anew by
each seed. All train one net with AdamW, for members x epochs passes over the data in all, and
choose learning rate, weight decay and dropout: elastix.Population, Tune's PopulationBasedTraining
with the same members, interval (one epoch) and share of members that are replaced, and a random
search with Asha. A system's choice is the model with the best last validation accuracy; what is
compared is its test accuracy. Tune multiplies values by 1.2 whatever the range that they were drawn
from, and a member whose dropout comes to more than 1 fails: it chooses among the others. Runs are
kept in FILE.runs.jsonl, and a second call goes on there.

For each data set `accuracy` has means and standard errors, and `over_tune_pbt` and
`over_random_asha` the mean difference over seeds with its standard error (goal: no worse than 0 by
more than one of these).

`exploit_explore_cpu_ms`: of the CPU that a child costs before its first step, the median and the
95th percentile: choosing it, and `ctx.inherit` and `ctx.prepare`, which read its parent's State
(goal 20). `fresh_cpu_ms` is the same for members that begin at the beginning.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ConfigSpace import ConfigurationSpace, Float
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastix
from benchmarks.ensemble import TASKS, Part, split
from benchmarks.record import save
from benchmarks.search import quiet
from elastix.search.executors.serial import Local
from elastix.search.trial import Config, Selection, Trial

SHARE = 0.25
SLOTS = 2
GOAL_MS = 20.0
SYSTEMS = ["population", "tune_pbt", "random_asha"]
SPACE = ConfigurationSpace(
    space=[
        Float("lr", (1e-4, 1e-1), log=True),
        Float("weight_decay", (1e-5, 1e-1), log=True),
        Float("dropout", (0.0, 0.6)),
    ]
)


def build(config: Mapping[str, Any], inputs: int, classes: int) -> nn.Module:
    """A net of two hidden layers."""
    drop = float(config["dropout"])
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(inputs, 96), nn.ReLU(), nn.Dropout(drop)),
        *(nn.Linear(96, 96), nn.ReLU(), nn.Dropout(drop)),
        nn.Linear(96, classes),
    )


def made(config: Config, parts: Sequence[Part]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The net of a configuration, and its optimizer."""
    x, y = parts[0]
    model = build(config, x[0].numel(), int(y.max()) + 1)
    options = {"lr": config["lr"], "weight_decay": config["weight_decay"]}
    return model, torch.optim.AdamW(model.parameters(), **options)


def right(model: nn.Module, part: Part) -> float:
    """The share of samples that the model classifies right."""
    model.eval()
    with torch.no_grad():
        share = float((model(part[0]).argmax(1) == part[1]).double().mean())
    model.train()
    return share


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:  # noqa: ANN401
    """One training step."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# ------------------------------------------------------------------------------------ the systems

Costs = dict[str, list[float]]


class Timed(elastix.Population):
    """Notes what choosing children costs."""

    chosen_ms: list[float] = []  # noqa: RUF012 - of this process; a campaign copies its searcher

    def select(self, paused: Sequence[Trial], most: int) -> Selection:
        """See Population."""
        began = time.process_time()
        selection = super().select(paused, most)
        if paused and selection.children:
            taken_ms = 1000 * (time.process_time() - began)
            self.chosen_ms += [taken_ms / len(selection.children)] * len(selection.children)
        return selection


def run_campaign(
    system: str, parts: Sequence[Part], *, seed: int, members: int, epochs: int, batch: int
) -> tuple[float, Costs]:
    """A campaign in this process: test accuracy, and milliseconds of CPU by what they went into."""
    taken: Costs = {"fresh": [], "child": []}
    Timed.chosen_ms.clear()

    def train(ctx: elastix.Context) -> None:
        model, optimizer = made(ctx.config, parts)
        began = time.process_time()
        found = ctx.inherit(model)
        model, optimizer = ctx.prepare(model, optimizer)
        taken["child" if found else "fresh"].append(1000 * (time.process_time() - began))
        for epoch in ctx.loader(TensorDataset(*parts[0]), batch_size=batch).epochs(epochs):
            for x, y in epoch:
                step(model, optimizer, x, y)
            ctx.report(accuracy=right(model, parts[1]), test=right(model, parts[2]))

    options: dict[str, Any] = {"searcher": Timed(members=members, share=SHARE)}
    if system == "random_asha":
        rungs = elastix.Asha(first=1, eta=3, last=epochs)
        options = {"searcher": elastix.Random(), "rungs": rungs}
    with tempfile.TemporaryDirectory(prefix="elastix-population-") as folder:
        results = elastix.Campaign(
            train,
            space=SPACE,
            metric="accuracy",
            budget=elastix.Budget(epochs=members * epochs),
            executor=Local(),
            run=elastix.RunConfig(name="population", store=folder, seed=seed),
            quiet=True,
            **options,
        ).run()
    return float(results.best.metrics["test"]), {**taken, "chosen": [*Timed.chosen_ms]}


def run_tune(
    parts: Sequence[Part], *, seed: int, members: int, epochs: int, batch: int
) -> tuple[float, Costs]:
    """The same by Tune's PBT, on reused actors."""
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    class Member(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            torch.set_num_threads(1)
            self.reset_config(config)
            self.order = torch.Generator().manual_seed(seed)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            torch.manual_seed(int(1e6 * new_config["lr"]) + seed)
            self.model, self.optimizer = made(new_config, parts)
            return True

        def step(self) -> dict[str, float]:
            x, y = parts[0]
            for rows in torch.randperm(len(x), generator=self.order).split(batch):
                step(self.model, self.optimizer, x[rows], y[rows])
            return {"accuracy": right(self.model, parts[1]), "test": right(self.model, parts[2])}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(states, Path(checkpoint_dir) / "state.pt")

        def load_checkpoint(self, checkpoint: Any) -> None:  # noqa: ANN401 - a directory
            states = torch.load(Path(checkpoint) / "state.pt", weights_only=True)
            own = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
            for group, (lr, decay) in zip(self.optimizer.param_groups, own, strict=True):
                group["lr"], group["weight_decay"] = lr, decay

    np.random.seed(seed)
    drawn = {
        "lr": tune.loguniform(1e-4, 1e-1),
        "weight_decay": tune.loguniform(1e-5, 1e-1),
        "dropout": tune.uniform(0.0, 0.6),
    }
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=SHARE,
        hyperparam_mutations=drawn,
    )
    with tempfile.TemporaryDirectory(prefix="elastix-tune-") as folder:
        grid = tune.Tuner(
            tune.with_resources(Member, {"cpu": 1}),
            param_space=drawn,
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                scheduler=scheduler,
                num_samples=members,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=folder, verbose=0, stop={"training_iteration": epochs}
            ),
        ).fit()
        ended = [
            one.metrics or {} for one in map(grid.__getitem__, range(len(grid))) if not one.error
        ]
        if not ended:
            raise RuntimeError(str(grid.errors[0]))
        return float(max(ended, key=itemgetter("accuracy"))["test"]), {}


def run(task: str, system: str, *, seed: int, members: int, epochs: int) -> tuple[float, Costs]:
    """One system on one data set."""
    found = TASKS[task]
    parts = split(found.samples(), seed)
    terms = {"seed": seed, "members": members, "epochs": epochs, "batch": found.batch}
    if system == "tune_pbt":
        return run_tune(parts, **terms)
    return run_campaign(system, parts, **terms)


# ------------------------------------------------------------------------------------ the numbers


def mean(values: Sequence[float]) -> dict[str, float]:
    """With its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 4), "se": round(error, 4)}


def claims(runs: Mapping[tuple[str, str, int], float], costs: Costs) -> dict[str, Any]:
    """A key for each claim.

    Args:
        runs: test accuracy by data set, system and seed.
        costs: milliseconds, see `run_campaign`.
    """
    found: dict[str, Any] = {"accuracy": {}, "seeds": {}}
    for task in dict.fromkeys(task for task, _, _ in runs):
        seeds = {
            system: {seed for t, s, seed in runs if (t, s) == (task, system)} for system in SYSTEMS
        }
        common = sorted(set.intersection(*seeds.values()))
        if not common:
            continue
        by = {system: [runs[task, system, seed] for seed in common] for system in SYSTEMS}
        found["accuracy"][task] = {system: mean(values) for system, values in by.items()}
        found["seeds"][task] = len(common)
        for other in SYSTEMS[1:]:
            over = [own - theirs for own, theirs in zip(by["population"], by[other], strict=True)]
            told = mean(over)
            no_worse = told["mean"] >= -told["se"]
            found.setdefault(f"over_{other}", {})[task] = {**told, "no_worse": no_worse}
    if costs.get("child"):
        chosen = statistics.median(costs["chosen"])
        whole = [chosen + ms for ms in costs["child"]]
        found["exploit_explore_cpu_ms"] = {
            "median": round(statistics.median(whole), 2),
            "p95": round(float(np.percentile(whole, 95)), 2),
        }
        found["fresh_cpu_ms"] = round(statistics.median(costs["fresh"]), 2)
    return found


def main() -> None:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    options = parser.parse_args()
    quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    kept = options.out.with_name(f"{options.out.name}.runs.jsonl")
    terms = {"members": options.members, "epochs": options.epochs}
    runs: dict[tuple[str, str, int], float] = {}
    costs: Costs = {}
    lines = kept.read_text().splitlines() if kept.exists() else []
    for seed in range(options.seeds):
        for task in options.tasks:
            for system in SYSTEMS:
                key = [task, system, seed, terms]
                known = next((line for line in map(json.loads, lines) if line[:4] == key), None)
                if known is None:
                    began = time.monotonic()
                    accuracy, taken = run(task, system, seed=seed, **terms)
                    known = [*key, accuracy, taken]
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    with kept.open("a") as file:
                        file.write(json.dumps(known) + "\n")
                    took_s = time.monotonic() - began
                    print(f"{task:14} {system:12} {seed} {accuracy:.4f} {took_s:.0f} s", flush=True)
                runs[task, system, seed] = known[4]
                for name, values in known[5].items():
                    if system == "population":
                        costs.setdefault(name, []).extend(values)
    found = {**terms, **claims(runs, costs)}
    print(json.dumps(found, indent=1))
    save(options.out, found)


if __name__ == "__main__":
    logging.getLogger("ray").setLevel(logging.ERROR)
    main()
