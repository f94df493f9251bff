"""Spares of workers that are crews: whole workers that wait, and are let in when another is lost.

Real processes on gloo. Laws: those of crews (tests.crew_runs) throughout.
"""

import functools
import signal
from pathlib import Path

import pytest

from elastix.events import (
    GenerationFormed,
    Recovered,
    Resumed,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from tests.crew_runs import PlaceKill, checked, held_until, told_pids, train
from tests.trainables import await_worker, others_late, until_told_to_store

pytestmark = pytest.mark.timeout(240)

PLACES = 2
FOUNDERS = 2
SPARE, NEXT = FOUNDERS, FOUNDERS + 1


def ready(tmp_path, kills, holds, **options):
    """Run with a spare, and with steps at which others wait for it."""
    options = {"replace": True, "spares": 1, "epochs": 3, "step_s": 0.05, **options}
    function = functools.partial(options.pop("function", held_until), holds, PLACES)
    found = checked(tmp_path, FOUNDERS, {"shard": PLACES}, kills, function=function, **options)
    return found.run, told_pids(tmp_path / "log")


def kill(worker, place, phase="bucket", step=3, **fixed):
    return PlaceKill(worker=worker, place=place, phase=phase, step=step, **fixed)


def of(kind, run):
    return [event for event in run.events if isinstance(event, kind)]


def fills(run):
    """By worker that was let in, and made the group as large as it was: the step of that."""
    return {event.worker: event.step for event in of(WorkerJoined, run)}


def next_late(holds, places, ctx):
    """Nobody is started in place of the spare before that one takes part."""
    if ctx.worker == NEXT:
        await_worker(Path(ctx.config["meeting"]) / f"{SPARE}-in")
    held_until(holds, places, ctx)


BOTH = [kill(1, 0, "filled"), kill(1, 1, "filled")]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([kill(1, 1)], id="follower"),
        pytest.param([kill(1, 0, "in forward")], id="speaker", marks=SLOW),
        pytest.param([kill(0, 0)], id="first speaker", marks=SLOW),
        pytest.param(BOTH, id="whole worker", marks=SLOW),
    ],
)
def test_a_spare_makes_a_loss_good_without_a_new_process_and_is_replaced(tmp_path, kills):
    lost = kills[0].worker
    options = {"function": next_late, "ushers": {str(SPARE): 4}}
    run, pids = ready(tmp_path, kills, {3: SPARE, 8: NEXT}, **options)
    assert [event.worker for event in of(WorkerLost, run)] == [lost]
    sizes = {event.step: event.world_size for event in of(StepCommitted, run)}
    assert sizes[4] == 1  # the step in hand
    assert fills(run).keys() == {SPARE}
    assert fills(run)[SPARE] < 8  # before others wait for the next one
    assert {size for step, size in sizes.items() if step > fills(run)[SPARE]} == {2}
    started = [event.worker for event in of(WorkerStarted, run)]
    assert (sorted(started[:FOUNDERS]), started[FOUNDERS:]) == ([0, 1], [SPARE, NEXT])
    dead = {one.place for one in kills}
    for place in range(PLACES):  # who was well is part of the next spare
        assert (pids[NEXT, place] == pids[lost, place]) == (place not in dead)
    assert len(set(pids.values())) == 6 + len(dead)


@pytest.mark.slow
def test_the_spare_that_came_in_is_lost_and_its_replacement_comes_in(tmp_path):
    kills = [kill(1, 1), kill(SPARE, 0, step=8)]
    run, pids = ready(tmp_path, kills, {3: SPARE, 8: NEXT, 12: NEXT + 1}, epochs=4)
    assert fills(run).keys() == {SPARE, NEXT}
    assert fills(run)[NEXT] < 12
    assert pids[NEXT, 0] == pids[1, 0]
    assert pids[NEXT + 1, 1] == pids[SPARE, 1]


