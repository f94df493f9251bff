"""What stands before the first batch is done to a State once, however often a run begins from one.

A State is captured in the midst of the train function. Whoever begins from it comes to that place
anew, over code that has been run before.
"""

import functools
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elastix
from elastix.config import CheckpointConfig
from elastix.events import Reported, Resumed
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests import crew_runs
from tests.run_bytes import final, kept
from tests.trainables import samples

STEPS = 6  # of an epoch


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def epochs_of(ctx, model, optimizer, epochs):
    data = samples(46)
    for epoch in ctx.loader(data, batch_size=8, slices=4).epochs(epochs):
        yield epoch, data
        for step in epoch:
            for x, y in step:
                loss(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()


def made(ctx):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return ctx.prepare(model, optimizer, scheduler)


def between_loaders(ctx: elastix.Context) -> None:
    """The last layer begins anew with the second one, at half the rate."""
    model, optimizer, _ = made(ctx)
    for _ in epochs_of(ctx, model, optimizer, 1):
        pass
    with torch.no_grad():
        model[-1].weight.mul_(0.5)
    optimizer.param_groups[0]["lr"] *= 0.5
    for _ in epochs_of(ctx, model, optimizer, ctx.config.get("epochs", 2) - 1):
        pass


def at_the_beginning_of_epochs(ctx: elastix.Context) -> None:
    """Weights are moved by noise, and a scheduler goes by an evaluation."""
    model, optimizer, scheduler = made(ctx)
    for _, data in epochs_of(ctx, model, optimizer, ctx.config.get("epochs", 2)):
        scheduler.step(ctx.evaluate(loss, data, batch_size=16)["loss"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def before_all(ctx: elastix.Context) -> None:
    """A scheduler is told how good the model is that nobody has trained yet."""
    model, optimizer, scheduler = made(ctx)
    first = ctx.evaluate(loss, samples(20), batch_size=16)["loss"]
    scheduler.step(first)
    scheduler.step(first + 1)
    for _ in epochs_of(ctx, model, optimizer, 2):
        pass


def run(directory, train, workers=1, kills=(), **options):
    if kills:
        train = with_kills(train, kills)
    every = CheckpointConfig(every_steps=3, wait=True)
    return run_local(train, workers, directory=directory, checkpoint=every, exact=True, **options)


def same(one, other):
    (digest, tensors), (other_digest, others) = final(one), final(other)
    assert not [name for name in tensors if not torch.equal(others[name], tensors[name])]
    assert digest == other_digest


@functools.cache
def undisturbed(train):
    return run(kept(), train)


@pytest.mark.parametrize("train", [between_loaders, at_the_beginning_of_epochs, before_all])
@pytest.mark.parametrize("step", [STEPS - 2, STEPS, STEPS + 5], ids=["in", "between", "after"])
def test_all_are_lost_and_what_was_done_is_not_done_again(tmp_path, train, step):
    kills = [Kill(worker=worker, phase="bucket", step=step) for worker in (0, 1)]
    fired = run(tmp_path, train, 2, kills, replace=True)
    assert [event.step for event in fired.events if isinstance(event, Resumed)] == [step // 3 * 3]
    same(undisturbed(train), fired)


@pytest.mark.parametrize("train", [at_the_beginning_of_epochs, before_all])
def test_who_joins_before_the_first_step_does_not_do_it_again(tmp_path, train):
    """The others wait for it at their first boundary, past what they have done on the way there."""
    options = {"replace": True, "min_workers": 2}
    quiet = run(tmp_path / "quiet", train, 2, **options)
    kills = [Kill(worker=1, phase="evaluate", step=0)]
    fired = run(tmp_path / "fire", train, 2, kills, **options)
    assert set(fired.lost) == {1}
    same(quiet, fired)


def test_a_run_that_had_ended_does_what_it_had_not_done_yet(tmp_path):
    """Its State is that of the end: the beginning of the next epoch comes after it."""
    train = at_the_beginning_of_epochs
    quiet = run(tmp_path / "quiet", train, config={"epochs": 4})
    run(tmp_path / "longer", train, config={"epochs": 2})
    same(quiet, run(tmp_path / "longer", train, 2, config={"epochs": 4}))


def in_crews(ctx: elastix.Context) -> None:
    """At the beginning of an epoch the last layer is halved, and a scheduler steps.

    Whoever is lost is missed in the evaluation before that.
    """
    model = crew_runs.build()
    crew_runs.parallelize(model, ctx.mesh)
    optimizer = crew_runs.adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ctx.prepare(model, optimizer, scheduler)
    for epoch in ctx.loader(crew_runs.data(36), batch_size=12, slices=4).epochs(2):
        ctx.evaluate(loss, crew_runs.data(8), batch_size=4)
        scheduler.step()
        with torch.no_grad():
            model.last.weight.mul_(0.5)
        for step in epoch:
            for x, y in step:
                loss(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()


LOST = {
    "all": [Kill(worker=worker, phase="computed", step=4) for worker in (0, 1)],
    "one": [Kill(worker=1, phase="computed", step=4)],
    "one before the first step": [Kill(worker=1, phase="evaluate", step=0)],
}


IN_CREWS = {"crew": {"shard": 2}, "replace": True, "min_workers": 2}


@functools.cache
def undisturbed_crews():
    return run(kept(), in_crews, 2, **IN_CREWS)


@pytest.mark.parametrize("lost", LOST)
def test_crews_do_it_once_as_well(tmp_path, lost):
    """Places have parts of tensors, in what is read from the store and in what mates are given."""
    fired = run(tmp_path, in_crews, 2, LOST[lost], **IN_CREWS)
    resumed = [event.step for event in fired.events if isinstance(event, Resumed)]
    assert resumed == ([3] if lost == "all" else [])
    assert len(fired.lost) == len(LOST[lost])
    same(undisturbed_crews(), fired)


def averages_in_a_crew(ctx: elastix.Context) -> None:
    """The average is sharded as the model is, and tracked when the State has come."""
    logging.getLogger("elastix").addHandler(logging.FileHandler(Path(ctx.config["log"])))
    model, average = crew_runs.build(), crew_runs.build()
    for each in (model, average):
        crew_runs.parallelize(each, ctx.mesh)
    model, optimizer = ctx.prepare(model, crew_runs.adamw(model))
    ctx.track(average=average)
    for epoch in ctx.loader(crew_runs.data(36), batch_size=12).epochs(2):
        for x, y in epoch:
            loss(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)


def test_a_part_of_what_is_tracked_later_is_not_taken_for_a_change(tmp_path):
    kills = [Kill(worker=worker, phase="bucket", step=4) for worker in (0, 1)]
    options = {
        "config": {"log": str(tmp_path / "log")},
        "checkpoint": CheckpointConfig(every_steps=3, wait=True),
    }
    crew = {"crew": {"shard": 2}, "replace": True}
    train = with_kills(averages_in_a_crew, kills)
    found = run_local(train, 2, directory=tmp_path, **crew, **options)
    assert [event.step for event in found.events if isinstance(event, Resumed)] == [3]
    assert "has changed" not in (tmp_path / "log").read_text()


def told(ctx: elastix.Context) -> None:
    logging.getLogger("elastix").addHandler(logging.FileHandler(Path(ctx.config["log"])))
    between_loaders(ctx)


def test_what_is_done_again_in_a_run_that_is_not_exact_is_said(tmp_path):
    kills = [Kill(worker=worker, phase="bucket", step=STEPS + 1) for worker in (0, 1)]
    options = {
        "config": {"log": str(tmp_path / "log")},
        "checkpoint": CheckpointConfig(every_steps=STEPS + 1, wait=True),
    }
    run_local(with_kills(told, kills), 2, directory=tmp_path, replace=True, **options)
    said = (tmp_path / "log").read_text()
    assert "has changed model, optimizer between ctx.prepare" in said
    assert said.count("done twice now") == 1


def warms_up(ctx: elastix.Context) -> None:
    """A scheduler is made of the optimizer that was prepared, and tracked."""
    logging.getLogger("elastix").addHandler(logging.FileHandler(Path(ctx.config["log"])))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    ctx.track(scheduler=scheduler)
    for epoch in ctx.loader(samples(48), batch_size=8).epochs(ctx.config["epochs"]):
        for batch in epoch:
            ctx.report(rate=optimizer.param_groups[0]["lr"])
            loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def test_a_scheduler_that_is_made_after_the_state_has_come_goes_on_at_its_rate(tmp_path):
    """It took a tenth of that, after all were lost with a warning, after the end without one."""
    kills = [Kill(worker=worker, phase="bucket", step=4) for worker in (0, 1)]
    options = {"replace": True, "checkpoint": CheckpointConfig(every_steps=3, wait=True)}
    train, log = with_kills(warms_up, kills), tmp_path / "log"
    for epochs in (1, 2):
        config = {"log": str(log), "epochs": epochs}
        found = run_local(train, 2, directory=tmp_path, config=config, **options)
        rates = {e.step: e.metrics["rate"] for e in found.events if isinstance(e, Reported)}
        for step, rate in rates.items():
            assert rate == pytest.approx(0.1 * (0.1 + 0.9 * step / 20)), step
    assert "has changed" not in log.read_text()


def reports_its_last_loss(ctx: elastix.Context) -> None:
    """A run that goes on from the end of an epoch has no batch of it, and so no loss."""
    model, optimizer, _ = made(ctx)
    for epoch in ctx.loader(samples(48), batch_size=8).epochs(2):
        for batch in epoch:
            last = loss(model, batch)
            last.backward()
            optimizer.step()
            optimizer.zero_grad()
        ctx.report(last=last)


def test_an_epoch_without_a_batch_is_named_where_what_its_loop_sets_is_not_there(tmp_path):
    options = {"replace": True, "checkpoint": CheckpointConfig(every_steps=STEPS, wait=True)}
    doomed = with_kills(reports_its_last_loss, [Kill(worker=0, phase="bucket", step=STEPS + 1)])
    with pytest.raises(elastix.WorkerFailed, match="where an epoch had no batch left") as caught:
        run_local(doomed, 1, directory=tmp_path, **options)
    assert "UnboundLocalError" in str(caught.value)
