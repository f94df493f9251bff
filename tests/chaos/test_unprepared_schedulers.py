"""A scheduler that was forgotten in ctx.prepare begins anew in a joiner: that is said.

An exact run ends there: it would not have the bytes of a quiet one.
"""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from elastix.errors import ConfigError
from elastix.testing.local import run_local

HINT = "it counts from the beginning again"
DATA = TensorDataset(torch.arange(24.0).reshape(24, 1) / 24)


class Keeper:
    """Of the user's; what it keeps, it knows itself."""

    def __init__(self, scheduler):
        self.kept = {"scheduler": scheduler}

    def state_dict(self):
        return self.kept["scheduler"].state_dict()

    def load_state_dict(self, state):
        self.kept["scheduler"].load_state_dict(state)


class Plateau(lr_scheduler.ReduceLROnPlateau):
    def step(self):
        super().step(1.0)


class Compared(lr_scheduler.LambdaLR):
    """By what it holds, as a dataclass is: it has no hash."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda count: 1 / (1 + count))

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


def shrinking(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))


def training(ctx, make=shrinking, tracked=None, *, moves=True):
    handler = logging.FileHandler(Path(ctx.config["log"], f"{ctx.worker}.log"))
    logging.getLogger("elastix").addHandler(handler)
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = make(optimizer)
    ctx.prepare(model, optimizer)
    if tracked is not None:
        ctx.track(scheduler=tracked(scheduler))
    for epoch in ctx.loader(DATA, 8, slices=2).epochs(2):
        for step in epoch:
            optimizer.zero_grad()
            for (x,) in step:
                model(x).square().mean().backward()
            optimizer.step()
        if moves:
            scheduler.step()


def forgotten(ctx):
    training(ctx)


def forgotten_in_sequence(ctx):
    def make(optimizer):
        one, other = shrinking(optimizer), shrinking(optimizer)
        return lr_scheduler.SequentialLR(optimizer, [one, other], [3])

    training(ctx, make)


def forgotten_on_plateau(ctx):
    """Torch does not mark its optimizer, and its count has another name."""
    training(ctx, lambda optimizer: Plateau(optimizer, patience=0))


def tracked_on_plateau(ctx):
    training(ctx, Plateau, tracked=lambda scheduler: scheduler)


def without_hash(ctx):
    training(ctx, Compared, moves=False)


def tracked(ctx):
    training(ctx, tracked=lambda scheduler: scheduler)


def kept_by_another(ctx):
    training(ctx, tracked=Keeper)


def never_moved(ctx):
    training(ctx, moves=False)


def by_the_rate_alone(ctx):
    """Which is in the State: a joiner has it with the optimizer."""
    training(ctx, lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.7))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (forgotten, 1),
        (forgotten_in_sequence, 1),
        (forgotten_on_plateau, 1),
        (tracked_on_plateau, 0),
        (without_hash, 0),
        (tracked, 0),
        (kept_by_another, 0),
        (never_moved, 0),
        (by_the_rate_alone, 0),
    ],
)
def test_a_scheduler_that_is_in_no_state_is_named_once(tmp_path, train, said):
    run_local(train, 2, config={"log": str(tmp_path)}, directory=tmp_path / "run")
    lines = [line for log in tmp_path.glob("*.log") for line in log.read_text().splitlines()]
    assert sum(HINT in line for line in lines) == said


@pytest.mark.parametrize("train", [forgotten, forgotten_in_sequence, forgotten_on_plateau])
def test_an_exact_run_with_a_scheduler_that_is_in_no_state_ends(tmp_path, train):
    with pytest.raises(ConfigError, match="that was given neither to"):
        run_exactly(train, tmp_path)


@pytest.mark.parametrize(
    "train", [tracked, tracked_on_plateau, kept_by_another, never_moved, by_the_rate_alone]
)
def test_an_exact_run_whose_schedulers_are_in_its_state_does_not(tmp_path, train):
    run_exactly(train, tmp_path)


def run_exactly(train, folder):
    run_local(train, 2, config={"log": str(folder)}, directory=folder / "run", exact=True)