@SLOW
@pytest.mark.parametrize("place", [1, 0])
def test_a_process_of_a_spare_dies_while_it_waits_and_nobody_notices(tmp_path, place):
    """Its mate and a fresh process are the next spare."""
    dies = kill(SPARE, place, "wait", step=0)
    run, pids = ready(tmp_path, [dies], {3: NEXT})
    assert [event.worker for event in of(WorkerLost, run)] == [SPARE]
    assert len(of(GenerationFormed, run)) == 1
    assert not of(Recovered, run)
    assert [(worker, place) for worker, place, _ in run.freed] == [(SPARE, 1 - place)]
    assert pids[NEXT, 1 - place] == pids[SPARE, 1 - place]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_of_which_a_process_gets_notice_leaves_and_a_spare_takes_its_place(
    tmp_path, worker, place
):
    """At a boundary, so nothing is owed, nobody is lost and nobody recovers."""
    notice = kill(worker, place, "in backward", step=6, signal=signal.SIGTERM)
    run, _ = ready(tmp_path, [], {3: SPARE}, within=[notice])
    (left,) = of(WorkerLeft, run)
    assert left.worker == worker
    assert not of(WorkerLost, run)
    assert not of(Recovered, run)
    assert not any(batch.owed for step in of(StepCommitted, run) for batch in step.batches)
    assert SPARE in fills(run)
    assert of(StepCommitted, run)[-1].world_size == FOUNDERS


@pytest.mark.slow
def test_the_rest_of_a_worker_with_notice_is_ended_and_is_no_part_of_another(tmp_path):
    """And a process of it that dies before it has left costs a loss, and nothing else."""
    notice = kill(1, 1, "in backward", step=6, signal=signal.SIGTERM)
    dies = kill(1, 0, "in backward", step=7)
    run, _ = ready(tmp_path, [], {3: SPARE}, within=[notice, dies])
    gone = [event.worker for event in (*of(WorkerLeft, run), *of(WorkerLost, run))]
    assert gone == [1]
    assert SPARE in fills(run)


@pytest.mark.slow
def test_a_spare_comes_in_where_nobody_is_replaced(tmp_path):
    """There is no room for another process, but for those of the workers that are lost."""
    run, _ = ready(tmp_path, [kill(1, 1)], {3: SPARE}, replace=False)
    assert fills(run).keys() == {SPARE}
    assert {event.worker for event in of(WorkerStarted, run)} == {0, 1, SPARE}


@pytest.mark.slow
def test_no_worker_is_whole_and_the_spare_comes_in_beside_what_was_held(tmp_path):
    """A spare has nothing of the State, so those who have it are the group first."""
    kills = [kill(0, 1, "in backward"), kill(1, 0, "in backward")]
    run, pids = ready(tmp_path, kills, {3: SPARE}, epochs=6, step_s=0.1)
    assert [(event.step, event.held) for event in of(Resumed, run)] == [(3, True)]
    founder = of(GenerationFormed, run)[-1].members[0]
    assert (pids[founder, 0], pids[founder, 1]) == (pids[0, 0], pids[1, 1])
    assert of(StepCommitted, run)[-1].world_size == 2


def held_until_told_to_store(ctx):
    """In the very step in which they have notice."""
    wait = until_told_to_store(ctx, range(FOUNDERS))
    ctx.on_phase(lambda phase, _: phase == "filled" and ctx.step == 3 and wait())
    train(ctx)


def test_crews_that_are_all_to_go_store_their_state(tmp_path):
    notices = [kill(n, 1 - n, "in backward", signal=signal.SIGTERM) for n in range(2)]
    options = {"function": held_until_told_to_store, "within": notices, "epochs": 2}
    run = checked(tmp_path, FOUNDERS, {"shard": PLACES}, **options).run
    assert len(of(WorkerLeft, run)) < 2
    (stored,) = [event for event in of(StateStored, run) if event.reason == "notice"]
    assert stored.step == 4
    assert not of(WorkerLost, run)


def with_others_late(ctx):
    others_late(ctx)
    train(ctx)


def test_a_crew_that_waits_for_others_and_is_to_go_as_well_stores_its_state(tmp_path):
    notices = [
        kill(0, 1, "in backward", signal=signal.SIGTERM),
        kill(1, 0, "pause", step=0, signal=signal.SIGTERM),
    ]
    options = {"function": with_others_late, "within": notices, "replace": True, "epochs": 2}
    run = checked(tmp_path, FOUNDERS, {"shard": PLACES}, min_workers=2, **options).run
    first = of(WorkerLeft, run)[0]
    (stored,) = [event for event in of(StateStored, run) if event.reason == "notice"]
    assert (first.worker, stored.step) == (0, first.step)
    assert not of(WorkerLost, run)
