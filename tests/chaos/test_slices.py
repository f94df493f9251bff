"""Steps in slices on real processes that end by SIGKILL: each failed step keeps its whole batch."""

from random import Random
from signal import SIGKILL, SIGSTOP, SIGTERM

import pytest

from elastix.config import Guard
from elastix.data.cursor import count
from elastix.events import (
    Recovered,
    Reported,
    SamplesLeftOut,
    SlicesHandedOver,
    StepVoided,
    WorkerLeft,
    WorkerLost,
)
from elastix.testing.chaos import HANG, Flip, Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests import hanging
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.trainables import sliced

CONFIG = {"model": "wide", "samples": 112, "batch_size": 32, "slices": 8, "epochs": 2}
STEPS = 8  # of them two with a short batch: 16 samples


def run(
    tmp_path, kills=(), workers=3, config=None, *, gone=None, voids=False, whole=True, **options
):
    logs = tmp_path / "logs"
    logs.mkdir()
    settings = {**CONFIG, **(config or {}), "log": str(logs)}
    result = run_local(
        with_kills(sliced, kills), workers, config=settings, directory=tmp_path / "run", **options
    )
    lost = {kill.worker for kill in kills}
    assert set(result.lost) <= lost if gone == "some" else set(result.lost) == (gone or lost)
    if whole:
        assert_exactly_once(result.events, settings["epochs"])
    if not voids:  # else notes of a void step stand beside those of the one before
        left = {kill.worker for kill in kills}
        assert_replicas_identical(logs, left, result.events)
    steps = committed(result.events)
    batches = [batch for step in steps for batch in step.batches]
    assert not any(batch.owed for batch in batches)
    if not whole:
        return result
    a_epoch = -(-settings["samples"] // settings["batch_size"])
    assert len(steps) == a_epoch * settings["epochs"]
    rest = settings["samples"] % settings["batch_size"] or settings["batch_size"]
    sizes = [count(s for share in b.shares.values() for s in share) for b in batches]
    assert sizes == ([settings["batch_size"]] * (a_epoch - 1) + [rest]) * settings["epochs"]
    return result


def handed_over(result):
    return [event for event in result.events if isinstance(event, SlicesHandedOver)]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_nobody_is_lost(tmp_path, workers):
    assert not handed_over(run(tmp_path, workers=workers))


PLACES = {
    "first slice": Kill(worker=1, phase="slice", step=3),
    "second slice": Kill(worker=1, phase="slice", step=3, after=1),
    "first bucket": Kill(worker=1, phase="bucket", detail=0, step=3),
    "last bucket": Kill(worker=1, phase="bucket", detail=2, step=3),
    "first step": Kill(worker=1, phase="slice", step=0, after=1),
    "between steps": Kill(worker=1, phase="boundary", step=3),
    "last step": Kill(worker=1, phase="slice", step=STEPS - 1),
}
MAY_STAND = {
    "between its slices and the round": Kill(worker=1, phase="filled", step=3),
    "commit round": Kill(worker=1, phase="round", detail=1, step=3),
    "out of the commit round": Kill(worker=1, phase="left", detail=1, step=3),
}


@pytest.mark.fast("*-3", "*by sockets", "last step-5")
@pytest.mark.parametrize(
    ("workers", "shared"), [(3, True), (5, True), (2, False)], ids=["3", "5", "2 by sockets"]
)
@pytest.mark.parametrize("place", PLACES)
def test_the_others_compute_what_a_lost_worker_had(tmp_path, place, workers, shared):
    result = run(tmp_path, [PLACES[place]], workers, shared=shared)
    (event,) = handed_over(result)
    assert event.step == (PLACES[place].step or 0) + 1
    assert {lost for lost, _, _ in event.moved} == {1}
    assert {e.worker for e in result.events if isinstance(e, Recovered)} == set(range(workers)) - {
        1
    }


@pytest.mark.parametrize("place", MAY_STAND)
def test_a_step_that_all_hold_stands_with_what_the_lost_worker_had(tmp_path, place):
    """If all have what it had sent, nothing is computed for it, or only in the next step."""
    result = run(tmp_path, [MAY_STAND[place]])
    assert [event.step for event in handed_over(result)] in ([], [4], [5])


@pytest.mark.fast("*-2", "convnet-4")
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("model", ["convnet", "tied", "unused"])
def test_a_replay_of_the_slices_gives_the_weights(tmp_path, model, workers):
    kills = [
        Kill(worker=1, phase="slice", step=2),
        Kill(worker=0, phase="slice", step=5, after=1),
    ]
    kills = kills[: workers - 1]
    result = run(tmp_path, kills, workers, {"model": model})
    assert len(handed_over(result)) == len(kills)
    found = compare(tmp_path / "run")
    assert found.steps == STEPS
    assert found.relative < 1e-9, found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"samples": 115, "model": "convnet"}, id="a last batch of uneven slices"),
        pytest.param({"samples": 103, "slices": 16}, id="a last batch of empty slices"),
        pytest.param({"passes": 2, "model": "convnet"}, id="two passes a slice"),
    ],
)
def test_other_loops_are_as_right(tmp_path, config):
    kills = [
        Kill(worker=1, phase="slice", step=3),
        Kill(worker=0, phase="handed", step=3),
        Kill(worker=2, phase="slice", step=5),
    ]
    run(tmp_path, kills, 4, config, gone="some")
    assert compare(tmp_path / "run").relative < 1e-9


