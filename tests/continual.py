"""A train function that learns one task after the other, and rehearses; for the tests."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import elastix
from elastix.comm.gradients import buckets
from elastix.state import capture
from elastix.train.replica.sliced_step import Slices
from tests.trainables import accuracy, digest, note, samples, usher_all, wide_mlp

TASKS = 3
LENGTH = 48  # samples of a task


class Task(Dataset):
    """Samples of two classes. Gone, and not to be read, when its file says so."""

    def __init__(self, number, folder=None):
        x, y = samples(1200, torch.float64).tensors
        mine = torch.isin(y, torch.tensor([2 * number + 2, 2 * number + 3])).nonzero()[:LENGTH, 0]
        self.x, self.y = x[mine], y[mine]
        self.gone = None if folder is None else folder / f"gone{number}"

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        assert self.gone is None or not self.gone.exists(), "a task that is gone was read"
        return self.x[index], self.y[index]


def labels(task):
    assert task.gone is None or not task.gone.exists(), "a task that is gone was read"
    return task.y


def train(ctx: elastix.Context) -> None:
    """Every worker notes its digest after every step."""
    config = ctx.config
    Slices.measured = lambda *_: None
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 256 << 10
    model = wide_mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    memory = elastix.Rehearsal(
        24, ratio=config.get("ratio", 0.5), labels=labels, keep=config["keep"]
    )
    if config.get("inherits"):
        ctx.inherit(model, memory)
    model, optimizer = ctx.prepare(model, optimizer)
    folder = Path(config["log"])
    goes = folder if config["keep"] == "samples" else None
    for number in range(*config.get("tasks", (0, TASKS))):
        task = Task(number, goes)
        loader = ctx.loader(
            task,
            batch_size=12,
            slices=config.get("slices"),
            num_workers=config.get("num_workers", 0),
            rehearse=memory,
        )
        for epoch in loader.epochs(config.get("epochs", 2)):
            for batch in epoch:
                optimizer.zero_grad()
                for x, y in batch if config.get("slices") else [batch]:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                state = digest(capture({"": model}, {"optimizer": optimizer, "memory": memory}))
                note(folder / f"{ctx.worker}.jsonl", ctx.step, state)
                usher_all(ctx)
            ctx.report(**ctx.evaluate(accuracy, task, batch_size=16))
        if goes and number > 0 and config.get("forgets"):  # nobody is in the one before any more
            (goes / f"gone{number - 1}").touch()
