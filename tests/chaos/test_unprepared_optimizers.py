"""A model that was forgotten in ctx.prepare is trained by each worker for itself: that is said."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from elastix.testing.local import run_local

HINT = "takes steps by gradients of each worker's own samples"
DATA = TensorDataset(torch.arange(24.0).reshape(24, 1) / 24)


def prepared(ctx):
    handler = logging.FileHandler(Path(ctx.config["log"], f"{ctx.worker}.log"))
    logging.getLogger("elastix").addHandler(handler)
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))


def batches(ctx):
    for epoch in ctx.loader(DATA, 8).epochs(1):
        yield from epoch


def with_a_forgotten_head(ctx):
    body, optimizer = prepared(ctx)
    head = nn.Linear(1, 1)
    other = torch.optim.SGD(head.parameters(), lr=1e-2)
    for (x,) in batches(ctx):
        head(body(x)).square().mean().backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()


def with_a_forgotten_critic(ctx):
    maker, optimizer = prepared(ctx)
    critic = nn.Linear(1, 1)
    other = torch.optim.SGD(critic.parameters(), lr=1e-2)
    for (x,) in batches(ctx):
        other.zero_grad()
        critic(maker(x).detach()).mean().backward()
        other.step()
        optimizer.zero_grad()
        critic(maker(x)).mean().backward()
        optimizer.step()


def with_what_is_no_part_of_it(ctx):
    """An attack on a batch, and a probe that learns from data that all have."""
    model, optimizer = prepared(ctx)
    probe = nn.Linear(1, 1)
    probing = torch.optim.SGD(probe.parameters(), lr=1e-2)
    for (x,) in batches(ctx):
        shift = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([shift], lr=1e-2, maximize=True)
        for _ in range(3):
            F.relu(x + shift).mean().backward()
            attack.step()
        optimizer.zero_grad()
        model(x + shift.detach()).square().mean().backward()
        optimizer.step()
        for (y,) in DataLoader(DATA, 8):
            probing.zero_grad()
            probe(model(y).detach()).square().mean().backward()
            probing.step()


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (with_a_forgotten_head, 1),
        (with_a_forgotten_critic, 1),
        (with_what_is_no_part_of_it, 0),
    ],
)
def test_a_model_that_each_worker_trains_for_itself_is_named_once(tmp_path, train, said):
    run_local(train, 2, config={"log": str(tmp_path)}, directory=tmp_path / "run")
    lines = [line for log in tmp_path.glob("*.log") for line in log.read_text().splitlines()]
    assert sum(HINT in line for line in lines) == said
