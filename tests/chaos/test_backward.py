"""Steps of several backward passes (`ctx.backward`): killed in any of them, against one process.

What stages of a pipeline make of it is in test_crew_pipes.
"""

import functools
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from elastix.config import ExchangeConfig
from elastix.errors import ConfigError, TrainError
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.laws import assert_exactly_once, committed
from tests.trainables import make

CONFIG = {"samples": 130, "batch_size": 30, "epochs": 2, "model": "unused"}


def train(ctx):
    """Two losses a step, the second through a checkpoint that re-enters autograd, then scaled."""
    config = ctx.config
    model, optimizer, dataset = make(config)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, batch_size=config["batch_size"]).epochs(config["epochs"]):
        for x, y in epoch:
            with ctx.backward():
                F.cross_entropy(model(x), y).backward()
                die_between(ctx)
                outputs = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
                F.mse_loss(outputs, F.one_hot(y, 10) * 1.0).backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(2)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def die_between(ctx):
    """Once: a replay runs the same function."""
    mark = Path(ctx.config["mark"])
    if (ctx.worker, ctx.step) == (1, 3) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


KILLS = {
    "nobody": None,
    "between two passes": (),
    "at the exit": [Kill(worker=1, phase="filled", step=3)],
    "first bucket": [Kill(worker=1, phase="bucket", detail=0, step=3)],
    "commit": [Kill(worker=0, phase="round", detail=1, step=3)],
}


@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_passes_of_one_step_agree_with_one_process(tmp_path, kills):
    mark = tmp_path / "mark"
    if kills != ():
        mark.touch()
    config = {**CONFIG, "mark": str(mark)}
    run = run_local(with_kills(train, kills or []), 3, config=config, directory=tmp_path / "run")
    assert len(run.lost) == (kills is not None)
    assert_exactly_once(run.events, 2)
    found = compare(tmp_path / "run")
    assert found.steps == len(committed(run.events)) == 10
    assert found.relative < 1e-9, found


@pytest.mark.parametrize(
    "options",
    [
        {"replace": True, "min_workers": 3},
        {"recovery": "rollback"},
        pytest.param({"shadows": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_joiner_and_a_step_that_is_done_again(tmp_path, options):
    """With batch norm: its statistics are reduced with the gradients."""
    config = {**CONFIG, "mark": str(tmp_path / "mark"), "model": "convnet"}
    run = run_local(train, 3, config=config, directory=tmp_path / "run", **options)
    assert len(run.lost) == 1
    assert_exactly_once(run.events, 2)
    assert compare(tmp_path / "run").relative < 1e-9


class Caught(Exception):
    pass


def refused(inner, ctx):
    model, optimizer, dataset = make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, batch_size=30).epochs(1):
        for x, y in epoch:
            try:
                with ctx.backward():
                    F.cross_entropy(model(x), y).backward()
                    if inner == "caught":
                        raise Caught
            except Caught:
                pass
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("inner", "says", "options"),
    [
        ("caught", "left by an exception", {}),
        ("steps", "ctx.backward does not work", {"exchange": ExchangeConfig(every_steps=2)}),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(tmp_path, inner, says, options):
    function = functools.partial(refused, inner)
    with pytest.raises((ConfigError, TrainError), match=says):
        run_local(function, 2, config=CONFIG, directory=tmp_path, **options)


def adds_up(ctx):
    """Within ctx.accumulate it takes no step: the one after it does."""
    model, optimizer, dataset = make({**ctx.config, "model": "mlp"})
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, batch_size=26).epochs(1):
        for number, (x, y) in enumerate(epoch):
            before = ctx.step
            if number % 2 == 0 and len(epoch):
                with ctx.accumulate(), ctx.backward():
                    F.cross_entropy(model(x), y).backward()
                assert ctx.step == before
                continue
            with ctx.backward(), ctx.backward():
                F.cross_entropy(model(x), y).backward()
            assert ctx.step == before + 1
            optimizer.step()
            optimizer.zero_grad()


def test_within_accumulation_it_takes_no_step(tmp_path):
    run = run_local(adds_up, 2, config=CONFIG, directory=tmp_path / "run")
    assert_exactly_once(run.events, 1)
    assert len(committed(run.events)) == 3
    assert compare(tmp_path / "run").relative < 1e-9


def leaves_over(passes, ctx):
    """One step, and then passes that are in none."""
    logging.getLogger("elastix").addHandler(logging.FileHandler(Path(ctx.config["log"])))
    model, optimizer, dataset = make({**ctx.config, "model": "mlp"})
    model, optimizer = ctx.prepare(model, optimizer)
    batches = iter(next(ctx.loader(dataset, batch_size=26).epochs(1)))
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(passes):
        x, y = next(batches)
        with ctx.accumulate():
            F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("passes", [0, 2])
def test_what_is_in_no_step_at_the_end_is_told_of(tmp_path, passes):
    log = tmp_path / "log"
    config = {**CONFIG, "log": str(log)}
    run_local(functools.partial(leaves_over, passes), 1, config=config, directory=tmp_path / "run")
    assert ("after step 1, and what it has added up" in log.read_text()) == bool(passes)
