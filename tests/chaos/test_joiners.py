"""Joiners that nobody waits for: they follow the group from outside until they are level."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastix.comm.network import catch_up_stream
from elastix.errors import ReplicasDiffer, TrainError
from elastix.events import GenerationFormed, Recovered, Reported
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from elastix.train.control.messages import OutcomeKind
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.run_bytes import final
from tests.trainables import accuracy, await_worker, make, samples, train, usher, usher_all

CONFIG = {"model": "convnet", "samples": 300, "batch_size": 30, "epochs": 4, "step_s": 0.03}


def run(tmp_path, train, workers=2, config=None, newcomers=(2,), **options):
    """A run that waits from step 3 on for newcomers, as far as they need it."""
    logs = tmp_path / "logs"
    logs.mkdir()
    meeting = {"meeting": str(logs.parent), "ushers": {str(one): 3 for one in newcomers}}
    settings = {**CONFIG, **meeting, **(config or {}), "log": str(logs)}
    result = run_local(train, workers, config=settings, directory=tmp_path / "run", **options)
    assert_exactly_once(result.events, settings["epochs"])
    assert_replicas_identical(logs, set(result.lost), result.events)
    return result


@pytest.mark.fast("convnet")
@pytest.mark.parametrize("model", ["convnet", "tied", "unused"])
def test_a_joiner_follows_the_steps_that_it_missed(tmp_path, model):
    """It grows the group beyond its founders, and a replay agrees with what came out."""
    result = run(tmp_path, train, 2, config={"model": model}, spares=1, max_workers=3)
    (join,) = joins(result.events)
    assert join.watched_steps > 0
    assert committed(result.events)[-1].world_size == 3
    assert not [event for event in result.events if isinstance(event, Recovered)]
    assert compare(tmp_path / "run").relative < 1e-9


def test_who_joins_gathers_in_the_type_that_the_others_do(tmp_path):
    """NAdam has a float32 beside weights in float64; torch loads it as a float64."""
    config = {"model": "mlp", "optimizer": "nadam"}
    result = run(tmp_path, train, 2, config=config, spares=1, max_workers=3)
    assert len(joins(result.events)) == 1
    assert not result.lost


@pytest.mark.slow
def test_with_accumulation_and_evaluations_on_the_way(tmp_path):
    config = {"accumulate": 2, "samples": 120, "epochs": 16}
    result = run(tmp_path, train, 2, config=config, spares=1, max_workers=3)
    (join,) = joins(result.events)
    assert join.watched_steps > 0
    assert compare(tmp_path / "run").relative < 1e-9


@pytest.mark.slow
def test_several_joiners_at_once_burden_several_donors(tmp_path):
    result = run(tmp_path, train, 2, newcomers=(2, 3, 4), spares=3, max_workers=5)
    assert {join.worker for join in joins(result.events)} == {2, 3, 4}
    assert all(join.watched_steps > 0 for join in joins(result.events))
    assert committed(result.events)[-1].world_size == 5


@pytest.mark.parametrize("phase", ["take", "batch"], ids=["in the copy", "in a step after it"])
def test_a_joiner_that_dies_while_it_catches_up_is_noticed_by_nobody(tmp_path, phase):
    dead = tmp_path / "2-in"  # it need not be waited for any longer
    doomed = with_kills(train, [Kill(worker=2, phase=phase)], log=dead)
    result = run(tmp_path, doomed, 2, spares=1, max_workers=3)
    assert set(result.lost) == {2}
    assert len([e for e in result.events if isinstance(e, GenerationFormed)]) == 1


def test_another_donor_takes_over_in_the_copy(tmp_path):
    doomed = with_kills(train, [Kill(worker=0, phase="give")])
    result = run(tmp_path, doomed, 2, config={"epochs": 10}, spares=1, max_workers=3)
    assert set(result.lost) == {0}
    assert [join.worker for join in joins(result.events)] == [2]


def test_another_donor_takes_over_in_the_steps_after_it(tmp_path):
    result = run(tmp_path, DonorDies(str(tmp_path)), 2, spares=1, max_workers=3)
    assert set(result.lost) == {0}
    (join,) = joins(result.events)
    assert join.worker == 2
    assert join.watched_steps > 0  # it followed the other one: the group need not wait for a copy


@dataclass(frozen=True)
class DonorDies:
    """Worker 0 dies in the step after the one in which it gave the State, when worker 2 has it."""

    folder: str

    def __call__(self, ctx):
        given, followed, struck = (Path(self.folder, name) for name in ("given", "fed", "struck"))

        def strike(name, _):
            if name == "give" and ctx.step:  # not to the founders
                given.touch()
            if name == "bucket" and given.exists():
                await_worker(followed)
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def follow(name, _):
            if name == "boundary" and ctx.rank < 0 and not struck.exists():
                followed.touch()
                await_worker(struck)

        ctx.on_phase({0: strike, 2: follow}.get(ctx.worker, lambda *_: None))
        train(ctx)


@dataclass(frozen=True)
class Asks:
    """`train`, with a call before its first batch, and before the first of each epoch."""

    call: str

    def __call__(self, ctx):
        data = make(ctx.config)[2]
        calls = {
            "report": lambda: ctx.report(before=ctx.step),
            "evaluate": lambda: ctx.report(
                before=ctx.evaluate(accuracy, data, batch_size=64)["accuracy"]
            ),
            "mean": lambda: ctx.report(before=ctx.mean(one=1.0)["one"]),
        }
        prepare, open_loader = ctx.prepare, ctx.loader

        def prepared(*objects):
            made = prepare(*objects)
            calls[self.call]()
            return made

        def opened(*given, **options):
            loader = open_loader(*given, **options)
            epochs = loader.epochs

            def asks(total):
                for epoch in epochs(total):
                    calls[self.call]()
                    yield epoch

            loader.epochs = asks
            return loader

        ctx.prepare, ctx.loader = prepared, opened
        train(ctx)


FOLLOWS = {"spares": 1, "max_workers": 3}
WAITED_FOR = {"replace": True, "min_workers": 2, "newcomers": ()}


@pytest.mark.fast("follows-report", "waited for-evaluate", "follows-mean")
@pytest.mark.parametrize("call", ["report", "evaluate", "mean"])
@pytest.mark.parametrize(
    ("first", "options"), [(20, FOLLOWS), (4, WAITED_FOR)], ids=["follows", "waited for"]
)
def test_what_stands_before_the_batch_of_a_joiner_the_group_has_behind_it(
    tmp_path, call, first, options
):
    """The joiner is the first of the group in the end, and tells the journal."""
    kills = [Kill(worker=1, phase="batch", step=first), Kill(worker=0, phase="batch", step=25)]
    result = run(tmp_path, with_kills(Asks(call), kills), 2, **options)
    assert {0, 1} <= set(result.lost)
    told = [e.metrics.get("before") for e in result.events if isinstance(e, Reported)]
    told = [before for before in told if before is not None]
    assert len(told) == 1 + CONFIG["epochs"]
    assert call != "mean" or set(told) == {1.0}


@dataclass(frozen=True)
class WithQueueOf:
    """`train`, with room for so many bytes of what joiners are told."""

    queue_bytes: int

    def __call__(self, ctx):
        catch_up_stream.QUEUE_BYTES = self.queue_bytes
        catch_up_stream.QUEUE_STEPS = 0  # else a step may be larger than the queue
        train(ctx)


@pytest.mark.parametrize(("samples", "epochs"), [(300, 8), (30, 80)], ids=["long", "of one step"])
def test_a_joiner_that_falls_too_far_behind_is_given_the_state_in_the_group(
    tmp_path, samples, epochs
):
    """No step's gradients fit the queue: its donor drops it whenever it gets one.

    Where epochs are short it is given the State of another one each time; so would others be.
    """
    config = {"samples": samples, "epochs": epochs}
    result = run(tmp_path, WithQueueOf(1000), 2, config=config, spares=1, max_workers=3)
    assert [join.worker for join in joins(result.events)] == [2]
    assert not result.lost


@dataclass(frozen=True)
class Forgetful:
    """A joiner whose copy of the State is not what was sent."""

    def __call__(self, ctx):
        if ctx.worker == 2:
            ctx.on_phase(lambda name, _: name == "batch" and ctx.rank < 0 and spoil(ctx))
        train(ctx)


def spoil(ctx):
    ctx._member._tracked.model.head.weight.data[0, 0] += 1


def test_a_joiner_that_differs_from_its_donor_is_not_let_in_as_it_is(tmp_path):
    meeting = {"meeting": str(tmp_path), "ushers": {"2": 3}}
    config = {**CONFIG, **meeting}
    result = run_local(
        Forgetful(), 2, config=config, directory=tmp_path / "run", spares=1, max_workers=3
    )
    (join,) = joins(result.events)
    assert join.watched_steps == 0  # it was given the State again, in the group
    assert_exactly_once(result.events, config["epochs"])
    assert compare(tmp_path / "run").relative < 1e-9


@dataclass(frozen=True)
class TwoLoops:
    """Worker 2 is in the first loop, and is held there until the group is in the second.

    Then it is given the State anew: while it follows from outside, as its donor has dropped it; or
    in the group, as its own was found to differ. The group goes on when it needs a step, and at
    last when it is gone.
    """

    folder: str
    in_group: bool

    def __call__(self, ctx):
        held, far = Path(self.folder, "2-held"), Path(self.folder, "far")
        queue = catch_up_stream.QUEUE_BYTES, catch_up_stream.QUEUE_STEPS
        if not self.in_group:
            catch_up_stream.QUEUE_BYTES, catch_up_stream.QUEUE_STEPS = 1000, 0
        model, optimizer, dataset = make(ctx.config)
        model, optimizer = ctx.prepare(model, optimizer)
        if ctx.worker == 2:
            ctx.on_phase(lambda name, _: self.hold(ctx, name, held, far))
        try:
            for loop in range(2):
                loader = ctx.loader(dataset, 30)
                for epoch in loader.epochs(2):
                    for x, y in epoch:
                        if loop and ctx.rank >= 0:
                            catch_up_stream.QUEUE_BYTES, catch_up_stream.QUEUE_STEPS = queue
                            far.touch()
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if ctx.step >= 3:
                            usher(ctx, 2, "in" if loop else "held")
        finally:
            if ctx.worker == 2:
                Path(self.folder, "2-in").touch()

    def hold(self, ctx, phase, held, far):
        if held.exists() or ctx.rank >= 0:
            return
        if self.in_group and phase == "batch":
            spoil(ctx)
        if phase == ("unequal" if self.in_group else "boundary"):
            held.touch()
            await_worker(far)


@pytest.mark.parametrize("in_group", [False, True])
def test_a_joiner_in_a_loop_that_the_group_is_through_with_is_replaced(tmp_path, in_group):
    config = {**CONFIG, "meeting": str(tmp_path)}
    result = run_local(
        TwoLoops(str(tmp_path), in_group),
        2,
        config=config,
        directory=tmp_path / "run",
        spares=1,
        max_workers=3,
    )
    assert (tmp_path / "far").exists()
    outcome = OutcomeKind.FENCED if in_group else OutcomeKind.LEFT
    assert result.outcomes[2].kind == outcome, str(result.outcomes[2])
    assert_exactly_once(result.events, 2)
    assert compare(tmp_path / "run").relative < 1e-9


@pytest.mark.fast("linear")
@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_batch_and_rate_that_follow_the_group(tmp_path, rule):
    config = {"rate": rule, "batch_size": 10, "samples": 300, "epochs": 6}
    doomed = with_kills(train, [Kill(worker=0, phase="bucket", step=40)])
    result = run(tmp_path, doomed, 2, config=config, spares=1, max_workers=3)
    assert joins(result.events)[0].watched_steps > 0
    sizes = [sum(batch.samples for batch in step.batches) for step in committed(result.events)]
    assert sizes[0] == 20
    assert 30 in sizes
    assert compare(tmp_path / "run").relative < 1e-9


# ------------------------------------------- loops as they are written for one process elsewhere


FOLDS = (12, 36, 48)  # samples of each: eight steps to an epoch of all


def linear(ctx):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step_on(model, optimizer, batch, rate=0.1):
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def annealing(ctx):
    """The rate is a variable, as in PyTorch's example of a language model."""
    model, optimizer = linear(ctx)
    rate = 1.0
    for epoch in ctx.loader(samples(60), batch_size=12).epochs(3):
        for batch in epoch:
            step_on(model, optimizer, batch, rate)
        rate /= 4


