"""Laws of workers whose layers are split into stages: as test_crews has them of other meshes."""

import functools
import math
import signal

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from elastix.config import CheckpointConfig
from elastix.errors import ConfigError, ElastixError, StateError, TrainError
from elastix.events import Reported, Resumed, StateStored, StepCommitted, WorkerRaised
from elastix.observe import journal
from elastix.store import Store
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests import crew_runs, pipe_runs
from tests.crew_runs import ONE_SIDED, WITHIN_S, build, checked, data, kill, replayed_to, standing
from tests.pipe_runs import only

pytestmark = pytest.mark.timeout(240)


def piped(tmp_path, workers, crew, kills=(), kind="1f1b", **options):
    return checked(tmp_path, workers, crew, kills, function=pipe_runs.train_with(kind), **options)


def test_a_stage_is_killed_while_its_mate_waits_for_it(tmp_path):
    """In the forward pass of a second micro-batch. The epoch ends with less than one."""
    kills = [kill(1, 0, "in forward", after=1)]
    found = piped(tmp_path, 2, {"pipe": 2}, kills, samples=61, mean=True)
    assert found.outcomes == ["reduced again"]
    (reported,) = [event for event in found.run.events if isinstance(event, Reported)]
    x, y = data(6).tensors
    model = replayed_to({"samples": 61}, standing(found.run.events))
    want = F.cross_entropy(model(x), y).item()
    assert reported.metrics["valid"] == pytest.approx(want, rel=1e-9)
    assert [(worker, place) for worker, place, _ in found.run.freed] == [(1, 1)]


def test_stages_in_shards_agree_with_one_process(tmp_path):
    kills = [kill(1, 3, "scheduled")]
    piped(tmp_path, 2, {"pipe": 2, "shard": 2}, kills, samples=46)


PLACES = {
    "forward": ("in forward", {"after": 1}),
    "backward": ("in backward", {"after": 1}),
    "between schedule and exchange": ("scheduled", {}),
    "first bucket": ("bucket", {"detail": 0}),
    "later bucket": ("bucket", {"detail": 1}),
    "end of backward": ("filled", {}),
    "clipping": ("clip", {}),
    "between steps": ("boundary", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 2}, {"pipe": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("phase", "fixed"), PLACES.values(), ids=PLACES)
def test_killed_at_any_place(tmp_path, phase, fixed, place, crew):
    found = piped(tmp_path, 3, crew, [kill(1, place, phase, **fixed)], epochs=2, batch_size=18)
    assert len(found.run.freed) == math.prod(crew.values()) - 1
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize("one", ONE_SIDED.values(), ids=ONE_SIDED)
def test_killed_in_the_protocol(tmp_path, one):
    found = piped(tmp_path, 3, {"pipe": 2}, [one], epochs=2)
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
def test_a_stopped_stage_is_ended_and_its_mate_is_freed(tmp_path):
    stopped = kill(1, 0, "in forward", after=1, signal=signal.SIGSTOP)
    found = piped(tmp_path, 3, {"pipe": 2}, [stopped], epochs=2, hang_timeout_s=4.0)
    assert [(worker, place) for worker, place, _ in found.run.freed] == [(1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 2}, {"pipe": 2, "shard": 2}], ids=str)
def test_a_replay_runs_the_same_function_in_one_process(tmp_path, crew):
    found = piped(tmp_path, 2, crew, samples=61)
    assert compare(found.run.directory).relative < 1e-9


@pytest.mark.slow
def test_an_indirect_mate_is_freed_too(tmp_path):
    found = piped(tmp_path, 2, {"pipe": 4}, [kill(1, 0, "in forward", after=1)], epochs=3)
    assert len(found.run.freed) == 3
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", pipe_runs.SCHEDULES)
def test_schedules(tmp_path, kind, place):
    samples = 72 if kind in pipe_runs.SEVERAL else 61  # the former need many micro-batches
    kills = [kill(1, place, "in backward", after=1)]
    piped(tmp_path, 2, {"pipe": 2}, kills, kind, samples=samples, mean=True)


