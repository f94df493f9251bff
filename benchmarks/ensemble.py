"""What a campaign's models are worth together: an ensemble beside the best single model.

    python -m benchmarks.ensemble --out FILE [--seeds 10] [--trials 24]

Three data sets: digits (convnets on 8 x 8 images), mnist1d (convnets on sequences of 40 values) and
breast cancer (fully connected nets on 30 features). Each seed is a split into training,
validation and test samples and a campaign with inheritance. The best single model is the one with
the best validation accuracy, as `results.best` has it; five are put together on the same
validation samples. Test errors are means over seeds; `error_less` is how much lower the
ensemble's mean is, as a share of the best single model's. NLL is that of test samples, `single` as
it is and `calibrated` after a temperature of its own, so that calibration and averaging are told
apart. `seconds` is what `results.ensemble` took, the longest.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastix
from benchmarks.record import save
from benchmarks.search import quiet
from elastix.search.executors.serial import Local
from elastix.search.results import Results
from elastix.search.space import Space
from elastix.search.trial import Config
from search_spaces import conv1d, convnet, mlp

SIZE = 5
GOAL_LESS, GOAL_S = 0.15, 10.0
_EPOCHS = 3

Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A data set and the models that are searched for it."""

    samples: Callable[[], Part]
    space: Space
    build: Callable[[Config], nn.Module]
    batch: int


def _digits() -> Part:
    found = load_digits()
    x = torch.tensor(found.images / 16.0, dtype=torch.float32)[:, None]
    return x, torch.tensor(found.target)


def _mnist1d() -> Part:
    from mnist1d.data import get_dataset_args, make_dataset

    arguments = get_dataset_args()
    made = make_dataset(arguments)  # 5,000 of them; it seeds itself
    x = np.concatenate([made["x"], made["x_test"]])
    y = np.concatenate([made["y"], made["y_test"]])
    return torch.tensor(x, dtype=torch.float32)[:, None], torch.tensor(y)


def _breast_cancer() -> Part:
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


TASKS = {
    "digits": Task(_digits, convnet.space, convnet.build, 64),
    "mnist1d": Task(
        _mnist1d, conv1d.space, lambda config: conv1d.build(config, channels=1, classes=10), 64
    ),
    "breast_cancer": Task(
        _breast_cancer, mlp.space, lambda config: mlp.build(config, inputs=30, classes=2), 32
    ),
}


def split(part: Part, seed: int) -> tuple[Part, Part, Part]:
    """Half for training, a quarter each for validation and test."""
    x, y = part
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    bounds = len(x) // 2, len(x) * 3 // 4
    training, validation, test = order.tensor_split(bounds)
    return (x[training], y[training]), (x[validation], y[validation]), (x[test], y[test])


def search(
    task: Task, training: Part, validation: Part, *, seed: int, trials: int, folder: str
) -> Results:
    """A campaign in this process."""

    def accuracy(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        right: torch.Tensor = model(batch[0]).argmax(1) == batch[1]
        return right.float().mean()

    def train(ctx: elastix.Context) -> None:
        model = task.build(ctx.config)
        ctx.inherit(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
        model, optimizer = ctx.prepare(model, optimizer)
        samples = TensorDataset(*training)
        for epoch in ctx.loader(samples, batch_size=task.batch).epochs(_EPOCHS):
            for x, y in epoch:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        ctx.report(**ctx.evaluate(accuracy, TensorDataset(*validation), batch_size=256))

    return elastix.Campaign(
        train,
        space=task.space,
        metric="accuracy",
        searcher=elastix.Evolution(population=8, sample=4),
        budget=elastix.Budget(trials=trials),
        executor=Local(),
        run=elastix.RunConfig(name="ensemble", store=folder, seed=seed),
        quiet=True,
    ).run()


@torch.no_grad()
def measured(model: nn.Module, part: Part) -> tuple[float, float]:
    """Share of errors, and negative log-likelihood."""
    said = model.eval()(part[0])
    wrong = (said.argmax(1) != part[1]).double().mean()
    return float(wrong), float(F.cross_entropy(said.double(), part[1]))


def one_seed(name: str, seed: int, trials: int) -> dict[str, float]:
    """A campaign, its best model and its ensemble on the test samples."""
    task = TASKS[name]
    torch.manual_seed(seed)
    training, validation, test = split(task.samples(), seed)
    with tempfile.TemporaryDirectory() as folder:
        results = search(task, training, validation, seed=seed, trials=trials, folder=folder)
        best = task.build(results.best.config)
        best.load_state_dict(results.best.load().model)
        began = time.perf_counter()
        made = results.ensemble(SIZE, build=task.build, validation=validation)
        seconds = time.perf_counter() - began
        single_error, single_nll = measured(best, test)
        error, nll = measured(made, test)
        one = results.ensemble(1, build=task.build, validation=validation)
        _, calibrated_nll = measured(one, test)
    return {
        "single_error": single_error,
        "error": error,
        "single_nll": single_nll,
        "calibrated_nll": calibrated_nll,
        "nll": nll,
        "members": float(len(made.members)),
        "seconds": seconds,
    }


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Means over seeds, the longest time, and the gain with its standard error."""
    means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    gains = [run["single_error"] - run["error"] for run in runs]
    single = means["single_error"]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    return {
        **means,
        "seconds": max(run["seconds"] for run in runs),
        "error_less": statistics.mean(gains) / single if single else 0.0,
        "error_less_se": error / single if single else 0.0,
        "seeds": len(runs),
    }


def verdict(name: str, row: Mapping[str, float]) -> str:
    """The goals, each with what was measured."""
    return (
        f"{name}: test error {row['error']:.4f}, of the best single model "
        f"{row['single_error']:.4f}: {row['error_less']:.0%} less, standard error "
        f"{row['error_less_se']:.0%} (goal: {GOAL_LESS:.0%}), in {row['seconds']:.1f} s at most "
        f"(goal: {GOAL_S:.0f} s); NLL {row['nll']:.4f}, single {row['single_nll']:.4f}, calibrated "
        f"{row['calibrated_nll']:.4f}; {row['seeds']:.0f} seeds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=24)
    arguments = parser.parse_args()
    quiet()
    found: dict[str, Any] = {}
    for name in arguments.tasks:
        runs = []
        for seed in range(arguments.seeds):
            runs.append(one_seed(name, seed, arguments.trials))
            print(name, seed, {key: round(value, 4) for key, value in runs[-1].items()}, flush=True)
        found[name] = summary(runs)
    for name, row in found.items():
        print(verdict(name, row))
    save(arguments.out, found)


if __name__ == "__main__":
    main()
