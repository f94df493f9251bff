"""What of crews on GPUs can be shown without one. Real processes on gloo."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from elastix.comm.gradients import weighted_reduce_scatter
from elastix.comm.gradients.bucket import Bucket
from elastix.comm.network import crew_gpus
from elastix.events import Resumed
from tests import crew_runs
from tests.crew_runs import checked, kill

pytestmark = pytest.mark.timeout(240)

STEP = 2


class Silent(crew_gpus.MatesGpus):
    """Of this process, which has none. `hung` while the device waits for a mate."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.hung = threading.Event()
        crew_gpus._groups = list
        crew_gpus._mark = lambda _device: SimpleNamespace(query=lambda: not self.hung.is_set())

    def end(self) -> None:
        super().end()
        self.hung.clear()


def silenced(ctx):
    """This process's, which from now on ends what its mates compute together as two GPUs would."""
    gpus = Silent()
    ctx._member._mates._inside._gpus = gpus
    ctx._member._driver.doubt_within(lambda wait: gpus.check(wait=wait))
    return gpus


def computes_what_is_wrong(ctx):
    """At place 0 of worker 1, in one step, as two GPUs would do over NCCL.

    The part of a gradient that its mate was to send has not come, and the device is through with
    that only when it was ended. What it has then is wrong, and nothing says so.
    """
    gpus, launch = silenced(ctx), Bucket.launch

    def here():
        return (ctx.worker, ctx.place, ctx.step) == (1, 0, STEP)

    def launched(bucket, group, *given):
        if here():
            bucket.flat.add_(1)
        launch(bucket, group, *given)

    Bucket.launch = launched
    ctx.on_phase(lambda phase, _: phase == "batch" and here() and gpus.hung.set())
    crew_runs.train(ctx)


def test_nobody_is_given_what_is_wrong_though_the_mate_had_all_it_needed(tmp_path):
    """It has said that it holds its part of the step, before it is killed."""
    one = kill(1, 1, "held", detail=1, step=STEP)
    options = {"function": computes_what_is_wrong, "shared": False}
    found = checked(tmp_path, 3, {"shard": 2}, [one], **options)
    assert found.outcomes == ["reduced again"] * 2
    assert [(worker, place) for worker, place, _ in found.run.freed] == [(1, 0)]


def that_say_nothing(ctx):
    """All processes: what lacks a mate goes on until it is ended, and leaves what was in memory."""
    gpus = silenced(ctx)

    def silent(collective):
        def call(*given, **named):
            try:
                return collective(*given, **named)
            except RuntimeError:
                into = given[0] if given else named.get("output", named.get("output_tensor"))
                while not gpus.ended:
                    threading.Event().wait(0.001)
                into.fill_(7.5)
                (Path(ctx.config["log"]) / "said-nothing").touch()
                return None

        return call

    own = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    scatter = weighted_reduce_scatter._reduce_scatter
    for name, collective in own.items():
        setattr(dist, name, silent(collective))
    weighted_reduce_scatter._reduce_scatter = silent(scatter)
    try:
        crew_runs.train(ctx)
    finally:  # of this worker; there may be another
        weighted_reduce_scatter._reduce_scatter = scatter
        for name, collective in own.items():
            setattr(dist, name, collective)


COLLECTIVES = ("all_gather_single", "all_gather_into_tensor")
"""Of FSDP2, in two versions of torch."""

PHASES = ["in forward", "in backward", "bucket", "filled", "held", "boundary"]


@pytest.mark.fast("1-in forward", "0-in backward")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("place", [0, 1])
def test_whatever_comes_of_collectives_that_say_nothing_nobody_uses_it(tmp_path, phase, place):
    if (place, phase) == (0, "held"):
        phase = "crew"  # a speaker waits for its crew there
    options = {"replace": True, "min_workers": 2, "function": that_say_nothing}
    found = checked(tmp_path, 2, {"shard": 2}, [kill(1, place, phase)], **options)
    assert [(worker, at) for worker, at, _ in found.run.freed] == [(1, 1 - place)]
    if phase in ("in forward", "in backward"):
        assert list(tmp_path.rglob("said-nothing")), "no collective was ended"


@pytest.mark.slow
def test_no_worker_is_whole_and_what_they_held_is_right(tmp_path):
    kills = [kill(0, 1, "in backward", step=4), kill(1, 0, "in forward", step=4)]
    options = {"replace": True, "epochs": 3, "function": that_say_nothing}
    found = checked(tmp_path, 2, {"shard": 2}, kills, **options)
    resumed = [(e.step, e.held) for e in found.run.events if isinstance(e, Resumed)]
    assert resumed == [(4, True)]