MESHES = [
    {"pipe": 1},
    {"pipe": 3},
    {"shard": 2, "pipe": 2},
    {"pipe": 2, "shard": 3},
    {"pipe": 2, "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("crew", MESHES, ids=str)
def test_meshes(tmp_path, crew):
    piped(tmp_path, 2, crew, samples=77, batch_size=18, mean=True)


# ---------------------------------------------------------------------------- States


def test_stages_store_their_parts_and_one_is_killed_at_that(tmp_path):
    often = CheckpointConfig(every_steps=2, keep_last=None)
    kills = [kill(1, 1, "snapshot", step=2)]
    found = piped(tmp_path, 2, {"pipe": 2}, kills, samples=48, checkpoint=often)
    stored = [event for event in found.run.events if isinstance(event, StateStored)]
    assert [event.step for event in stored][:2] == [2, 4]
    names = set(build().state_dict())
    with Store(found.run.directory / "store") as store:
        final = store.get("local/final")
        assert not store.verify()
    assert {name for name in final.tensors if not name.startswith("@")} == names
    (group,) = final.meta["@optimizer"]["param_groups"]
    assert group["params"] == group["param_names"]
    assert set(group["params"]) == set(final.meta["@optimizer"]["state"]) == names
    moments = {f"@optimizer/state/{name}/{slot}" for name in names for slot in ("step", "exp_avg")}
    assert moments <= final.tensors.keys()


GOES_ON = {
    "one process": (pipe_runs.train, {}),
    "pipe 2": (pipe_runs.train, {"pipe": 2}),
    "pipe 3": (pipe_runs.train, {"pipe": 3}),
    "pipe 2, shard 2": (pipe_runs.train, {"pipe": 2, "shard": 2}),
    "shard 2": (crew_runs.train, {"shard": 2}),
}
PAIRS = [("pipe 2", "one process"), ("one process", "pipe 2")]


@pytest.mark.fast("pipe 2-one process")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *PAIRS,
        *(
            pytest.param(a, b, marks=pytest.mark.slow)
            for a in GOES_ON
            for b in GOES_ON
            if a != b and (a, b) not in PAIRS and "pipe" in a + b
        ),
    ],
)
def test_a_run_goes_on_with_another_mesh(tmp_path, first, second):
    (function, crew), (other, then) = GOES_ON[first], GOES_ON[second]
    run = checked(tmp_path / "first", 2, crew, samples=37, function=function).run
    more = {"epochs": 2, "before": run.events, "directory": run.directory}
    checked(tmp_path / "second", 2, then, samples=37, function=other, **more)


def ends_after_step_3(ctx):
    def look(phase, detail):
        if phase == "boundary" and ctx.step == 3:
            raise RuntimeError("a bug in the middle")

    ctx.on_phase(look)
    pipe_runs.train(ctx)


@pytest.mark.slow
@pytest.mark.parametrize("second", [{"pipe": 2}, {}], ids=str)
@pytest.mark.parametrize("first", [{"pipe": 2}, {"pipe": 2, "shard": 2}], ids=str)
def test_a_run_goes_on_from_what_stages_have_stored_in_the_middle(tmp_path, first, second):
    often = CheckpointConfig(every_steps=2)
    options = {"samples": 37, "checkpoint": often, "directory": tmp_path / "run"}
    with pytest.raises(TrainError, match="a bug in the middle"):
        checked(tmp_path / "first", 2, first, function=ends_after_step_3, **options)
    events = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    assert [e.step for e in events if isinstance(e, StateStored)] == [2]
    more = {"epochs": 2, "before": events, "directory": tmp_path / "run"}
    piped(tmp_path / "second", 2, second, samples=37, **more)


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 2}, {"pipe": 2, "shard": 2}], ids=str)
def test_a_mate_and_a_fresh_process_are_a_new_worker(tmp_path, crew):
    options = {"replace": True, "epochs": 6, "step_s": 0.1, "batch_size": 18}
    found = piped(tmp_path, 3, crew, [kill(1, 1, "in forward", after=1)], **options)
    assert set(found.run.outcomes) >= {0, 2, 3}


@pytest.mark.slow
def test_a_spare_has_stages_too(tmp_path):
    options = {"spares": 1, "epochs": 6, "step_s": 0.1}
    found = piped(tmp_path, 2, {"pipe": 2}, [kill(1, 0, "in forward", after=1)], **options)
    assert 2 in found.run.outcomes


@pytest.mark.slow
def test_the_halves_of_two_broken_workers_are_a_new_one(tmp_path):
    kills = [kill(1, 1, "scheduled"), kill(2, 0, "in forward", after=1)]
    found = piped(tmp_path, 3, {"pipe": 2}, kills, replace=True, epochs=6, step_s=0.1)
    assert {(worker, place) for worker, place, _ in found.run.freed} == {(1, 0), (2, 1)}
    assert set(found.run.outcomes) >= {0, 3}


