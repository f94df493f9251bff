"""Evaluation by workers that are crews: by all places, every sample once, whoever dies in it."""

import functools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from elastix.config import CheckpointConfig, ExchangeConfig
from elastix.errors import ConfigError, TrainError
from elastix.events import StateStored, WorkerJoined
from elastix.store import Store
from elastix.testing.local import run_local
from tests import crew_evaluations
from tests.crew_evaluations import (
    ONE_SIDED,
    SEVERAL,
    assert_evaluated,
    evaluate,
    loss_and_samples,
    validation,
)
from tests.crew_runs import build, checked, kill, parallelize, train

pytestmark = pytest.mark.timeout(240)


def evaluated(ctx):
    """crew_runs.train, and an evaluation after each epoch."""
    log = Path(ctx.config["log"])
    (log / f"pid-{ctx.worker}-{ctx.place}").write_text(str(os.getpid()))
    train(ctx, after_epoch=functools.partial(evaluate, ctx, log))


def whole_crew_ends(ctx):
    """Both processes of worker 1 in the second batch of an evaluation."""
    log = Path(ctx.config["log"])
    (log / f"pid-{ctx.worker}-{ctx.place}").write_text(str(os.getpid()))

    def look(phase):
        if (ctx.worker, ctx.place, phase) == (1, 1, "in evaluation"):
            for place in (0, 1):
                os.kill(int((log / f"pid-1-{place}").read_text()), signal.SIGKILL)

    def after_epoch(model, _look):
        evaluate(ctx, log, model, look)

    train(ctx, after_epoch=after_epoch)


def run(tmp_path, workers, crew, kills=(), *, function=evaluated, times=2, **options):
    options = {"samples": 36, "epochs": times, **options}
    found = checked(tmp_path, workers, crew, kills, function=function, **options)
    assert_evaluated(tmp_path, found, times)
    return found


