"""User code that has one place of a worker compute more than the others: an error, and no hang.

Real processes on gloo.
"""

import functools
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from elastix.comm.protocol.standing import STILL_S
from elastix.errors import TrainError
from elastix.testing.local import run_local
from tests import pipe_runs
from tests.crew_runs import adamw, build, checked, data, parallelize, train
from tests.pipe_runs import only


def more_at_one_place(what, place, ctx):
    model = build()
    parallelize(model, ctx.mesh)
    optimizer = adamw(model, lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data(60), batch_size=12).epochs(3):
        for x, y in epoch:
            mine = ctx.place == place and ctx.step == 3
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            if mine:
                what(model, loss, x, y)
            optimizer.step()
            optimizer.zero_grad()


def backward_again(model, loss, x, y):
    loss.backward()


def a_pass(model, loss, x, y):
    F.cross_entropy(model(x), y).backward()


def a_look(model, loss, x, y):
    with torch.no_grad():
        model(x)


def a_norm(model, loss, x, y):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()


SLOW = pytest.mark.slow
SHARD, TENSOR, BOTH = {"shard": 2}, {"tensor": 2}, {"shard": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("what", "place", "crew"),
    [
        (backward_again, 0, SHARD),
        pytest.param(backward_again, 1, SHARD, marks=SLOW),
        pytest.param(a_pass, 0, SHARD, marks=SLOW),
        pytest.param(a_look, 0, SHARD, marks=SLOW),
        pytest.param(a_norm, 0, SHARD, marks=SLOW),
        pytest.param(a_norm, 1, SHARD, marks=SLOW),
        pytest.param(backward_again, 0, TENSOR, marks=SLOW),
        pytest.param(a_look, 1, TENSOR, marks=SLOW),
        pytest.param(backward_again, 1, BOTH, marks=SLOW),
        pytest.param(backward_again, 3, BOTH, marks=SLOW),
    ],
)
def test_places_that_wait_for_each_other_for_ever_end_the_run(tmp_path, what, place, crew):
    function = functools.partial(more_at_one_place, what, place)
    with pytest.raises(TrainError, match="have parted, and wait for each other") as raised:
        run_local(function, 2, crew=crew, directory=tmp_path)
    found = re.search(r"place (\d), now at line \d+ of (\S+)", str(raised.value))
    assert found is not None
    assert (int(found[1]), found[2].rstrip(",")) == (place, Path(__file__).name)
    assert "collectives along" in str(raised.value)


def clips_at_one_place(place, ctx):
    """By a norm that all places make together, along no axis."""
    model = build()
    parallelize(model, ctx.mesh)
    ctx.prepare(model)
    if ctx.place == place:
        ctx.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=SLOW)])
def test_what_all_places_compute_together_is_counted_on_a_mesh_of_two_axes(tmp_path, place):
    function = functools.partial(clips_at_one_place, place)
    with pytest.raises(TrainError, match="has begun 1 collectives along all axes"):
        run_local(function, 1, crew=BOTH, directory=tmp_path)


LAYERS = {2: ([0, 1], [2, 3]), 3: ([0], [1], [2, 3])}


def stages(ctx, in_schedule, otherwise):
    """Steps of a pipeline; from the third on each stage does what is its own."""
    places = ctx.mesh.size()
    model = only(build(), LAYERS[places][ctx.place])
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = ctx.prepare(model, optimizer)

    def schedule(number):
        stage = PipelineStage(model, ctx.place, places, ctx.device, group=ctx.mesh.get_group())
        return ScheduleGPipe(stage, number, loss_fn=F.cross_entropy)

    usual, longer = schedule(2), schedule(3)
    for epoch in ctx.loader(data(36), batch_size=12, microbatch=3).epochs(1):
        for x, y in epoch:
            with ctx.backward():
                if ctx.step < 2:
                    [usual, longer][ctx.step].step(x, target=y)
                elif ctx.place in in_schedule:
                    in_schedule[ctx.place](usual, longer, x, y)
                else:
                    otherwise(usual, x, y)
                    parameters = list(model.parameters())
                    parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.step()
            optimizer.zero_grad()


def runs(usual, longer, x, y):
    usual.step(x, target=y)


def runs_on_more(usual, longer, x, y):
    longer.step(x, target=y)


def nothing(usual, x, y):
    pass


def trains(usual, x, y):
    usual.step(x, target=y)


@pytest.mark.parametrize(
    ("places", "in_schedule", "otherwise"),
    [
        (2, {0: runs}, nothing),
        pytest.param(2, {1: runs}, nothing, marks=SLOW),
        pytest.param(3, {0: runs}, nothing, marks=SLOW),
        pytest.param(3, {2: runs}, nothing, marks=SLOW),
        pytest.param(3, {0: runs, 1: runs}, nothing, marks=SLOW),
        pytest.param(3, {1: runs, 2: runs}, nothing, marks=SLOW),
        pytest.param(3, {0: runs, 2: runs}, nothing, marks=SLOW),
        pytest.param(3, {0: runs_on_more}, trains, marks=SLOW),
    ],
)
def test_stages_of_which_some_run_no_schedule_end_the_run(tmp_path, places, in_schedule, otherwise):
    function = functools.partial(stages, in_schedule=in_schedule, otherwise=otherwise)
    with pytest.raises(TrainError, match="have parted, and wait for each other"):
        run_local(function, 2, crew={"pipe": places}, directory=tmp_path)


@pytest.mark.parametrize(
    ("what", "crew"), [(a_pass, SHARD), pytest.param(backward_again, TENSOR, marks=SLOW)]
)
def test_a_follower_that_takes_a_step_of_its_own_is_told_so(tmp_path, what, crew):
    function = functools.partial(more_at_one_place, what, 1)
    with pytest.raises(TrainError, match="have parted: one is in operation 4"):
        run_local(function, 2, crew=crew, directory=tmp_path)


def late(place, ctx):
    """One place is in user code for long, and the other waits for it."""

    def look(phase, detail):
        if phase == "boundary" and ctx.step == 3 and ctx.place == place:
            threading.Event().wait(2 * STILL_S)

    ctx.on_phase(look)
    train(ctx)


def late_in_schedule(place, ctx):
    """One stage computes for long; others wait for it in their schedules, or are through."""

    def wait(*_):
        if ctx.step == 2 and ctx.place == place:
            threading.Event().wait(2 * STILL_S)

    kept = pipe_runs.only

    def only_late(model, layers):
        part = kept(model, layers)
        for layer in part.children():
            layer.register_full_backward_hook(wait)
        return part

    pipe_runs.only = only_late
    pipe_runs.train(ctx)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_that_is_late_has_not_parted(tmp_path, place):
    checked(tmp_path, 2, {"pipe": 3}, function=functools.partial(late_in_schedule, place))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_place_that_is_late_has_not_parted(tmp_path, place):
    checked(tmp_path, 2, {"shard": 2}, function=functools.partial(late, place))
