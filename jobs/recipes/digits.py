"""Handwritten digits of 8 x 8 pixels (scikit-learn's, no download): train a convnet, or search one.

ELASTIX_TRIALS, ELASTIX_EPOCHS: how much to do; small by default, so that it ends in minutes.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix
from search_spaces import convnet

TRIALS = int(os.environ.get("ELASTIX_TRIALS", "24"))
EPOCHS = int(os.environ.get("ELASTIX_EPOCHS", "8"))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation set."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of a batch that is classified correctly."""
    x, y = batch
    right: torch.Tensor = model(x).argmax(1) == y
    return right.float().mean()


def train(ctx: elastix.Context) -> None:
    """The same function for a run and for every trial of a search."""
    training, validation = digits()
    model = convnet.build(ctx.config)
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(training, batch_size=64)
    for epoch in loader.epochs(ctx.config.get("epochs", 1)):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ctx.report(**ctx.evaluate(accuracy, validation, batch_size=256))


def trainer(run: elastix.RunConfig) -> elastix.ElasticTrainer:
    """For jobs/train.py: the default architecture, on one to four workers."""
    return elastix.ElasticTrainer(
        train,
        config={**convnet.space.get_default_configuration(), "epochs": EPOCHS},
        scaling=elastix.ScalingConfig(num_workers=(1, 4), cpus_per_worker=0.5),
        checkpoint=elastix.CheckpointConfig(every_steps=20),
        run=run,
    )


def campaign(run: elastix.RunConfig) -> elastix.Campaign:
    """For jobs/search.py: a trial of an epoch each, from its parent's weights."""
    return elastix.Campaign(
        train,
        space=convnet.space,
        metric="accuracy",
        budget=elastix.Budget(trials=TRIALS),
        scaling=elastix.ScalingConfig(cpus_per_worker=0.5),
        run=run,
    )