@pytest.mark.parametrize(
    "crew",
    [
        {"shard": 3},
        pytest.param({"shard": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"shard": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"shard": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_places_evaluate_and_every_sample_counts_once(tmp_path, crew):
    run(tmp_path, 2, crew)


@pytest.mark.fast("1")
@pytest.mark.parametrize("place", [0, 1])
def test_a_process_is_killed_while_it_evaluates(tmp_path, place):
    found = run(tmp_path, 3, {"shard": 2}, [kill(1, place, "in evaluation")])
    assert [(worker, freed) for worker, freed, _ in found.run.freed] == [(1, 1 - place)]


@pytest.mark.slow
@pytest.mark.parametrize("one", ONE_SIDED.values(), ids=ONE_SIDED)
def test_killed_in_the_protocol_of_an_evaluation(tmp_path, one):
    run(tmp_path, 3, {"shard": 2}, [one])


@pytest.mark.slow
def test_several_are_killed_in_one_evaluation_and_in_the_recovery_from_that(tmp_path):
    run(tmp_path, 4, {"shard": 2}, SEVERAL)


def test_a_whole_crew_is_killed_while_it_evaluates(tmp_path):
    found = run(tmp_path, 2, {"shard": 2}, function=whole_crew_ends)
    assert {(worker, place) for worker, place, _ in found.run.lost_places} == {(1, 0), (1, 1)}


def test_what_is_stored_and_given_after_an_evaluation_is_in_parts(tmp_path):
    """FSDP2 keeps the outermost layer whole until a backward pass, of which there is none then."""
    often = CheckpointConfig(every_steps=3, keep_last=None)  # epochs have three steps
    options = {"checkpoint": often, "replace": True, "min_workers": 2}
    found = run(tmp_path, 2, {"shard": 2}, [kill(1, 1, "in evaluation")], **options)
    joined = [e.step for e in found.run.events if isinstance(e, WorkerJoined)]
    stored = [e for e in found.run.events if isinstance(e, StateStored)]
    assert joined == [3]  # whoever is left waits for it at the boundary after the evaluation
    assert stored[0].step == 3
    assert crew_evaluations.told(tmp_path).keys() == {3, 6}
    with Store(found.run.directory / "store") as store:
        parts = store.manifest(stored[0].ref).tensors
        assert {name for name in parts if name.startswith("last.weight")} == {
            "last.weight[0:5,0:18]",
            "last.weight[5:10,0:18]",
        }


def looks_by_itself(ctx):
    """A forward pass of the train function's own, after which there is no backward pass."""

    def after_epoch(model, _look):
        with torch.no_grad():
            model(validation().tensors[0])

    train(ctx, after_epoch=after_epoch)


@pytest.mark.slow
def test_what_is_stored_after_a_forward_pass_alone_is_in_parts(tmp_path):
    often = CheckpointConfig(every_steps=3, keep_last=None)
    options = {"samples": 36, "epochs": 2, "checkpoint": often, "function": looks_by_itself}
    found = checked(tmp_path, 2, {"shard": 2}, **options)
    assert [e.step for e in found.run.events if isinstance(e, StateStored)][:1] == [3]


def alone(ctx):
    model = build()
    parallelize(model, ctx.mesh)
    ctx.prepare(model)
    return model


def of_other_lengths(ctx):
    alone(ctx)
    ctx.evaluate(
        loss_and_samples, torch.utils.data.Subset(validation(), range(9 + ctx.place)), batch_size=4
    )


def in_other_batches(ctx):
    alone(ctx)
    ctx.evaluate(loss_and_samples, validation(), batch_size=4 + ctx.place)


def by_other_names(ctx):
    alone(ctx)
    ctx.evaluate(lambda m, b: {f"loss {ctx.place}": m(b[0]).sum()}, validation(), batch_size=4)


@pytest.mark.parametrize("function", [of_other_lengths, in_other_batches, by_other_names])
def test_places_that_evaluate_different_things_are_refused(tmp_path, function):
    with pytest.raises(ConfigError, match="at one place of a worker than at another"):
        run_local(function, 2, crew={"shard": 2}, directory=tmp_path)


def averages(values, ctx):
    alone(ctx)
    found = ctx.mean(**values(ctx.place))
    Path(ctx.config["log"], f"{ctx.place}").write_text(json.dumps(found))


def in_an_order_of_its_own(place):
    return {"a": 1.0, "b": 10.0} if place else {"b": 20.0, "a": 2.0}


@pytest.mark.parametrize("crew", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_means_go_by_names_and_not_by_their_order(tmp_path, crew):
    function = functools.partial(averages, in_an_order_of_its_own)
    run_local(function, 1, crew=crew, config={"log": str(tmp_path)}, directory=tmp_path / "run")
    told = [json.loads((tmp_path / place).read_text()) for place in ("0", "1")]
    # Without a batch all places count alike; along tensor that which speaks.
    assert told == [{"a": 1.5, "b": 15.0} if "shard" in crew else {"a": 2.0, "b": 20.0}] * 2


def by_one_name_more(place):
    return {"a": 1.0, "b": 2.0} if place else {"a": 1.0}


def by_another_name(place):
    return {f"loss {place}": 1.0}


@pytest.mark.parametrize("values", [by_one_name_more, by_another_name])
@pytest.mark.parametrize("crew", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_places_that_average_different_things_are_refused(tmp_path, values, crew):
    function = functools.partial(averages, values)
    with pytest.raises(ConfigError, match="was given other names at one place"):
        run_local(function, 1, crew=crew, config={"log": str(tmp_path)}, directory=tmp_path / "run")


def averages_at_place_1(ctx):
    alone(ctx)
    if ctx.place:
        ctx.mean(loss=0.0)
    else:
        ctx.evaluate(loss_and_samples, validation(), batch_size=4)


def test_places_in_different_calls_end_the_run(tmp_path):
    said = r"parted in operation 0: place 0 is in ctx.evaluate, place 1 in ctx.mean"
    with pytest.raises(TrainError, match=said):
        run_local(averages_at_place_1, 1, crew={"tensor": 2}, directory=tmp_path)


@pytest.mark.slow
def test_outer_steps_are_taken_before_an_evaluation(tmp_path):
    """Else the workers would evaluate what each has by itself."""
    exchange = ExchangeConfig(every_steps=2, outer_lr=1.0, outer_momentum=0.0)
    log = tmp_path / "log"
    log.mkdir()
    config = {"kills": [], "log": str(log), "samples": 36, "batch_size": 12, "epochs": 2}
    config |= {"step_s": 0.0, "mean": False}
    run_local(evaluated, 2, config=config, crew={"shard": 2}, exchange=exchange, directory=tmp_path)
    told = [path.read_text() for path in log.glob("*.evaluated")]
    assert len(told) == 4
    assert len(set(told)) == 1
