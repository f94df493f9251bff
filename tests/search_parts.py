"""A space, a searcher and train functions for the tests of campaigns. No Ray here."""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from ConfigSpace import ConfigurationSpace, Float, Integer
from torch import nn
from torch.utils.data import TensorDataset

from elastix.search.trial import Suggestion, config_key
from elastix.search.trial_database import row_sum

SPACE = ConfigurationSpace(name="tiny", space=[Float("x", (0.0, 1.0)), Integer("depth", (1, 3))])


class Drawing:
    """Proposes at random, each with the best model so far as its parent. Tells what it was told."""

    def __init__(self, limit=None, **extra):
        self.limit = limit
        self.extra = extra
        self.told = []
        self.asked = 0
        self.best = None

    def start(self, space, *, objectives=1, seed=0):
        self.random = random.Random(seed)
        self.objectives = objectives

    def ask(self, n=1):
        if self.limit is not None:
            n = min(n, self.limit - self.asked)
        self.asked += n
        parent = (self.best.ref, self.best.number) if self.best else (None, None)
        return [
            Suggestion(
                {"x": self.random.random(), "depth": self.random.randint(1, 3), **self.extra},
                *parent,
            )
            for _ in range(n)
        ]

    def tell(self, trials):
        self.told += [trial.number for trial in trials]
        for trial in trials:
            if trial.scored and (self.best is None or trial.losses < self.best.losses):
                self.best = trial

    def state_dict(self):
        state = self.random.getstate()
        best = self.best.to_json() if self.best else None
        return {"random": [state[0], list(state[1]), state[2]], "asked": self.asked, "best": best}

    def load_state_dict(self, state_dict):
        from elastix.search.trial import Trial

        kind, keys, gauss = state_dict["random"]
        self.random.setstate((kind, tuple(keys), gauss))
        self.asked = state_dict["asked"]
        self.best = Trial.from_json(state_dict["best"]) if state_dict["best"] else None


def seal(sql):
    """Give the rows of an open trial database the checksums of what is in them now."""
    sql.create_function("row_sum", -1, row_sum)
    sql.execute("UPDATE trials SET sum = row_sum(number, state, role, done, body)")
    sql.execute("UPDATE facts SET sum = row_sum(name, value)")


def noop(ctx):
    ctx.report(score=ctx.config["x"])


def raises(ctx):
    raise ValueError(f"no luck with {ctx.config['x']:.3f}")


def sometimes(ctx):
    if ctx.config["depth"] == 2:
        raise ValueError("two is a bad number")
    ctx.report(score=ctx.config["x"])


def silent(ctx):
    ctx.report(loss=1.0, speed=2)


def not_finite(ctx):
    ctx.report(score=math.nan if ctx.config["depth"] == 2 else math.inf)


def half_finite(ctx):
    ctx.report(score=math.nan if ctx.config["depth"] == 2 else ctx.config["x"])


def diary(ctx):
    """A no-op that writes down that it runs: a line that survives a SIGKILL."""
    with Path(ctx.config["diary"]).open("a") as file:
        file.write(json.dumps({"key": config_key(ctx.config), "pid": os.getpid()}) + "\n")
    time.sleep(0.02 * ctx.config["x"])
    ctx.report(score=ctx.config["x"])


def hungry(ctx):
    """A diary; out of memory the first time that it runs."""
    fed = Path(ctx.config["diary"]).with_name(f"fed-{ctx.config['x']}")
    if not fed.exists():
        fed.touch()
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    diary(ctx)


def dies_once(ctx):
    """Takes its worker with it the first time."""
    mark = Path(ctx.config["marks"]) / f"{ctx.config['x']}"
    if ctx.config["depth"] == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.report(score=ctx.config["x"])


def dies_always(ctx):
    if ctx.config["depth"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.report(score=ctx.config["x"])


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.head(x)


def data(samples=96):
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(samples, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 4).long())


def accuracy(model, batch):
    x, y = batch
    return (model(x).argmax(1) == y).double().mean()


def learns(ctx):
    """A real, tiny training; `epochs` of the config is optional."""
    model = Net(ctx.config["depth"])
    ctx.inherit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["x"])
    model, optimizer = ctx.prepare(model, optimizer)
    dataset = data()
    loader = ctx.loader(dataset, batch_size=32)
    for epoch in loader.epochs(ctx.config.get("epochs", 2)):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ctx.report(**ctx.evaluate(accuracy, dataset, batch_size=96), epoch=epoch.number)


def learns_and_tells(diary, ctx):
    """A member of a population: a line for each epoch, which survives a SIGKILL."""
    model = Net(ctx.config["depth"])
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * ctx.config["x"] + 1e-4)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data(), batch_size=32).epochs(5):
        for x, y in epoch:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        with Path(diary).open("a") as file:
            file.write(f"{epoch.number} {os.getpid()}\n")
        ctx.report(score=-float(loss.detach()), epoch=epoch.number)


def learns_long(ctx):
    ctx.config = {**ctx.config, "epochs": 9}
    learns(ctx)
