"""What of crews on GPUs can be shown without one. Real processes on gloo."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.network import crew_gpus
from elastix.testing.local_worker import Gpus
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


@dataclass(frozen=True)
class Taken(Gpus):
    """Notes in a folder which process takes which."""

    log: str = ""

    def take(self, process: int) -> torch.device:
        (Path(self.log) / f"{process}-{os.getpid()}").touch()
        return torch.device("cpu")


def test_a_process_takes_a_gpu_once_however_many_workers_it_is_of(tmp_path):
    """Another one for each."""
    taken = tmp_path / "taken"
    taken.mkdir()
    kills = [kill(1, 1, "bucket", detail=0), kill(2, 0, "in forward")]
    options = {"replace": True, "min_workers": 2, "gpus": Taken(log=str(taken))}
    found = checked(tmp_path, 3, {"shard": 2}, kills, **options)
    assert {(worker, place) for worker, place, _ in found.run.freed} == {(1, 0), (2, 1)}
    processes, ids = zip(*(path.name.split("-") for path in taken.iterdir()), strict=True)
    assert len(set(processes)) == len(set(ids)) == len(processes) >= 6
