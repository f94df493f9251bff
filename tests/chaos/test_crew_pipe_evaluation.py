"""ctx.evaluate where workers are pipelines: every sample once, whoever is killed in it."""

import functools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from elastix.errors import ConfigError
from elastix.testing.local import run_local
from tests import pipe_runs
from tests.crew_evaluations import ONE_SIDED, SEVERAL, assert_evaluated, evaluate, means, validation
from tests.crew_runs import build, checked, data, kill
from tests.pipe_runs import MICRO, only

pytestmark = pytest.mark.timeout(240)

BATCH = 6
"""Two micro-batches. There are 23 samples, which are no multiple."""


def evaluated(ctx, kind="1f1b"):
    """pipe_runs.train, and an evaluation after each epoch."""
    log = Path(ctx.config["log"])
    sharded = ctx.mesh is not None and "shard" in ctx.mesh.mesh_dim_names
    shards = ctx.mesh["shard"].size() if sharded else 1
    batch = MICRO * max(2, shards)

    def after_epoch(pipeline, model, look):
        def metric(stage, batch):
            x, y, _ = batch
            outputs = stage(x) if pipeline is None else pipeline.outputs(x, y)
            return None if outputs is None else means(outputs, batch)

        evaluate(ctx, log, model, look, metric, at=1, batch_size=batch, microbatch=MICRO)

    pipe_runs.train(ctx, kind, after_epoch)


def run(tmp_path, workers, crew, kills=(), *, kind="1f1b", times=2, **options):
    function = functools.partial(evaluated, kind=kind)
    options = {"samples": 36, "epochs": times, "function": function, **options}
    found = checked(tmp_path, workers, crew, kills, **options)
    assert_evaluated(tmp_path, found, times)
    return found


def test_a_stage_is_killed_while_it_evaluates(tmp_path):
    found = run(tmp_path, 2, {"pipe": 2}, [kill(1, 1, "in evaluation")])
    assert [(worker, freed) for worker, freed, _ in found.run.freed] == [(1, 0)]


def test_all_places_evaluate_and_every_sample_counts_once(tmp_path):
    run(tmp_path, 2, {"pipe": 2, "shard": 2}, times=1)


MESHES = [{"pipe": 2}, {"pipe": 2, "shard": 2}, {"shard": 2, "pipe": 2}, {"pipe": 2, "tensor": 2}]
EVERYWHERE = [(crew, place) for crew in MESHES for place in range(math.prod(crew.values()))]


@pytest.mark.slow
@pytest.mark.parametrize(("crew", "place"), EVERYWHERE, ids=str)
def test_killed_on_any_mesh(tmp_path, crew, place):
    run(tmp_path, 3, crew, [kill(1, place, "in evaluation")], batch_size=18)


@pytest.mark.slow
@pytest.mark.parametrize("one", ONE_SIDED.values(), ids=ONE_SIDED)
def test_killed_in_the_protocol_of_an_evaluation(tmp_path, one):
    run(tmp_path, 3, {"pipe": 2}, [one])


@pytest.mark.slow
def test_several_are_killed_in_one_evaluation_and_in_the_recovery_from_that(tmp_path):
    run(tmp_path, 4, {"pipe": 2}, SEVERAL)


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 3}, {"pipe": 2, "shard": 3}, {"pipe": 1}], ids=str)
def test_meshes(tmp_path, crew):
    run(tmp_path, 2, crew, batch_size=18)


@pytest.mark.slow
@pytest.mark.parametrize("kind", pipe_runs.SCHEDULES)
def test_schedules(tmp_path, kind):
    options = {"samples": 36, "batch_size": 36}
    run(tmp_path, 1, {"pipe": 2}, kind=kind, **options)


@pytest.mark.slow
def test_a_new_worker_evaluates_too(tmp_path):
    options = {"replace": True, "epochs": 6, "times": 6, "step_s": 0.1}
    found = run(tmp_path, 3, {"pipe": 2}, [kill(1, 1, "in evaluation")], **options)
    assert set(found.run.outcomes) >= {0, 2, 3}


def evaluates_before_it_steps(ctx):
    """The gradients at this stage are the same objects and bits after an evaluation."""
    model = only(build(), ([0, 1], [2, 3])[ctx.place])
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    stage = PipelineStage(model, ctx.place, 2, ctx.device, group=ctx.mesh["pipe"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)

    def metric(_model, batch):
        outputs = ScheduleGPipe(stage, max(1, len(batch[0]) // MICRO)).eval(batch[0])
        return None if outputs is None else {"loss": F.cross_entropy(outputs, batch[1])}

    def check(gradients):
        ctx.evaluate(metric, data(24), batch_size=2 * MICRO, microbatch=MICRO)
        for parameter, (gradient, value) in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, value)

    def gradients():
        return [(p.grad, p.grad.clone()) for p in model.parameters()]

    for epoch in ctx.loader(data(24), batch_size=6, microbatch=MICRO).epochs(1):
        batches = iter(epoch)
        for x, y in batches:
            with ctx.accumulate(), ctx.backward():
                schedule.step(x, target=y)
            check(gradients())  # in the middle of a step
            x, y = next(batches)
            with ctx.backward():
                schedule.step(x, target=y)
            check(gradients())
            optimizer.step()
            optimizer.zero_grad()


def test_an_evaluation_leaves_gradients_as_they_are(tmp_path):
    run = run_local(evaluates_before_it_steps, 1, crew={"pipe": 2}, directory=tmp_path)
    assert run.outcomes


# ---------------------------------------------------------------------------- refused


def refused(what, ctx):
    """A metric, or what it is called with, that would count wrongly or not at all."""
    model = only(build(), ([0, 1], [2, 3])[ctx.place])
    ctx.prepare(model)
    pipe = ctx.mesh["pipe"]
    stage = PipelineStage(model, ctx.place, 2, ctx.device, group=pipe.get_group())

    def metric(model, batch):
        x, y, _ = batch
        if what == "no schedule":
            width = 16 if ctx.place == 0 else 18
            return {"loss": model(torch.ones(len(x), width, dtype=x.dtype)).sum()}
        outputs = ScheduleGPipe(stage, max(1, len(x) // MICRO)).eval(x)
        if outputs is None:
            return None
        return None if what == "no number" else {"loss": F.cross_entropy(outputs, y)}

    wrong = {"no micro-batches": {"microbatch": None}, "odd batches": {"batch_size": 7}}
    cut = {"batch_size": BATCH, "microbatch": MICRO, **wrong.get(what, {})}
    ctx.evaluate(metric, validation(), **cut)


REFUSED = {
    "no micro-batches": "ctx.evaluate was given no microbatch",
    "odd batches": "a batch_size of 7 is no whole number of micro-batches of 3",
    "no schedule": "the metric of ctx.evaluate ran no schedule",
    "no number": "gave None",
}


@pytest.mark.parametrize(("what", "says"), REFUSED.items(), ids=REFUSED)
def test_what_would_be_counted_wrongly_is_refused(tmp_path, what, says):
    with pytest.raises(ConfigError, match=says):
        run_local(functools.partial(refused, what), 1, crew={"pipe": 2}, directory=tmp_path)
