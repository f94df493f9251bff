"""Five tasks, one after the other, with and without rehearsal, while workers are killed.

A model learns to tell 0 from 1, then 2 from 3, and so on to 9, and is never shown an earlier task
again. Without rehearsal it forgets. `elastix.Rehearsal` puts samples of the earlier tasks beside
the new ones. Two of three workers are killed meanwhile, and replacements join: what is rehearsed
stays the same. Beside it plain torch in one process, with a reservoir and with all the data.

Run it with `python examples/rehearsal.py`. Less than a minute on two cores.
"""

import argparse
import os
import random
import sys
import tempfile

# Ray's own paragraph about a dead worker would bury the line that says what became of it.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix
from elastix.testing.chaos import Kill, with_kills

TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
EPOCHS, BATCH, BUFFER = 6, 32, 200


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 handwritten digits of 8 x 8 pixels: training and test set."""
    data = load_digits()
    shuffled = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    x, y = x[shuffled], y[shuffled]
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def task(dataset: TensorDataset, classes: tuple[int, ...]) -> TensorDataset:
    """The samples of these classes."""
    x, y = dataset.tensors
    mine = torch.isin(y, torch.tensor(classes))
    return TensorDataset(x[mine], y[mine])


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(256, 10))


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of a batch that is classified correctly, of all ten classes."""
    x, y = batch
    return (model(x).argmax(1) == y).float().mean()


def train(ctx: elastix.Context) -> None:
    """One loader a task; `rehearse` is all that keeps the model from forgetting."""
    training, test = digits()
    model = build()
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    memory = elastix.Rehearsal(BUFFER, ratio=0.5, labels=lambda dataset: dataset.tensors[1])
    for classes in TASKS:
        loader = ctx.loader(task(training, classes), batch_size=BATCH, rehearse=memory)
        for epoch in loader.epochs(EPOCHS):
            for x, y in epoch:  # 32 new samples, and then 16 of earlier tasks
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if epoch.number + 1 == EPOCHS:  # within the loop: a joiner skips epochs that are over
                ctx.report(**ctx.evaluate(accuracy, test, batch_size=400))


def plain(mode: str) -> float:
    """The same in plain torch, in one process; its accuracy on all ten classes at the end."""
    training, test = digits()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen, draw = 0, random.Random(0)
    for number, classes in enumerate(TASKS):
        until = sum(TASKS[: number + 1], ())
        x, y = task(training, until if mode == "all the data so far" else classes).tensors
        for _ in range(EPOCHS):
            for mine in torch.randperm(len(x)).split(BATCH):
                inputs, targets = x[mine], y[mine]
                if kept and mode == "a reservoir":
                    old = draw.choices(kept, k=len(mine) // 2)
                    inputs = torch.cat([inputs, torch.stack([a for a, _ in old])])
                    targets = torch.cat([targets, torch.stack([b for _, b in old])])
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        for sample in zip(x, y, strict=True):  # each sample of all so far is equally likely kept
            seen += 1
            if len(kept) < BUFFER:
                kept.append(sample)
            elif (place := draw.randrange(seen)) < BUFFER:
                kept[place] = sample
    with torch.no_grad():
        return float(accuracy(model, list(test.tensors)))


def main() -> int:
    """Train under fire, then in plain torch, and compare."""
    kills = [Kill(worker=1, phase="bucket", step=70), Kill(worker=2, phase="batch", step=150)]
    result = elastix.ElasticTrainer(
        with_kills(train, kills),
        scaling=elastix.ScalingConfig(num_workers=(1, 3), cpus_per_worker=0.5),
        run=elastix.RunConfig(name="rehearsal", store=tempfile.mkdtemp(prefix="elastix-")),
    ).fit()
    under_fire = float(result.metrics["accuracy"])
    others = {mode: plain(mode) for mode in ("nothing", "a reservoir", "all the data so far")}
    print()
    print("accuracy on all ten digits after five tasks of two")
    for mode, found in others.items():
        print(f"  {found:.3f}  one process, rehearses {mode}")
    print(f"  {under_fire:.3f}  elastix.Rehearsal, three workers of which two were killed")
    for what, text in result.audit.lines.items():
        print(f"  {what} {text}")
    better = under_fire > others["nothing"] + 0.4
    return 0 if result.audit.exact and result.worker_losses >= 2 and better else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