@pytest.mark.slow
def test_a_stage_of_each_worker_is_killed_and_no_step_is_lost(tmp_path):
    kills = [kill(0, 1, "in backward", step=4), kill(1, 0, "in backward", step=4)]
    found = piped(tmp_path, 2, {"pipe": 2}, kills, replace=True, epochs=3)
    resumed = [event for event in found.run.events if isinstance(event, Resumed)]
    assert [(event.step, event.held) for event in resumed] == [(4, True)]


# ---------------------------------------------------------------------------- refused


def stage(ctx, layers):
    """A model of these layers at each place, and the schedule that its micro-batches take."""
    model = only(build(), layers[ctx.place])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


HALVES = ([0, 1], [2, 3])


def tied(ctx):
    model, optimizer = stage(ctx, ([0, 1, 3], [2, 3]))
    ctx.prepare(model, optimizer)


def other_options(ctx):
    model, optimizer = stage(ctx, HALVES)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + ctx.place)
    ctx.prepare(model, optimizer)


def lbfgs(ctx):
    model, _ = stage(ctx, HALVES)
    ctx.prepare(model, torch.optim.LBFGS(model.parameters()))


def scaler(ctx):
    ctx.prepare(*stage(ctx, HALVES), torch.amp.GradScaler("cpu"))


def statistics(ctx):
    model, _ = stage(ctx, HALVES)
    model.blocks[ctx.place].norm = torch.nn.BatchNorm1d(crew_runs.WIDTH).double()
    ctx.prepare(model, torch.optim.AdamW(model.parameters()))


def clip_by_own_norm(ctx, parameters):
    norm = get_total_norm([parameter.grad for parameter in parameters])
    clip_grads_with_norm_(parameters, 1.0, norm)


CLIP = {
    "clip": lambda ctx, parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
    "other clip": lambda ctx, parameters: ctx.clip_grad_norm_(parameters, 1.0 + ctx.place),
    "own norm": clip_by_own_norm,
}


def with_batches(call, ctx):
    """Do something else with a batch than to run a schedule within ctx.backward()."""
    model, optimizer = ctx.prepare(*stage(ctx, HALVES))
    cut = {} if call == "no micro-batches" else {"microbatch": 3}
    loader = ctx.loader(data(24), batch_size=12, **cut)
    width = 16 if ctx.place == 0 else crew_runs.WIDTH
    loss = model(torch.ones(3, width, dtype=torch.float64)).sum()
    for epoch in loader.epochs(1):
        for _ in epoch:
            if call == "accumulate":
                with ctx.accumulate():
                    loss.backward()
            if call == "backward":
                loss.backward()
            if call == "left over":
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                with ctx.backward():
                    loss.backward()
            if call == "no pass":
                with ctx.backward():
                    pass
            if call == "early clip":
                ctx.clip_grad_norm_(model.parameters(), 1.0)
            if call in CLIP:
                with ctx.backward():
                    loss.backward()
                CLIP[call](ctx, list(model.parameters()))
            optimizer.step()


REFUSED = {
    "tied weights": (tied, "'last.weight' is trained at places 0 and 1"),
    "optimizers that differ": (other_options, "places of the axis 'pipe' have prepared"),
    "LBFGS": (lbfgs, "LBFGS goes by the gradients of all parameters"),
    "running statistics": (statistics, "'blocks.[01].norm' is a BatchNorm1d"),
    "GradScaler": (scaler, "GradScaler goes by the gradients of all parameters"),
    **{
        name: (functools.partial(with_batches, name), says)
        for name, says in {
            "no micro-batches": "ctx.loader was given no microbatch",
            "accumulate": r"outside of ctx.backward\(\), and crew has an axis 'pipe'",
            "backward": r"outside of ctx.backward\(\), and crew has an axis 'pipe'",
            "no step": "no step was taken on it within",
            "left over": "begins with the gradients of the step before",
            "no pass": "no parameter of this stage was given a gradient within",
            "clip": "Use ctx.clip_grad_norm_",
            "early clip": "ctx.clip_grad_norm_ was called and a batch was drawn",
            "other clip": "a max_norm of 1.0 at place 0 and of 2.0 at place 1",
            "own norm": r"clip_grads_with_norm_ was given a total_norm of [\d.]+ at place 0 and of",
        }.items()
    },
}


