"""Progress: what console, status and report say a run has come to."""

from dataclasses import replace

import pytest

from elastix.events import (
    BatchShares,
    EpochsPlanned,
    GenerationFormed,
    LoaderOpened,
    Recovered,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    SlicesHandedOver,
    StepCommitted,
    WorkerLost,
    WorkerRaised,
)
from elastix.observe.progress import Progress, duration, number


def started(t: float = 0.0, workers=4) -> RunStarted:
    return RunStarted(
        t=t, name="r", seed=0, config={}, scaling={"num_workers": workers}, versions={}
    )


def opened() -> LoaderOpened:
    return LoaderOpened(t=0, loader=0, length=100, batch_size=10, shuffle=True, seed=0)


def formed(t: float, generation: int, *members: int) -> GenerationFormed:
    return GenerationFormed(t=t, generation=generation, members=members, cause="test")


def step(t: float, number: int, size: int = 4, samples: int = 10, epoch: int = 0) -> StepCommitted:
    first = (number - 1) * 10
    shares = {0: ((first, first + samples),)}
    batch = BatchShares(loader=0, epoch=epoch, shares=shares)
    return StepCommitted(t=t, step=number, generation=1, world_size=size, batches=(batch,))


def lost(t: float, worker: int, rank: int, generation: int) -> WorkerLost:
    return WorkerLost(t=t, worker=worker, rank=rank, generation=generation, cause="died")


def recovered(t: float, worker: int, generation: int, stall_s: float) -> Recovered:
    return Recovered(
        t=t,
        worker=worker,
        generation=generation,
        step=3,
        outcome="accepted",
        rebuild_s=stall_s / 2,
        stall_s=stall_s,
    )


def after(*events) -> Progress:
    progress = Progress()
    for event in events:
        progress.add(event)
    return progress


