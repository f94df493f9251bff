"""Batches in slices in pipelines: a failed step keeps its whole batch, and exact runs their bytes.

A slice is a schedule. What holds on other meshes is in test_crew_slices.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from elastix.data.audit import audit
from elastix.errors import ConfigError
from elastix.events import Reported, SlicesHandedOver, StepCommitted
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from elastix.train.replica.sliced_step import Slices
from tests import pipe_runs
from tests.crew_evaluations import means, validation
from tests.crew_runs import build, checked, configure, data, kill
from tests.pipe_runs import MICRO
from tests.run_bytes import final, kept, steps_of

pytestmark = pytest.mark.timeout(240)

SLICES, BATCH, SAMPLES = 4, 24, 64


def evenly(ctx, kind="1f1b"):
    """Each has as many slices, else who is slow may have none. Each epoch ends with an evaluation.

    Its means are part of what is compared of exact runs.
    """
    Slices.measured = lambda *_: None
    sharded = ctx.mesh is not None and "shard" in ctx.mesh.mesh_dim_names
    batch = MICRO * (ctx.mesh["shard"].size() if sharded else 1)

    def after_epoch(pipeline, model, look):
        def metric(stage, batch):
            x, y, _ = batch
            outputs = stage(x) if pipeline is None else pipeline.outputs(x, y)
            look("in evaluation")
            return None if outputs is None else means(outputs, batch)

        ctx.report(**ctx.evaluate(metric, validation(), batch_size=batch, microbatch=MICRO))

    pipe_runs.train(ctx, kind, after_epoch)


def in_slices(tmp_path, workers, crew, kills=(), kind="1f1b", **options):
    """Run, and assert the laws of crews; and that each batch was whole, as if nobody was lost."""
    function = functools.partial(evenly, kind=kind)
    options = {"samples": SAMPLES, "batch_size": BATCH, "slices": SLICES, **options}
    found = checked(tmp_path, workers, crew, kills, function=function, **options)
    # What is left are micro-batches for each place along `shard`, for one of them, and less.
    rest = [12, 3, 1] if crew.get("shard", 1) == 2 else [15, 1]
    sizes = [len(had) for had in steps_of(found.run.events).values()]
    assert sizes == [BATCH, BATCH, *rest] * options.get("epochs", 1)
    return found


def test_slices_of_a_lost_pipeline_are_computed_by_the_others_in_the_same_step(tmp_path):
    found = in_slices(tmp_path, 2, {"pipe": 2}, [kill(1, 1, "computed", step=1)])
    moved = [e for e in found.run.events if isinstance(e, SlicesHandedOver)]
    assert [(event.step, lost) for event in moved for lost, _, _ in event.moved] == [(2, 1)]


PHASES = {
    "before a slice": ("slice", {}),
    "forward": ("in forward", {"after": 1}),
    "backward": ("in backward", {"after": 1}),
    "between schedule and its end": ("scheduled", {}),
    "after a slice": ("computed", {}),
    "first bucket": ("bucket", {"detail": 0}),
    "end of backward": ("filled", {}),
    "clipping": ("clip", {}),
    "between steps": ("boundary", {}),
    "evaluation": ("in evaluation", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 2}, {"pipe": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("phase", "fixed"), PHASES.values(), ids=PHASES)
def test_killed_at_any_place(tmp_path, phase, fixed, place, crew):
    kills = [kill(1, place, phase, **{"step": 1, **fixed})]
    in_slices(tmp_path, 3, crew, kills, epochs=2)


TWO = {
    "while slices of the first are computed": [
        kill(1, 1, "computed", step=1),
        kill(2, 0, "handed", step=1),
    ],
    "a follower, while slices of the first are computed": [
        kill(1, 0, "computed", step=1),
        kill(2, 1, "handed", step=1),
    ],
    "all but one": [
        kill(0, 0, "computed", step=1),
        kill(1, 1, "in forward", step=1),
        kill(2, 0, "in backward", step=1),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kills", TWO.values(), ids=TWO)
def test_several_are_killed_within_one_step(tmp_path, kills):
    in_slices(tmp_path, 4, {"pipe": 2}, kills)


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 3}, {"pipe": 2, "tensor": 2}, {"pipe": 1}], ids=str)
def test_meshes(tmp_path, crew):
    in_slices(tmp_path, 2, crew, mean=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", pipe_runs.SCHEDULES)
def test_schedules(tmp_path, kind):
    """Interleaved ones need as many micro-batches as places."""
    options = {"samples": 96, "batch_size": 48} if kind in pipe_runs.SEVERAL else {}
    function = functools.partial(evenly, kind=kind)
    if kind in pipe_runs.SEVERAL:
        function = pipe_runs.train_with(kind)
    given = {"samples": SAMPLES, "batch_size": BATCH, "slices": SLICES, **options}
    kills = [kill(1, 0, "in backward", step=1)]
    checked(tmp_path, 2, {"pipe": 2}, kills, function=function, **given)


# ---------------------------------------------------------------------------- bit by bit

MESHES = {
    "pipe 2": {"pipe": 2},
    "pipe 2, shard 2": {"pipe": 2, "shard": 2},
    "pipe 2, tensor 2": {"pipe": 2, "tensor": 2},
}
EPOCHS = 2


def exact(tmp_path, workers, mesh, kills=(), epochs=EPOCHS, **options):
    """With dropout within stages, and in what the first is given."""
    given = {"samples": SAMPLES, "batch_size": BATCH, "slices": SLICES, "dropout": 0.2}
    given |= {name: options.pop(name) for name in ("step_s",) if name in options}
    config = configure(tmp_path, kills, epochs=epochs, **given)
    crew = MESHES[mesh]
    options = {"directory": tmp_path / "run", "exact": True, "config": config, **options}
    run = run_local(evenly, workers, crew=crew, **options)
    lost = {(worker, place) for worker, place, _ in run.lost_places}
    assert lost >= {(one.worker, one.place) for one in kills}, lost
    return run


def found_by(run):
    """What the run has left: bytes, samples of its steps, and means."""
    reported = [event.metrics for event in run.events if isinstance(event, Reported)]
    return final(run), steps_of(run.events), reported


@functools.cache
def quiet(mesh, epochs=EPOCHS):
    """What one worker leaves that nothing befalls."""
    directory = kept()
    return found_by(exact(directory, 1, mesh, epochs=epochs))


def check(run, mesh, epochs=EPOCHS):
    """Bit by bit, and samples one by one."""
    (digest, tensors), steps, reported = quiet(mesh, epochs)
    (found, ours), *rest = found_by(run)
    apart = [name for name in tensors if not torch.equal(ours[name], tensors[name])]
    assert not apart, f"other bytes than in the quiet run: {apart}"
    assert found == digest
    assert rest == [steps, reported]
    assert reported
    assert audit(run.events).exact


def test_a_stage_lost_within_a_step_leaves_the_same_bytes(tmp_path):
    check(exact(tmp_path, 2, "pipe 2", [kill(1, 1, "in backward", step=1)]), "pipe 2")


EXACT_PHASES = ["in forward", "in backward", "scheduled", "computed", "bucket", "filled", "clip"]
EXACT_PHASES += ["boundary", "in evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("phase", EXACT_PHASES)
def test_a_stage_lost_anywhere_leaves_the_same_bytes(tmp_path, phase, place, mesh):
    check(exact(tmp_path, 3, mesh, [kill(1, place, phase, step=1)]), mesh)


@pytest.mark.slow
def test_a_pipeline_is_lost_and_replaced(tmp_path):
    kills = [kill(1, 0, "in backward", step=3)]
    run = exact(tmp_path, 2, "pipe 2", kills, replace=True, epochs=5, step_s=0.1)
    assert set(run.outcomes) >= {0, 2}
    events = [event for event in run.events if isinstance(event, StepCommitted)]
    assert 2 in {worker for event in events for b in event.batches for worker in b.shares}
    check(run, "pipe 2", epochs=5)


def test_the_same_function_in_one_process_is_replayed(tmp_path):
    """Its slices are whole micro-batches too, and ctx.backward() is one pass of each."""
    config = configure(tmp_path, samples=29, batch_size=BATCH, slices=SLICES)
    run = run_local(evenly, 2, config=config, exact=True, directory=tmp_path / "run")
    assert compare(run.directory).apart == ()


# ---------------------------------------------------------------------------- refused


def refused(what, ctx):
    model = pipe_runs.only(build(), ([0, 1], [2, 3])[ctx.place])
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = 16 if what == "odd slices" else 24
    loader = ctx.loader(data(48), batch_size=batch, slices=8, microbatch=MICRO)
    x = torch.ones(3, 18 if ctx.place else 16, dtype=torch.float64)
    for epoch in loader.epochs(1):
        for step in epoch:
            for _ in step:
                if what == "backward":
                    model(x).sum().backward()
                if what == "no pass":
                    with ctx.backward():
                        pass
                if what == "accumulate":
                    with ctx.accumulate():
                        model(x).sum().backward()
                if what == "zeroed":
                    with ctx.backward():
                        model(x).sum().backward()
                    optimizer.zero_grad()
                F.relu(x)
            optimizer.step()


REFUSED = {
    "odd slices": r"a batch_size of 16 is no whole number of micro-batches of 3 in each of 8 slic",
    "backward": r"outside of ctx.backward\(\), and crew has an axis 'pipe'",
    "no pass": "no parameter of this stage was given a gradient within",
    "accumulate": "ctx.accumulate was used in a step of slices",
    "zeroed": "gradients were changed or dropped within the loop over a step's slices",
    "no backward": "a slice was drawn, and then the next one, without a backward pass",
}


@pytest.mark.parametrize(("what", "says"), REFUSED.items(), ids=REFUSED)
def test_what_stages_would_get_wrong_is_refused(tmp_path, what, says):
    with pytest.raises(ConfigError, match=says):
        run_local(functools.partial(refused, what), 1, crew={"pipe": 2}, directory=tmp_path)