def test_a_replay_of_whole_batches_gives_the_weights(tmp_path):
    run(tmp_path, [Kill(worker=1, phase="slice", step=2)])
    assert compare(tmp_path / "run", whole=True).relative < 1e-9


@pytest.mark.fast("*-3", "meet-5")
@pytest.mark.parametrize("workers", [3, 5])
@pytest.mark.parametrize("where", ["handed", "enter", "meet", "bucket", "round", "left"])
def test_a_second_worker_is_lost_while_it_computes_for_the_first(tmp_path, workers, where):
    first = Kill(worker=1, phase="slice", step=3, after=1)
    detail = {"enter": 2, "meet": 2, "bucket": 1, "round": 1}.get(where)
    after = 1 if where == "left" else 0
    heir = 3 if workers == 5 else 2  # has fewer slices than others, so it is given some
    second = Kill(worker=heir, phase=where, step=3, detail=detail, after=after)
    result = run(tmp_path, [first, second], workers, {"model": "convnet"})
    moved = [entry for event in handed_over(result) for entry in event.moved]
    assert {lost for lost, _, _ in moved} >= {1}
    assert compare(tmp_path / "run").relative < 1e-9


@pytest.mark.parametrize("where", ["slice", "handed"])
def test_a_worker_that_hangs_in_a_slice_is_taken_out(tmp_path, monkeypatch, where):
    hanging.only(monkeypatch, 1 if where == "slice" else 2)
    kills = [Kill(worker=1, phase="slice", step=3, signal=SIGSTOP if where == "slice" else SIGKILL)]
    if where == "handed":
        kills.append(Kill(worker=2, phase="handed", step=3, signal=HANG))
    result = run(tmp_path, kills, 4, hang_timeout_s=2.0)
    assert [event.step for event in handed_over(result)] == [4]
    assert compare(tmp_path / "run").relative < 1e-9


def test_all_but_one_are_lost_in_one_step(tmp_path):
    kills = [Kill(worker=w, phase="slice", step=3) for w in (0, 2)]
    kills += [Kill(worker=w, phase="handed", step=3) for w in (1, 3)]
    result = run(tmp_path, kills, workers=5)
    (event,) = [e for e in handed_over(result) if e.step == 4]
    assert {(lost, to) for lost, to, _ in event.moved} == {(w, 4) for w in range(4)}
    assert sum(n for _, _, n in event.moved) == 7  # and one of its own
    assert compare(tmp_path / "run").relative < 1e-9


def test_lost_workers_are_replaced_and_joiners_share_in(tmp_path):
    kills = [Kill(worker=1, phase="slice", step=2), Kill(worker=0, phase="slice", step=6, after=1)]
    config = {"epochs": 6, "model": "convnet", "meeting": str(tmp_path), "ushers": {"3": 8}}
    result = run(tmp_path, kills, 3, config, replace=True)
    assert 3 in {join.worker for join in joins(result.events)}
    assert compare(tmp_path / "run").relative < 1e-9


def test_a_worker_leaves_between_two_steps(tmp_path):
    leaver = Kill(worker=1, phase="slice", step=2, signal=SIGTERM)
    result = run(tmp_path, [leaver], 3, {"epochs": 4, "leavers": {"1": 3}}, gone="some")
    assert not handed_over(result)
    left = [e for e in result.events if isinstance(e, WorkerLeft)]
    assert [e.worker for e in left] == [1]


def test_fewer_than_the_minimum_finish_the_step_and_wait(tmp_path):
    kills = [Kill(worker=1, phase="slice", step=3)]
    result = run(tmp_path, kills, 3, {"epochs": 4}, min_workers=3, replace=True)
    assert [event.step for event in handed_over(result)] == [4]
    assert {step.world_size for step in committed(result.events) if step.step > 4} == {3}


@pytest.mark.parametrize("where", ["slice", "filled"])
def test_a_step_that_is_rolled_back_comes_again_whole(tmp_path, where):
    kills = [Kill(worker=1, phase=where, step=3)]
    result = run(tmp_path, kills, 3, {"model": "convnet"}, recovery="rollback", voids=True)
    assert not [e for e in handed_over(result) if e.step == 4]
    assert compare(tmp_path / "run").relative < 1e-9


