"""No worker is whole any more: the run goes on from the parts that processes of lost ones hold."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from elastix.config import CheckpointConfig
from elastix.events import Resumed, StateStored, StepCommitted, WorkerLost, WorkerStarted
from elastix.testing.local_worker import _PipeLink
from elastix.train.control.messages import RecordEvents
from tests.crew_runs import Meter, checked, kill, train
from tests.trainables import await_worker

pytestmark = pytest.mark.timeout(240)


def run(tmp_path, workers, crew, kills, epochs=2, **options):
    return checked(tmp_path, workers, crew, kills, replace=True, epochs=epochs, **options)


def went_on_from(found):
    return [(event.step, event.held) for event in found.run.events if isinstance(event, Resumed)]


def committed(found):
    return [event.step for event in found.run.events if isinstance(event, StepCommitted)]


@pytest.mark.parametrize(
    ("workers", "crew", "lost"),
    [
        (2, {"shard": 2}, [(0, 1), (1, 0)]),
        pytest.param(2, {"shard": 2, "tensor": 2}, [(0, 3), (1, 0)], marks=pytest.mark.slow),
        pytest.param(3, {"shard": 3}, [(0, 0), (1, 1), (2, 2)], marks=pytest.mark.slow),
        pytest.param(3, {"tensor": 2}, [(0, 0), (1, 0), (2, 1)], marks=pytest.mark.slow),
    ],
)
def test_one_process_of_each_worker_is_killed_and_no_step_is_lost(tmp_path, workers, crew, lost):
    kills = [kill(*one, "in backward", step=4) for one in lost]
    found = run(tmp_path, workers, crew, kills)
    assert went_on_from(found) == [(4, True)]
    assert committed(found) == list(range(1, len(committed(found)) + 1))
    assert not any(isinstance(e, StateStored) and e.step <= 4 for e in found.run.events)
    first = [e.worker for e in found.run.events if isinstance(e, WorkerStarted)][workers]
    assert first in found.run.outcomes


@pytest.mark.fast("0")
@pytest.mark.parametrize("place", [0, 1])
def test_if_no_process_has_one_of_the_parts_the_run_begins_at_what_is_stored(tmp_path, place):
    often = CheckpointConfig(every_steps=2, wait=True)
    kills = [kill(worker, place, "in backward", step=5) for worker in (0, 1)]
    found = run(tmp_path, 2, {"shard": 2}, kills, checkpoint=often)
    assert went_on_from(found) == [(4, False)]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["in forward", "bucket", "filled"])
def test_killed_at_any_place_before_the_step_counts(tmp_path, phase):
    kills = [kill(0, 1, phase, step=4), kill(1, 0, phase, step=4)]
    assert went_on_from(run(tmp_path, 2, {"shard": 2}, kills)) == [(4, True)]


def test_what_their_speakers_told_too_late_is_written_as_the_run_goes_on(tmp_path):
    """A loss may be heard of sooner than a step that was committed before it."""
    kills = [kill(0, 1, "in forward", step=4), kill(1, 0, "in forward", step=4)]
    found = run(tmp_path, 2, {"shard": 2}, kills, function=train_told_late)
    assert went_on_from(found) == [(4, True)]
    assert committed(found) == list(range(1, len(committed(found)) + 1))


def train_told_late(ctx):
    """As `train`; what the first two workers say of their fourth step does not arrive."""
    send = _PipeLink.send

    def late(link, message):
        told = message.entries if isinstance(message, RecordEvents) else ()
        steps = [event.step for _, event in told if isinstance(event, StepCommitted)]
        if ctx.worker > 1 or steps != [4]:
            send(link, message)

    _PipeLink.send = late
    try:
        train(ctx)
    finally:
        _PipeLink.send = send  # this process goes on as another worker


@pytest.mark.slow
def test_killed_after_a_step_counts_and_before_it_is_taken(tmp_path):
    """Both hold what was before it; the journal has the step, which is given up."""
    kills = [kill(0, 1, "clip", step=4), kill(1, 0, "clip", step=4)]
    found = run(tmp_path, 2, {"shard": 2}, kills)
    assert [held for _, held in went_on_from(found)] == [True]
    assert went_on_from(found)[0][0] in (3, 4)


def train_with(ctx, **others):
    """Train, and track these as well."""
    prepare = ctx.prepare

    def prepared(*objects):
        made = prepare(*objects)
        ctx.track(**others)
        return made

    ctx.prepare = prepared
    train(ctx)


def changes_in_place(ctx):
    """A tensor of the State changes in mid-step, so it is not that of the boundary any more."""
    meter = Meter()
    ctx.on_phase(lambda phase, _: phase == "bucket" and meter.sum.add_(1))
    train_with(ctx, meter=meter)


@pytest.mark.slow
def test_what_was_changed_since_the_boundary_is_not_gone_on_from(tmp_path):
    kills = [kill(0, 1, "filled", step=4), kill(1, 0, "filled", step=4)]
    found = run(tmp_path, 2, {"shard": 2}, kills, function=changes_in_place)
    assert went_on_from(found) == [(0, False)]


def with_uncounted_steps(ctx):
    """Torch does not count what the optimizer changes, as if it wrote to `parameter.data`.

    After the fifth step one process of each worker is killed, and the other waits for it.
    """

    class Uncounted(torch.optim.AdamW):
        def step(self, closure=None):
            tensors = [p for group in self.param_groups for p in group["params"]]
            tensors += [t for state in self.state.values() for t in state.values()]
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
                super().step(closure)
            if ctx.step == 5 and ctx.worker < 2:
                if ctx.worker != ctx.place:
                    os.kill(os.getpid(), signal.SIGKILL)
                torch.distributed.barrier()

    torch.optim.AdamW = Uncounted
    train(ctx)


@pytest.mark.slow
def test_what_an_optimizer_may_have_changed_is_not_gone_on_from(tmp_path):
    found = run(tmp_path, 2, {"shard": 2}, [], function=with_uncounted_steps)
    assert went_on_from(found) == [(0, False)]


def decays_by_hand(ctx):
    """Weights change in mid-step by `parameter.data`, which torch does not count."""
    prepare = ctx.prepare

    def prepared(*objects):
        made = prepare(*objects)

        def decay(phase, _):
            if phase == "bucket" and ctx.step == 4 and ctx.worker < 2:
                for parameter in made[0].parameters():
                    parameter.data.mul_(0.99)

        ctx.on_phase(decay)
        return made

    ctx.prepare = prepared
    train(ctx)


@pytest.mark.slow
def test_weights_that_were_changed_by_hand_since_the_boundary_are_not_gone_on_from(tmp_path):
    kills = [kill(0, 1, "filled", step=4), kill(1, 0, "filled", step=4)]
    found = run(tmp_path, 2, {"shard": 2}, kills, function=decays_by_hand)
    assert went_on_from(found) == [(0, False)]


class Table:
    """What was seen, in an array, as those who count with NumPy have it."""

    def __init__(self) -> None:
        self.seen = np.zeros(1)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def counts_in_an_array(ctx):
    """Torch does not count what changes an array of the State in mid-step."""
    table = Table()

    def count(phase, _):
        if phase == "bucket":
            table.seen += 1

    ctx.on_phase(count)
    train_with(ctx, table=table)


@pytest.mark.slow
def test_an_array_that_was_changed_since_the_boundary_is_not_gone_on_from(tmp_path):
    kills = [kill(0, 1, "filled", step=4), kill(1, 0, "filled", step=4)]
    found = run(tmp_path, 2, {"shard": 2}, kills, function=counts_in_an_array)
    assert went_on_from(found) == [(0, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "phase"), [(0, "enter"), (1, "give"), (0, "give")])
def test_a_founder_that_is_killed_leaves_the_run_to_what_is_stored(tmp_path, place, phase):
    kills = [kill(0, 1, "in backward", step=4), kill(1, 0, "in backward", step=4)]
    kills += [kill(2, place, phase, step=0)]
    found = run(tmp_path, 2, {"shard": 2}, kills)
    assert went_on_from(found) == [(4, True), (0, False)]


@pytest.mark.slow
def test_it_happens_twice(tmp_path):
    """The second time to the worker that was put together and to the one that joined it."""
    kills = [kill(0, 1, "in backward", step=2), kill(1, 0, "in backward", step=2)]
    kills += [kill(2, 1, "in backward", step=9), kill(3, 0, "in backward", step=9)]
    found = run(tmp_path, 2, {"shard": 2}, kills, epochs=3, min_workers=2, step_s=0.05)
    assert went_on_from(found) == [(2, True), (9, True)]


def founder_waits(ctx):
    """The worker that was put together takes no step before the next one is in the group."""
    joined = Path(ctx.config["log"]) / "joined"

    def look(phase, _):
        if phase == "batch" and ctx.worker == 3:
            joined.touch()
        if phase == "batch" and ctx.worker == 2:
            await_worker(joined)

    ctx.on_phase(look)
    train(ctx)


def test_it_happens_again_before_a_further_step(tmp_path):
    """The journal knows which events come next, though none has come since."""
    kills = [kill(0, 1, "in backward", step=4), kill(1, 0, "in backward", step=4)]
    kills += [kill(2, 1, "in forward", step=4), kill(3, 0, "in forward", step=4)]
    found = run(tmp_path, 2, {"shard": 2}, kills, min_workers=2, function=founder_waits)
    assert went_on_from(found) == [(4, True), (4, True)]
    assert committed(found) == list(range(1, len(committed(found)) + 1))


def test_parts_are_held_by_those_who_wait_for_others_at_a_boundary(tmp_path):
    kills = [kill(0, 1, "in backward", step=4)]
    kills += [kill(2, 1, "boundary", step=5), kill(1, 0, "pause", step=5)]
    found = run(tmp_path, 3, {"shard": 2}, kills, min_workers=3)
    assert went_on_from(found) == [(5, True)]
    assert committed(found) == list(range(1, len(committed(found)) + 1))


def dies_as_it_connects(ctx):
    """A process of the first worker, as soon as it is to be connected with mates once more."""
    if (ctx.worker, ctx.place) == (0, 0):
        torch.distributed.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    train(ctx)


def test_who_was_about_to_be_connected_with_one_that_is_lost_is_with_the_next(tmp_path):
    """Which has never been connected with anybody."""
    within = [kill(0, 1, "in backward", step=3)]
    options = {"function": dies_as_it_connects, "min_workers": 2}
    found = run(tmp_path, 2, {"shard": 2}, within, **options)
    lost = [event.worker for event in found.run.events if isinstance(event, WorkerLost)]
    freed = [(worker, place) for worker, place, _ in found.run.freed]
    assert (lost, freed) == ([0, 2], [(0, 0), (2, 1)])
    assert 3 in found.run.outcomes
