"""Workers that reach the controller and not each other: the right one is taken out."""

import time
from dataclasses import dataclass
from datetime import timedelta

from elastix.comm.network import process_group
from elastix.comm.network.pending import Pending
from elastix.events import GenerationFormed, WorkerLost
from elastix.testing.chaos import CUT, Kill, with_kills
from elastix.testing.local import run_local
from elastix.train.control import failure_detector
from tests import hanging
from tests.laws import assert_exactly_once
from tests.trainables import train

CONFIG = {"model": "convnet", "samples": 120, "batch_size": 12, "epochs": 4, "step_s": 0.03}
CONNECT_S = 4.0
"""Those who can be reached must be within it."""


class Blackhole:
    """torch.distributed of a worker whose data connections are dropped on the way."""

    def __init__(self, real):
        self._real = real
        self.ProcessGroupGloo = self

    def __getattr__(self, name):
        if name in ("_Options", "create_device"):
            return getattr(self._real.ProcessGroupGloo, name)
        return getattr(self._real, name)

    def __call__(self, *_args):
        time.sleep(CONNECT_S)
        raise RuntimeError("connectFullMesh failed: timed out")


@dataclass(frozen=True)
class CutOff:
    """`train`, in which no group can be connected to `worker` once it has got to `step`."""

    worker: int
    step: int

    def __call__(self, ctx):
        process_group._CONNECT_TIMEOUT = timedelta(seconds=CONNECT_S)

        def cut(_name, _detail):
            if ctx.step >= self.step and not isinstance(process_group.dist, Blackhole):
                process_group.dist = Blackhole(process_group.dist)

        if ctx.worker == self.worker:
            ctx.on_phase(cut)
        train(ctx)


def taken_out(tmp_path, monkeypatch, doomed, workers, hang_timeout_s=2.0, **options):
    hanging.only(monkeypatch)
    config, directory = {**CONFIG, "log": str(tmp_path)}, tmp_path / "run"
    options = {"directory": directory, "hang_timeout_s": hang_timeout_s, **options}
    result = run_local(doomed, workers, config=config, **options)
    assert_exactly_once(result.events, CONFIG["epochs"])
    lost = [event for event in result.events if isinstance(event, WorkerLost)]
    return [e.worker for e in lost if e.cause == "unreachable"], result


def test_of_four_the_one_that_no_other_reaches(tmp_path, monkeypatch):
    """It is the oldest, and all say that they fail."""
    doomed = with_kills(CutOff(0, step=3), [Kill(worker=0, phase="bucket", step=4, signal=CUT)])
    lost, result = taken_out(tmp_path, monkeypatch, doomed, 4)
    assert lost == [0]
    assert set(result.lost) == {0}


def test_a_newcomer_that_nobody_reaches_costs_no_one_else(tmp_path, monkeypatch):
    """The group is too small until the next newcomer comes, so it waits for both."""
    doomed = with_kills(CutOff(3, step=0), [Kill(worker=1, phase="batch", step=4)])
    lost, result = taken_out(tmp_path, monkeypatch, doomed, 3, replace=True, min_workers=3)
    assert lost == [3]
    assert set(result.lost) == {1, 3}
    formed = [event for event in result.events if isinstance(event, GenerationFormed)]
    assert any(event.members == (0, 2, 4) for event in formed)


class Never(Pending):
    """What is sent never arrives, and nobody is told."""

    def __init__(self):
        pass

    def finished(self):
        return False

    def on_finish(self, callback):
        pass


@dataclass(frozen=True)
class Lost:
    """`train`; in one round `worker` is not heard, and hears nothing."""

    worker: int
    step: int

    def __call__(self, ctx):
        def lose(name, _detail):
            if name == "round" and ctx.step == self.step and not lost:
                lost.append(ctx.step)
                ctx._member._driver.group.all_reduce = lambda *_: Never()

        lost = []
        if ctx.worker == self.worker:
            ctx.on_phase(lose)
        train(ctx)


def test_what_a_network_has_lost_without_a_word_is_sent_again(tmp_path, monkeypatch):
    """All wait for each other then, each in good health: for longer than if one is just slow."""
    monkeypatch.setattr(failure_detector, "_STILL", 1)
    lost, result = taken_out(tmp_path, monkeypatch, Lost(1, step=4), 3, hang_timeout_s=6.0)
    assert lost == []
    assert not result.lost
    formed = [event for event in result.events if isinstance(event, GenerationFormed)]
    assert [event.cause for event in formed] == ["start", "doubt"]
