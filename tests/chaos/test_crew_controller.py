"""The controller of a run whose workers are crews is killed, for real. On a real Ray.

Laws: those of crews (tests.crew_runs), nothing rolled back that need not be, nobody left behind.
"""

import contextlib
import functools
import os
import random
import signal
import threading

import pytest
import ray
import torch

import elastix
from elastix.events import (
    GenerationFormed,
    Resumed,
    StateStored,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from elastix.state import raw_bytes
from elastix.train.on_ray import takeover
from tests import crew_runs
from tests.chaos.test_controller import (
    alive,
    controller_pid,
    events_of,
    free,  # noqa: F401 - for each test here too
    in_background,
    nobody_left,
    run_of,
    steps_taken,
    until,
)
from tests.chaos.test_crew_slices import quiet
from tests.chaos.test_crew_storm import told
from tests.run_bytes import steps_of

pytestmark = pytest.mark.timeout(400)


def started(tmp_path, spares=0, kills=(), function=crew_runs.train):
    """A run in the background, in its middle; what it was told, and how it ends."""
    config = crew_runs.configure(tmp_path, kills, samples=60, epochs=6, step_s=0.1)
    trainer = elastix.ElasticTrainer(
        function,
        config=config,
        scaling=elastix.ScalingConfig(num_workers=2, crew={"shard": 2}, spares=spares),
        run=elastix.RunConfig(name="chaos", store=str(tmp_path)),
        quiet=True,
    )
    thread, box = in_background(trainer.fit)
    until(lambda: steps_taken(tmp_path) >= 4)
    return config, thread, box


def assert_through(tmp_path, config, thread, box):
    thread.join(300)
    assert "error" not in box, repr(box.get("error"))
    crew_runs.assert_laws(config, list(box["result"].events), {"shard": 2})
    assert events_of(tmp_path, Resumed) == []
    nobody_left(tmp_path)


def test_a_killed_controller_comes_back_and_crews_go_on(cluster, tmp_path):
    config, thread, box = started(tmp_path)
    os.kill(controller_pid(tmp_path), signal.SIGKILL)
    assert_through(tmp_path, config, thread, box)
    assert events_of(tmp_path, WorkerLost) == []
    causes = [event.cause for event in events_of(tmp_path, GenerationFormed)]
    assert causes == ["start", "new controller"]
    assert len(events_of(tmp_path, WorkerStarted)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_controller_and_a_process_of_a_crew_are_killed_together(cluster, tmp_path, place):
    config, thread, box = started(tmp_path)
    (one,) = [event for event in events_of(tmp_path, WorkerStarted) if event.worker == 1]
    controller = controller_pid(tmp_path)
    os.kill(controller, signal.SIGKILL)
    os.kill([one.pid, one.mates[0][1]][place], signal.SIGKILL)
    assert_through(tmp_path, config, thread, box)
    assert [event.worker for event in events_of(tmp_path, WorkerLost)] == [1]


@pytest.mark.slow
def test_a_controller_is_killed_while_a_spare_waits_and_another_one_comes_in(cluster, tmp_path):
    """It cannot say what the old one had told it last, so it is ended and started again."""
    kills = [crew_runs.PlaceKill(worker=1, place=1, phase="in backward", step=8)]
    held = functools.partial(crew_runs.held_until, {3: 2, 8: 3}, 2)
    config, thread, box = started(tmp_path, 1, kills, held)
    os.kill(controller_pid(tmp_path), signal.SIGKILL)
    assert_through(tmp_path, config, thread, box)
    assert [event.worker for event in events_of(tmp_path, WorkerJoined)] == [3]
    lost = [(event.worker, event.cause) for event in events_of(tmp_path, WorkerLost)]
    assert (1, "died") in lost
    pids = crew_runs.told_pids(tmp_path / "log")
    assert not {pids[3, 0], pids[3, 1]} & {pids[2, 0], pids[2, 1]}


def strike(tmp_path, chance, times, over):
    """Kill processes of spares and of others, and the controller, alone or together."""
    while times and not over.wait(chance.uniform(0.3, 2.0)):
        pids = crew_runs.told_pids(tmp_path / "log")
        newest = {pid: max(at for at, p in pids.items() if p == pid) for pid in pids.values()}
        now = {at: pid for pid, at in newest.items() if at[0]}  # the first worker is let live
        doomed = []
        if now and chance.random() < 0.8:
            last = max(worker for worker, _ in now)
            worker = last if chance.random() < 0.6 else chance.choice(sorted(now))[0]
            places = chance.choice([[0], [1], [0, 1]])
            doomed = [now[worker, place] for place in places if (worker, place) in now]
        if not doomed or chance.random() < 0.4:
            with contextlib.suppress(ValueError, OSError, ray.exceptions.RayError):  # between two
                doomed.insert(0, controller_pid(tmp_path))
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        times -= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_with_the_controller_leaves_the_bytes_of_the_quiet_run(
    cluster, tmp_path, seed
):
    """Spares that assemble, wait, or are let in, while the controller goes or has just come."""
    chance, over = random.Random(seed), threading.Event()
    config = crew_runs.configure(
        tmp_path, samples=58, batch_size=12, epochs=10, step_s=0.2, slices=4, dropout=0.2
    )
    trainer = elastix.ElasticTrainer(
        told,
        config=config,
        scaling=elastix.ScalingConfig(num_workers=(1, 2), crew={"shard": 2}, spares=1),
        run=elastix.RunConfig(name="chaos", store=str(tmp_path), exact=True),
        quiet=True,
    )
    thread, box = in_background(trainer.fit)
    until(lambda: steps_taken(tmp_path) >= 2)
    args = (tmp_path, chance, chance.randrange(2, 6), over)
    killer = threading.Thread(target=strike, args=args)
    killer.start()
    thread.join(300)
    over.set()
    killer.join()
    assert "error" not in box, repr(box.get("error"))
    result = box["result"]
    assert result.audit.exact
    assert not events_of(tmp_path, Resumed)
    assert 0 not in {event.worker for event in events_of(tmp_path, WorkerLost)}
    (digest, tensors), steps = quiet("shard 2", 10)
    assert steps_of(result.events) == steps
    stored = [event for event in result.events if isinstance(event, StateStored)][-1]
    assert stored.digest == digest
    found = result.load().tensors
    assert all(torch.equal(raw_bytes(found[name]), tensor) for name, tensor in tensors.items())
    nobody_left(tmp_path)


@pytest.mark.slow
def test_a_controller_that_is_ended_for_good_leaves_no_process_of_a_crew(cluster, tmp_path):
    _, thread, box = started(tmp_path)
    ray.kill(takeover.find_controller(run_of(tmp_path)), no_restart=True)
    thread.join(100)
    assert isinstance(box["error"], elastix.ControllerLost)
    nobody_left(tmp_path)


def beginning(marks, ctx):
    """Up to `prepare` when the controller is killed that all processes have met by."""
    (marks / f"{ctx.worker}-{ctx.place} is up").touch()
    until((marks / "dead").exists)
    crew_runs.train(ctx)


@pytest.mark.parametrize(
    "when",
    [pytest.param("before another one comes", marks=pytest.mark.slow), "after another one came"],
)
def test_a_controller_is_killed_while_crews_that_found_the_group_build_their_models(
    cluster, tmp_path, when
):
    config = crew_runs.configure(tmp_path, samples=60, epochs=2)
    trainer = elastix.ElasticTrainer(
        functools.partial(beginning, tmp_path),
        config=config,
        scaling=elastix.ScalingConfig(num_workers=2, crew={"shard": 2}),
        run=elastix.RunConfig(name="chaos", store=str(tmp_path)),
        quiet=True,
    )
    thread, box = in_background(trainer.fit)
    until(lambda: len(list(tmp_path.glob("* is up"))) == 4)
    controller = controller_pid(tmp_path)
    os.kill(controller, signal.SIGKILL)
    until(lambda: not alive(controller))
    if when == "after another one came":
        until(lambda: leads(tmp_path))
    (tmp_path / "dead").touch()
    thread.join(300)
    assert "error" not in box, repr(box.get("error"))
    crew_runs.assert_laws(config, list(box["result"].events), {"shard": 2})
    assert {event.step for event in events_of(tmp_path, Resumed)} <= {0}
    nobody_left(tmp_path)


def leads(store):
    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is on its way
        return controller_pid(store)