def test_where_it_is_and_how_long_it_will_take():
    plan = EpochsPlanned(t=0, loader=0, epochs=2)
    steps = [step(10 + n, n, epoch=(n - 1) // 10) for n in range(1, 16)]
    progress = after(started(), opened(), plan, formed(9, 1, 0, 1, 2, 3), *steps)
    assert (progress.step, progress.samples, progress.epoch) == (15, 150, (2, 2))
    assert progress.done == pytest.approx(0.75)
    assert progress.rate == pytest.approx(10.0)
    assert progress.left_s == pytest.approx(5.0)


def test_without_a_plan_nothing_is_promised():
    progress = after(started(), opened(), step(1, 1), step(2, 2))
    assert progress.done is None
    assert progress.left_s is None
    assert progress.epoch == (1, 0)


def test_the_rate_forgets_what_is_older_than_a_minute():
    slow = [step(10.0 * n, n) for n in range(1, 11)]
    fast = [step(100 + n, 10 + n) for n in range(1, 101)]
    assert after(started(), opened(), *slow, *fast).rate == pytest.approx(10.0, rel=0.05)


def test_the_rate_is_known_soon_after_the_clock_was_set_back():
    before = [step(10_000 + n, n) for n in range(1, 11)]
    since = [step(n / 2, 10 + n) for n in range(1, 11)]
    assert after(started(), opened(), *before, *since).rate == pytest.approx(20.0)


def test_a_run_without_losses_has_a_goodput_of_one():
    steps = [step(n * (3.0 if n % 7 == 0 else 1.0), n) for n in range(1, 7)]
    progress = after(started(), opened(), formed(0, 1, 0, 1, 2, 3), *steps)
    assert progress.goodput.share == pytest.approx(1.0)


def test_goodput_counts_stalls_and_missing_workers():
    before = [step(float(n), n) for n in range(1, 11)]  # 9 s undisturbed, 10 samples/s
    loss = [formed(10.0, 2, 0, 1), lost(10.0, 2, 2, 1), recovered(12.9, 0, 2, 2.9)]
    after_it = [step(13.0, 11, size=2), *(step(13.0 + 2 * n, 11 + n, size=2) for n in range(1, 4))]
    progress = after(started(), opened(), formed(0, 1, 0, 1, 2, 3), *before, *loss, *after_it)
    assert progress.goodput.full_rate == pytest.approx(10.0)
    assert progress.goodput.share == pytest.approx((13 * 10) / (18.0 * 10.0))


def test_a_loss_is_matched_with_the_slowest_survivor_of_the_next_recovery():
    progress = after(
        started(),
        formed(0, 1, 0, 1, 2, 3),
        formed(5, 2, 0, 1, 3),
        lost(5.0, 2, 2, 1),
        recovered(5.2, 0, 2, 0.2),
        recovered(5.4, 1, 2, 0.4),
        recovered(5.3, 3, 2, 0.3),
        formed(9, 3, 0, 1),
        lost(9.0, 3, 2, 2),
        recovered(9.9, 0, 3, 0.9),
    )
    assert [loss.stall_s for loss in progress.losses] == [0.4, 0.9]
    assert [loss.generation for loss in progress.losses] == [2, 3]
    assert progress.slowest_recovery_s == 0.9


@pytest.mark.parametrize(("outcome", "before"), [("accepted", 2), ("between steps", 3)])
def test_a_loss_knows_the_steps_before_it_though_their_commits_are_told_later(outcome, before):
    survivor = replace(recovered(5.2, 0, 2, 0.2), outcome=outcome)
    steps = [step(4.0, 1), lost(5.0, 1, 1, 1), step(5.1, 2), survivor]
    progress = after(started(), opened(), formed(0, 1, 0, 1), *steps)
    assert progress.losses[0].step == before


def test_a_loss_knows_how_many_slices_others_computed_for_it():
    progress = Progress()
    for event in (
        lost(1, 1, 1, 1),
        lost(1, 3, 3, 1),
        SlicesHandedOver(t=2, step=1, moved=((1, 0, 2), (3, 0, 1), (1, 2, 1))),
    ):
        progress.add(event)
    assert [(loss.worker, loss.handed_over) for loss in progress.losses] == [(1, 3), (3, 1)]


def test_two_losses_that_one_recovery_mends():
    progress = after(
        formed(0, 1, 0, 1, 2, 3),
        formed(5, 2, 0, 1, 3),
        lost(5.0, 2, 2, 1),
        formed(5.1, 3, 0, 1),
        lost(5.1, 3, 2, 2),
        recovered(5.5, 0, 3, 0.5),
    )
    assert [loss.stall_s for loss in progress.losses] == [0.5, 0.5]


def test_a_worker_lost_before_it_was_let_in_needs_no_recovery():
    progress = after(
        formed(0, 1, 0, 1), lost(1, 2, -1, 1), formed(2, 2, 0), recovered(2, 0, 2, 0.1)
    )
    assert progress.losses[0].stall_s is None
    assert progress.slowest_recovery_s is None


def test_going_back_takes_the_void_samples_back():
    steps = [step(float(n), n) for n in range(1, 9)]
    again = [Resumed(t=20, step=5, ref=""), step(30, 6), step(31, 7)]
    progress = after(started(), opened(), *steps, started(19.0), *again)
    assert (progress.step, progress.samples) == (7, 70)
    assert progress.goodput.share < 1.0  # three steps were made twice


def test_the_time_between_two_processes_is_not_lost_time():
    first = [formed(0, 1, 0), *(step(float(n), n) for n in range(1, 6))]
    second = [started(1000.0), Resumed(t=1000, step=5, ref=""), formed(1001, 1, 0)]
    more = [step(1000.0 + n, n) for n in range(6, 12)]
    progress = after(started(), opened(), *first, *second, *more)
    assert progress.goodput.share == pytest.approx(1.0)


def test_the_first_failure_is_kept_not_the_last():
    raised = [WorkerRaised(t=n, worker=n, rank=n, step=1, traceback=f"no {n}") for n in (2, 1)]
    progress = after(started(), *raised, RunEnded(t=5, outcome="failed", step=1, message="why"))
    assert progress.first_failure.traceback == "no 2"
    assert (progress.outcome, progress.message) == ("failed", "why")
    assert after(started(), *raised, started(9.0)).first_failure is None


def test_metrics_are_the_last_of_each():
    progress = after(
        Reported(t=1, seq=0, step=5, metrics={"a": 1, "b": 2}),
        Reported(t=2, seq=1, step=9, metrics={"b": 3}),
    )
    assert progress.metrics == {"a": 1, "b": 3}
    assert progress.metrics_step == 9


@pytest.mark.parametrize(("workers", "wanted"), [(3, 3), ([2, 8], 8), ((2, 5), 5)])
def test_how_many_workers_were_asked_for(workers, wanted):
    assert after(started(workers=workers), formed(0, 1, 0, 1)).workers_wanted == wanted


def test_numbers_and_times_for_people():
    assert [duration(s) for s in (4, 724, 3723)] == ["0:04", "12:04", "1:02:03"]
    assert [number(v) for v in (0.12345, 1.0, 12, "x", 192000.0)] == [
        "0.1235",
        "1",
        "12",
        "x",
        "192,000",
    ]