def test_processes_read_ahead_and_what_is_handed_over_is_read_beside_them(tmp_path):
    kills = [Kill(worker=1, phase="slice", step=3)]
    result = run(tmp_path, kills, 3, {"num_workers": 2})
    assert [event.step for event in handed_over(result)] == [4]
    assert compare(tmp_path / "run").relative < 1e-9


@pytest.mark.parametrize("slices", [1, 2])
def test_there_may_be_more_workers_than_slices(tmp_path, slices):
    kills = [Kill(worker=0, phase="slice", step=3)]
    result = run(tmp_path, kills, 4, {"slices": slices, "model": "convnet"})
    assert [event.step for event in handed_over(result)] == [4]
    assert compare(tmp_path / "run").relative < 1e-9


# ------------------------------------------------------------------ steps that do not count


def test_a_step_that_the_guard_voids_is_left_out_whole(tmp_path):
    kills = [Kill(worker=1, phase="slice", step=2)]
    config = {"infinite": (3, 2), "model": "convnet"}
    result = run(tmp_path, kills, 3, config, guard=Guard(), voids=True, whole=False)
    assert [e.step for e in result.events if isinstance(e, StepVoided)] == [4]
    (left_out,) = [e for e in result.events if isinstance(e, SamplesLeftOut)]
    assert count(left_out.spans) == 16
    assert compare(tmp_path / "run").relative < 1e-9


def test_a_worker_whose_state_has_parted_is_evicted_and_its_slices_are_not_counted(tmp_path):
    flip = Flip(worker=1, tensor="1.weight", phase="boundary", step=3, byte=6, bit=2)
    result = run(tmp_path, [flip], 3, {"model": "mlp"}, voids=True)
    assert [e.worker for e in result.events if isinstance(e, WorkerLost)] == [1]
    assert compare(tmp_path / "run").relative < 1e-9


# ------------------------------------------------------------------ many deaths


def schedule(seed):
    """A world, and when and where its workers end; one is left."""
    random = Random(seed)
    workers = random.choice([2, 3, 4, 5])
    model = random.choice(["convnet", "tied", "unused", "wide"])
    places = ["boundary", "slice", "slice", "handed", "filled", "bucket", "round", "left", "enter"]
    kills = [
        Kill(
            worker=worker,
            phase=random.choice(places),
            step=random.randrange(STEPS),
            after=random.randrange(3),
        )
        for worker in random.sample(range(workers), random.randint(1, workers - 1))
    ]
    return workers, model, random.choice([2, 4, 8, 16]), kills


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 50))]
)
def test_any_deaths_leave_whole_steps(tmp_path, seed):
    workers, model, slices, kills = schedule(seed)
    config = {"model": model, "slices": slices}
    # A place that is not come to any more (a slice handed over, say) kills nobody.
    run(tmp_path, kills, workers, config, gone="some", replace=seed % 2 == 0)
    assert compare(tmp_path / "run").relative < 1e-9


# ------------------------------------------------------------------ means


def test_the_mean_of_the_group_counts_each_worker_by_its_slices(tmp_path):
    result = run(tmp_path, [Kill(worker=1, phase="slice", step=3)], 3, {"means": True})
    told = [e.metrics["samples"] for e in result.events if isinstance(e, Reported)]
    # The mean of how many samples each had, weighed by these.
    assert told[0] == pytest.approx((12 * 12 + 12 * 12 + 8 * 8) / 32)
    assert told[3] == pytest.approx(8.0)  # 16 samples, of which the two who are left have half


# ------------------------------------------------------------------ speed


def test_who_is_slow_is_given_fewer_slices_and_the_result_is_the_same(tmp_path):
    """Once it is known; others may be held up on a busy machine, and are not in all steps."""
    config = {"batch_size": 28, "slices": 14, "by_speed": {"2": 0.15}}
    result = run(tmp_path, [], 3, config)
    shares = [step.batches[0].shares for step in committed(result.events)]
    had = [[count(share.get(worker, ())) for worker in range(3)] for share in shares]
    assert had[0] == [10, 10, 8]
    assert any(2 * slow <= min(others) for *others, slow in had), had
    assert compare(tmp_path / "run").relative < 1e-9


def test_a_joiner_cuts_as_the_others_do(tmp_path):
    """What the others know of each other's speed is part of the State that it is given."""
    config = {"batch_size": 28, "slices": 14, "by_speed": {"0": 0.01, "1": 0.04}, "epochs": 6}
    config |= {"meeting": str(tmp_path), "ushers": {"3": 8}}
    kills = [Kill(worker=2, phase="slice", step=6)]
    result = run(tmp_path, kills, 3, config, replace=True)
    assert joins(result.events)
    assert compare(tmp_path / "run").relative < 1e-9