@pytest.mark.parametrize(("function", "says"), REFUSED.values(), ids=REFUSED)
def test_what_stages_would_get_wrong_is_refused(tmp_path, function, says):
    with pytest.raises(ConfigError, match=says):
        run_local(function, 1, crew={"pipe": 2}, directory=tmp_path)


def halves(ctx):
    """Of the model, at two stages: model, optimizer and a schedule of four micro-batches."""
    model, optimizer = ctx.prepare(*stage(ctx, HALVES))
    part = PipelineStage(model, ctx.place, 2, ctx.device, group=ctx.mesh.get_group())
    return model, optimizer, ScheduleGPipe(part, 4, loss_fn=F.cross_entropy)


def by_the_norm_of_all_stages(ctx):
    """With torch's own functions."""
    model, optimizer, schedule = halves(ctx)
    for epoch in ctx.loader(data(12), batch_size=12, microbatch=3).epochs(1):
        for x, y in epoch:
            with ctx.backward():
                schedule.step(x, target=y)
            squares = get_total_norm([p.grad for p in model.parameters()]) ** 2
            torch.distributed.all_reduce(squares, group=ctx.mesh.get_group())
            clip_grads_with_norm_(model.parameters(), 0.01, squares.sqrt())
            assert ctx.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(0.01, 1e-3)
            optimizer.step()


def test_torchs_own_clipping_goes_by_the_norm_of_all_stages_if_it_is_given_that(tmp_path):
    run = run_local(by_the_norm_of_all_stages, 1, crew={"pipe": 2}, directory=tmp_path)
    assert any(isinstance(event, StepCommitted) for event in run.events)


def lasting(layers, epochs, ctx):
    """Trains some layers at each stage."""
    model, optimizer = ctx.prepare(*stage(ctx, layers))
    for epoch in ctx.loader(data(12), batch_size=12, microbatch=3).epochs(epochs):
        for x, y in epoch:
            part = PipelineStage(model, ctx.place, 2, ctx.device, group=ctx.mesh.get_group())
            with ctx.backward():
                ScheduleGPipe(part, len(x) // 3, loss_fn=F.cross_entropy).step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()


def two_schedules(ctx):
    _, optimizer, schedule = halves(ctx)
    for epoch in ctx.loader(data(12), batch_size=12, microbatch=3).epochs(1):
        for x, y in epoch:
            with ctx.backward():
                schedule.step(x, target=y)
                schedule.step(x, target=y)
            optimizer.step()


def test_gradients_that_torch_would_scale_twice_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a second schedule was run within one"):
        run_local(two_schedules, 1, crew={"pipe": 2}, directory=tmp_path)


def mistaken(error, where, ctx):
    """A stage raises in its second step, whose schedule is not the first one to run it."""
    model, optimizer, schedule = halves(ctx)

    def wrong(*_):
        if ctx.step and ctx.place:
            raise error

    hook = {"forward": "register_forward_pre_hook", "backward": "register_full_backward_hook"}
    getattr(model, hook[where])(wrong)
    for epoch in ctx.loader(data(24), batch_size=12, microbatch=3).epochs(1):
        for x, y in epoch:
            with ctx.backward():
                schedule.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [ValueError("a mistake"), ConfigError("a refusal")], ids=str)
def test_what_a_stage_raises_is_told_and_not_what_torch_wraps_it_in(tmp_path, where, error):
    function = functools.partial(mistaken, error, where)
    with pytest.raises(ElastixError, match=str(error)) as raised:
        run_local(function, 1, crew={"pipe": 2}, directory=tmp_path)
    assert isinstance(raised.value, ConfigError) == isinstance(error, ConfigError)
    assert "failed to run" not in str(raised.value).lower()
    (told,) = [e for e in journal.read(tmp_path / "journal.jsonl") if isinstance(e, WorkerRaised)]
    assert told.traceback.strip().endswith(str(error))
    assert told.traceback.count("Traceback (most recent call last)") == 1
    assert "schedule.step(x, target=y)" in told.traceback
    assert "in wrong" in told.traceback


def test_a_layer_that_no_stage_has_any_more_is_told_of(tmp_path):
    """As of one process, whose optimizer lacks it. It would be missing in what is stored next."""
    run_local(functools.partial(lasting, HALVES, 1), 1, crew={"pipe": 2}, directory=tmp_path)
    fewer = functools.partial(lasting, ([0, 1], [3]), 2)
    with pytest.raises((StateError, TrainError), match=r"'blocks.1.down.bias'.* at no stage"):
        run_local(fewer, 1, crew={"pipe": 2}, directory=tmp_path)
