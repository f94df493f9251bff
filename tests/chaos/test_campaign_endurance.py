"""Law 5 for campaigns: trials leave no tensors, threads or descriptors in the process they ran in.

A tensor that is left behind is a whole model, and campaigns have thousands of trials.
"""

import gc
import threading
from pathlib import Path

import pytest
import torch
from ConfigSpace import ConfigurationSpace, Float, Integer

import elastix
from elastix.search.executors.serial import Local

SPACE = ConfigurationSpace(
    space=[Integer("width", (4, 32), log=True), Integer("depth", (1, 4)), Float("lr", (0.01, 0.1))]
)
MEASURED = ("tensors", "threads", "descriptors")


def resources():
    """How many of MEASURED this process has.

    The two threads in which Ray answers what a worker is asked beside its trial are there from its
    start on. Python counts each from the first time that it has run Python: if a trial takes long.
    """
    gc.collect()
    threads = sum(not isinstance(one, threading._DummyThread) for one in threading.enumerate())
    tensors = sum(isinstance(found, torch.Tensor) for found in gc.get_objects())
    return [tensors, threads, sum(1 for _ in Path("/proc/self/fd").iterdir())]


def build(config):
    layers = [torch.nn.Linear(2, config["width"])]
    for _ in range(config["depth"]):
        layers += [torch.nn.Linear(config["width"], config["width"]), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(config["width"], 1))


def trainable(fails, measure):
    """A trial of three epochs. It may report what its process held before it, or fail at times."""

    def train(ctx):
        before = resources() if measure else [0, 0, 0]
        model = build(ctx.config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
        x = torch.arange(64.0).reshape(32, 2) / 64
        loader = ctx.loader(torch.utils.data.TensorDataset(x, x.sum(1, True)), batch_size=16)
        for epoch in loader.epochs(3):
            for inputs, wanted in epoch:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                loss.backward()
                if fails and ctx.config["width"] % 2:
                    raise ValueError("odd")
                optimizer.step()
            schedule.step()
            ctx.report(loss=float(loss), **dict(zip(MEASURED, before, strict=True)))

    return train


WAYS = {
    "inherit": {},
    "rungs": {"rungs": lambda: elastix.Asha(first=1, eta=2, last=3)},
    "population": {"searcher": lambda: elastix.Population(members=4, interval=1)},
    "failing": {"fails": True},
}


def campaign(folder, trials, executor=None, fails=False, measure=False, **options):
    made = {name: make() for name, make in options.items()}
    return elastix.Campaign(
        trainable(fails, measure),
        space=SPACE,
        metric="loss",
        mode="min",
        budget=elastix.Budget(trials=trials, parallel=1),
        run=elastix.RunConfig(name="endurance", store=str(folder)),
        quiet=True,
        **({"executor": executor} if executor else {}),
        **made,
    ).run()


@pytest.mark.parametrize("way", WAYS)
def test_campaigns_one_after_the_other_leave_nothing_behind(tmp_path, way):
    used = []
    for number in range(3):
        results = campaign(tmp_path / str(number), 8, Local(), **WAYS[way])
        results.best.load()
        del results
        used.append(resources())
    assert used[2] == used[1]


@pytest.mark.fast("inherit", "population")
@pytest.mark.parametrize("way", WAYS)
def test_trials_leave_nothing_behind_in_the_worker_that_runs_them(tmp_path, cluster, way):
    results = campaign(tmp_path, 12, measure=True, **WAYS[way])
    used = [[trial.metrics[name] for name in MEASURED] for trial in results if trial.metrics]
    assert used[-1] == used[3]
