"""A train function that uses no loader of elastix is told what that means; no other is."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.events import StateStored
from elastix.testing.local import run_local
from elastix.train.replica.plain_loaders import UNMARKED

HINT = "steps are made on batches of a torch DataLoader"
NO_BOUNDARY = "nothing says where a step begins"
DATA = TensorDataset(torch.arange(12.0).reshape(12, 1))


def model_of(ctx):
    handler = logging.FileHandler(Path(ctx.config["log"], f"{ctx.worker}.log"))
    logging.getLogger("elastix").addHandler(handler)
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def as_in_plain_torch(ctx):
    model, optimizer = model_of(ctx)
    seen = []
    for (x,) in DataLoader(DATA, 3, shuffle=True):
        step(model, optimizer, x)
        seen += x.flatten().tolist()
    Path(ctx.config["log"], str(ctx.worker)).write_text(json.dumps(seen))


def with_parts_of_a_batch(ctx):
    model, optimizer = model_of(ctx)
    batches = iter(DataLoader(DATA, 3))
    for _ in range(2):
        with ctx.accumulate():
            model(next(batches)[0]).square().mean().backward()
        step(model, optimizer, next(batches)[0])


def evaluating_with_gradients(ctx):
    """Nobody has turned them off, and each epoch ends with it."""
    model, optimizer = model_of(ctx)
    for epoch in ctx.loader(DATA, 4).epochs(2):
        for (x,) in epoch:
            step(model, optimizer, x)
            for (y,) in DataLoader(DATA, 4):
                model(y)


def on_random_numbers(ctx):
    """Each worker draws its own, and now and then looks how far it is."""
    model, optimizer = model_of(ctx)
    for number in range(8):
        step(model, optimizer, torch.rand(3, 1))
        if number % 2:
            for (y,) in DataLoader(DATA, 4):
                model(y)
        with torch.no_grad():
            for (y,) in DataLoader(DATA, 4):
                model(y)


def run(train, path):
    """The run of two workers, and what they have logged."""
    config = {"log": str(path)}
    result = run_local(train, 2, config=config, directory=path / "run")
    return result, "".join(file.read_text() for file in path.glob("*.log"))


@pytest.mark.parametrize("train", [as_in_plain_torch, with_parts_of_a_batch])
def test_whoever_trains_on_a_loader_of_torch_s_is_told_once(train, tmp_path):
    result, told = run(train, tmp_path)
    assert told.count(HINT) == 1
    assert "trains on every sample as often as there are workers (now: 2)" in told
    assert audit(result.events).lines["samples"].startswith("not counted: ")


def test_what_each_worker_reads_of_such_a_loader_is_all_of_it(tmp_path):
    """What the hint says."""
    run(as_in_plain_torch, tmp_path)
    for worker in ("0", "1"):
        assert sorted(json.loads((tmp_path / worker).read_text())) == list(range(12))


@pytest.mark.parametrize("train", [evaluating_with_gradients, on_random_numbers])
def test_nobody_else_is_told(train, tmp_path):
    _, told = run(train, tmp_path)
    assert HINT not in told


def many_steps(ctx):
    """On data that is in no dataset, as in reinforcement learning."""
    model, optimizer = model_of(ctx)
    while ctx.step < 2 * UNMARKED:
        if ctx.config["marked"]:
            ctx.boundary()
        for _ in range(2):  # with further passes between two boundaries
            step(model, optimizer, torch.rand(3, 1))


@pytest.mark.parametrize("marked", [False, True])
def test_steps_whose_beginning_nobody_knows_are_told_of_once(marked, tmp_path):
    config = {"log": str(tmp_path), "marked": marked}
    states = CheckpointConfig(every_steps=10)
    result = run_local(many_steps, 2, config=config, checkpoint=states)
    told = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert told.count(NO_BOUNDARY) == (not marked)
    stored = [event.step for event in result.events if isinstance(event, StateStored)]
    assert stored == (list(range(10, 61, 10)) if marked else [60])  # what the hint says
