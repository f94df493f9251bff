"""Train functions whose every random number and rounding shows, for runs with exact=True."""

import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import elastix
from elastix.comm.gradients import buckets
from elastix.comm.network import shared_memory
from elastix.train.replica.sliced_step import Slices
from tests.trainables import (
    Tied,
    accuracy,
    await_worker,
    newest_group,
    samples,
    shadow_hold,
    usher_all,
)

SLICES = 8


class NoisyNet(nn.Module):
    """Batch norm and dropout; its noise is NumPy's."""

    def __init__(self, width=6):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.dropout2d(F.relu(self.norm2(self.conv2(x))), 0.2, self.training)
        return self.head(F.dropout(x.flatten(1), 0.3, self.training)) * (1 + np.random.rand() / 100)


def deep_mlp():
    layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


MODELS = {"mlp": deep_mlp, "convnet": NoisyNet, "tied": Tied}


class Jittered(Dataset):
    """A sample is shifted and scaled by what all three global generators give."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[index]
        shifted = torch.roll(x, random.randrange(3), -1)
        return shifted * float(1 + np.random.rand() / 10) + torch.rand(1) / 10, y


def augmented(sample, rng):
    x, y = sample
    return x + 0.01 * torch.from_numpy(rng.normal(size=x.shape)).float(), y


def mixed_up(batch):
    """A collation that draws: each sample is blended with another."""
    x = torch.stack([x for x, _ in batch])
    other = torch.randperm(len(batch))
    return 0.9 * x + 0.1 * x[other], torch.stack([y for _, y in batch])


def train(ctx: elastix.Context) -> None:
    """Draws in the dataset, in the model and between steps; the rate follows evaluations.

    `holds` says by step for which newcomer to wait then, until it is ready to be let in; `ushers`
    from which step on to wait for one, until the group is about to let it in. If there is a
    `leaver`, it goes before that. They wait at steps 2 and 3 for the `shadow`, until it has the
    State. With `equal_shares` each has as many slices, else who is slow may have none.
    """
    config = ctx.config
    if config.get("equal_shares"):
        Slices.measured = lambda *_: None
    meeting = Path(config.get("meeting", "."))
    ctx.on_phase(lambda name, _: name == "wait" and arrive(ctx, meeting))
    hold = shadow_hold(ctx)
    shared_memory.FROM_BYTES = 1 << 10  # so that some buckets go this way, and some through sockets
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = config.get("bucket_bytes", 64 << 10)
    model = MODELS[config.get("model", "mlp")]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    plain = samples(config.get("samples", 107))
    if "spoiled" in config:  # a sample whose gradient is not finite
        plain.tensors[0][config["spoiled"]] = float("nan")
    loader = ctx.loader(
        Jittered(plain) if config.get("jitter") else plain,
        batch_size=config.get("batch_size", 24),
        slices=config.get("slices", SLICES),
        num_workers=config.get("num_workers", 0),
        augment=augmented if config.get("jitter") else None,
        **({"collate_fn": mixed_up} if config.get("jitter") else {}),
    )
    taste = torch.randn(10)  # whoever comes later has to have the same
    for epoch in loader.epochs(config.get("epochs", 2)):
        weight = (torch.rand(10) + taste.abs()).to(ctx.device)
        for step in epoch:
            for x, y in step:
                if ctx.worker == config.get("slow"):
                    time.sleep(0.02)
                F.cross_entropy(model(x), y, weight).backward()
            if "fails_at" in config and ctx.step == config["fails_at"] + 1:
                raise RuntimeError("enough")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # Langevin noise, from the generators between steps
                for parameter in model.parameters() if config.get("noise", True) else ():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3 * random.random())
            if ctx.rank == 0:
                torch.rand(1)  # to show some pictures, say
            for newcomer in config.get("holds", {}).get(str(ctx.step), ()):
                await_worker(meeting / str(newcomer))
            if "leaver" in config:
                let_go(ctx, meeting)
            usher_all(ctx)
            hold()
        scores = ctx.evaluate(loss_and_accuracy, plain, batch_size=16)
        scheduler.step(scores["loss"])
        ctx.report(**scores)


def arrive(ctx, meeting):
    """Ready to be let in; a newcomer that is ushered in comes after the leaver, if there is one."""
    if "holds" in ctx.config:
        (meeting / str(ctx.worker)).touch()
    if "leaver" in ctx.config and str(ctx.worker) in ctx.config["ushers"]:
        await_worker(meeting / "left")


def let_go(ctx, meeting):
    """After a step: the leaver's going is agreed on before the newcomers that follow it begin.

    Else it might give one the State, who would have to look for another donor when it is gone.
    """
    leaver, member = ctx.config["leaver"], ctx._member
    if ctx.step == min(ctx.config["ushers"].values()) - 2 and ctx.rank >= 0:
        member._inbox.wait(lambda: leaver not in newest_group(member))
    if ctx.rank >= 0 and leaver not in member._driver.present:
        (meeting / "left").touch()


def loss_and_accuracy(model, batch):
    x, y = batch
    x = x.nan_to_num()
    return {"loss": F.cross_entropy(model(x), y), "accuracy": accuracy(model, batch)}