def counting(ctx):
    """Iterations are counted, as in minGPT."""
    model, optimizer = linear(ctx)
    number = 0
    for epoch in ctx.loader(samples(60), batch_size=12).epochs(10):
        for batch in epoch:
            step_on(model, optimizer, batch)
            number += 1
            if number == 12:
                return


def by_turns(ctx):
    """A loader for each fold, as in Fabric's example of a cross-validation."""
    model, optimizer = linear(ctx)
    folds = [ctx.loader(samples(many), batch_size=12).epochs(4) for many in FOLDS]
    for _ in range(4):
        for fold in folds:
            for batch in next(fold):
                step_on(model, optimizer, batch)


def in_turn(ctx):
    """The same in the way that the error advises."""
    model, optimizer = linear(ctx)
    loaders = [ctx.loader(samples(many), batch_size=12, slices=2) for many in FOLDS]
    for epochs in zip(*(loader.epochs(4) for loader in loaders), strict=True):
        for epoch in epochs:
            for step in epoch:
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()


def in_phases(ctx):
    """Each ends with an evaluation after its epochs, by which the first may end early."""
    model, optimizer = linear(ctx)
    former, latter = (ctx.loader(samples(many), batch_size=12, slices=2) for many in FOLDS[1:])

    def train(step):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        usher_all(ctx)

    for epoch in former.epochs(50):
        for step in epoch:
            train(step)
        score = ctx.evaluate(accuracy, samples(20), batch_size=6)["accuracy"]
        ctx.report(score=score)
        if score >= 0 and epoch.number == 1:
            break
    for epoch in latter.epochs(3):
        for step in epoch:
            train(step)
        ctx.report(**ctx.evaluate(accuracy, samples(20), batch_size=6))


