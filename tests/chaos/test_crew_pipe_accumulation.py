"""ctx.accumulate in pipelines: gradients of several batches, each with a schedule of its own."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from elastix.data.audit import audit
from elastix.errors import ConfigError
from elastix.events import StepCommitted
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests import pipe_runs
from tests.crew_runs import build, configure, data, kill
from tests.pipe_runs import MICRO, only

pytestmark = pytest.mark.timeout(240)


def adding_up(tmp_path, workers, crew, kills=(), kind="1f1b", batches=2, **options):
    """Run, and assert that one process over the same batches ends with the same weights."""
    names = ("samples", "batch_size", "epochs", "step_s")
    given = {"samples": 82, "batch_size": 12}
    given |= {name: options.pop(name) for name in names if name in options}
    config = {**configure(tmp_path, kills, **given), "batches": batches}
    options = {"directory": tmp_path / "run", "config": config, "crew": crew, **options}
    run = run_local(pipe_runs.train_with(kind), workers, **options)
    assert {(one.worker, one.place) for one in kills} <= {(w, p) for w, p, _ in run.lost_places}
    assert audit(run.events).exact
    # By one thread, which is worker 0: kills that the function has do not happen there.
    assert compare(run.directory, whole=True).relative < 1e-9
    drawn = [len(event.batches) for event in run.events if isinstance(event, StepCommitted)]
    assert max(drawn) == batches
    return run


def test_a_stage_is_killed_in_the_second_batch_of_a_step(tmp_path):
    """`after`: two micro-batches of the first batch were through."""
    adding_up(tmp_path, 2, {"pipe": 2}, [kill(1, 1, "in backward", after=2)])


PHASES = {
    "forward of the first": ("in forward", {"after": 1}),
    "backward of the first": ("in backward", {"after": 1}),
    "between the first and its end": ("scheduled", {}),
    "the draw of the second": ("batch", {"after": 1}),
    "forward of the second": ("in forward", {"after": 3}),
    "between the second and its end": ("scheduled", {"after": 1}),
    "first bucket": ("bucket", {"detail": 0}),
    "end of backward": ("filled", {}),
    "clipping": ("clip", {}),
    "between steps": ("boundary", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 2}, {"pipe": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("phase", "fixed"), PHASES.values(), ids=PHASES)
def test_killed_at_any_place(tmp_path, phase, fixed, place, crew):
    kills = [kill(1, place, phase, **fixed)]
    adding_up(tmp_path, 3, crew, kills, batch_size=18, samples=110, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"pipe": 3}, {"pipe": 2, "tensor": 2}, {"pipe": 1}], ids=str)
def test_meshes(tmp_path, crew):
    adding_up(tmp_path, 2, crew, batches=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", pipe_runs.SCHEDULES)
def test_schedules(tmp_path, kind):
    """Zero bubble calls no hooks, by which notes of gradients are taken elsewhere."""
    adding_up(tmp_path, 2, {"pipe": 2}, [kill(1, 0, "in backward")], kind, samples=96)


# ---------------------------------------------------------------------------- refused


def refused(what, ctx):
    model = only(build(), ([0, 1], [2, 3])[ctx.place])
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters()))
    part = PipelineStage(model, ctx.place, 2, ctx.device, group=ctx.mesh.get_group())
    schedule = ScheduleGPipe(part, 2, loss_fn=F.cross_entropy)
    for epoch in ctx.loader(data(24), batch_size=6, microbatch=MICRO).epochs(1):
        for x, y in epoch:
            if what == "never a step":
                with ctx.accumulate(), ctx.backward():
                    schedule.step(x, target=y)
                continue
            with ctx.accumulate():
                if what == "no ctx.backward":
                    part.scale_grads(2)  # as a schedule does that calls no hooks
                with ctx.backward():
                    schedule.step(x, target=y)
            if what == "scaled":
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            with ctx.backward():
                schedule.step(x, target=y)
            optimizer.step()


REFUSED = {
    "no ctx.backward": r"within ctx.accumulate\(\) and outside of ctx.backward\(\)",
    "scaled": r"gradients were changed within a step that is added up by ctx.accumulate",
    "never a step": r"never took a step: all its backward passes ran within ctx.accumulate\(\)",
    "carried": "begins with the gradients of the step before",
}


@pytest.mark.parametrize(("what", "says"), REFUSED.items(), ids=REFUSED)
def test_what_would_be_silently_wrong_is_refused(tmp_path, what, says):
    with pytest.raises(ConfigError, match=says):
        run_local(functools.partial(refused, what), 1, crew={"pipe": 2}, directory=tmp_path)
