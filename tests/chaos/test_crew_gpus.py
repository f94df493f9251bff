"""What of crews on GPUs can be shown without one. Real processes on gloo."""

import threading
from types import SimpleNamespace

import pytest
import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.network import crew_gpus
from tests import crew_runs
from tests.crew_runs import checked, kill

pytestmark = pytest.mark.timeout(240)

STEP = 2


class Silent(crew_gpus.MatesGpus):
    """Of this process, which has none. `hung` while the device waits for a mate."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.hung = threading.Event()
        crew_gpus._mark = lambda _device: SimpleNamespace(query=lambda: not self.hung.is_set())

    def end(self) -> None:
        self.ended = True
        self.hung.clear()


def computes_what_is_wrong(ctx):
    """At place 0 of worker 1, in one step, as two GPUs would do over NCCL.

    The part of a gradient that its mate was to send has not come, and the device is through with
    that only when it was ended. What it has then is wrong, and nothing says so.
    """
    gpus, launch = Silent(), Bucket.launch
    ctx._member._mates._inside._gpus = gpus
    ctx._member._driver.doubt_within(lambda wait: gpus.check(wait=wait))

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