def joined_after(step, program, directory, **options):
    """A run in which worker 2 joins in place of 1, and nobody goes on before."""
    kills = [Kill(worker=1, phase="bucket", step=step)]
    options = {"replace": True, "min_workers": 2, **options}
    return run_local(with_kills(program, kills), 2, directory=directory, **options)


@pytest.mark.parametrize(
    ("program", "error", "says"),
    [
        (annealing, ReplicasDiffer, "a variable of the train function that began anew there"),
        (counting, TrainError, "a variable that counts steps, batches or epochs"),
        (by_turns, ReplicasDiffer, "let loaders take turns within `for epochs in zip"),
    ],
)
def test_what_began_anew_in_a_joiner_is_named_as_what_to_look_for(tmp_path, program, error, says):
    with pytest.raises(error, match=says):
        joined_after(9, program, tmp_path)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_who_joins_in_a_later_phase_passes_by_what_ended_the_one_before(tmp_path, later, outside):
    """It computes alone on the way, and finds no batch of the loader whose turn is over."""
    at = 2 * FOLDS[1] // 12 + later
    config = {"ushers": {"2": at + 1}, "meeting": str(tmp_path)} if outside else {}
    options = {"config": config, "min_workers": 1 if outside else 2}
    result = joined_after(at, in_phases, tmp_path / "joined", exact=True, **options)
    assert [join.worker for join in joins(result.events)] == [2]
    assert final(result)[0] == final(run_local(in_phases, 1, exact=True))[0]
    told = [event.step for event in result.events if isinstance(event, Reported)]
    assert told == sorted(set(told))


def test_loaders_take_turns_epoch_by_epoch(tmp_path):
    result = joined_after(13, in_turn, tmp_path / "joined", exact=True)
    assert [join.worker for join in joins(result.events)] == [2]
    assert_exactly_once(result.events, 4)
    assert final(result)[0] == final(run_local(in_turn, 1, exact=True))[0]
