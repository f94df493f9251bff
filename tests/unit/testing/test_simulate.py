"""The simulation of failures: exact where arithmetic says what must come out."""

import random

import pytest

from elastix.errors import ConfigError
from elastix.events import GenerationFormed, Recovered, StepCommitted, WorkerJoined, WorkerLost
from elastix.testing.simulate import Costs, Scenario, costs_of, main, simulate, table

PLAIN = Costs(
    work_s=0.8,
    fixed_s=0.2,
    recover_s=0.5,
    recover_per_doubling_s=0.0,
    start_s=10.0,
    join_s=2.0,
    restart_s=60.0,
    checkpoint_s=0.0,
)


def run(strategy="forward", failures=(), workers=4, costs=PLAIN, **options):
    plan = Scenario(workers=workers, strategy=strategy, **{"duration_s": 100.0, **options})
    return simulate(plan, costs, random.Random(0), failures)


@pytest.mark.parametrize("strategy", ["forward", "rollback", "restart"])
def test_without_failures_nothing_is_lost(strategy):
    found = run(strategy)
    assert found.goodput == pytest.approx(1.0)
    assert (found.steps, found.failures, found.redone) == (100, 0, 0)


def test_a_checkpoint_costs_its_stall():
    costs = Costs(work_s=0.8, fixed_s=0.2, checkpoint_s=1.0)
    assert run(costs=costs, checkpoint_every_s=9.0).goodput == pytest.approx(0.9, abs=0.02)


def test_one_failure_with_forward_recovery_to_the_last_digit():
    # Step 11 takes 0.5 s longer and commits 3/4; then steps of 0.2 + 0.8 * 4/3 s until the
    # replacement is up at 20.5, the join of 2 s, and full steps again.
    found = run(failures=[10.5])
    slow_s = 0.2 + 0.8 * 4 / 3
    slow = 1 + int((20.5 - 11.5) // slow_s)
    joined = 11.5 + slow * slow_s + 2.0
    full = 1 + int((100.0 - joined) // 1.0)
    end = joined + full
    assert found.steps == 11 + slow + full
    assert found.goodput == pytest.approx((10 + 0.75 + slow + full) / end)


def test_rollback_redoes_the_step_and_forward_does_not():
    forward, rollback = run("forward", [10.9]), run("rollback", [10.9])
    assert (forward.redone, rollback.redone) == (0, 1)
    assert forward.goodput > rollback.goodput


def test_restart_goes_back_to_the_last_checkpoint():
    found = run("restart", [55.0], checkpoint_every_s=20.0, duration_s=200.0)
    assert found.redone == 15  # the last was at 40
    assert found.goodput == pytest.approx((200 - 60 - 15) / 200, abs=0.02)


def test_a_spare_takes_the_place_of_the_dead_at_once():
    without = run(failures=[10.5])
    with_one = run(failures=[10.5], spares=1)
    two_losses = run(failures=[10.5, 12.5], spares=1)
    assert with_one.goodput > without.goodput > two_losses.goodput - 0.1
    assert run(failures=[10.5, 40.5], spares=1).goodput > run(failures=[10.5, 40.5]).goodput


def test_below_the_minimum_the_group_waits():
    found = run(failures=[10.5], min_workers=4)
    assert found.goodput == pytest.approx((100 - 0.5 - 9 - 2) / 100, abs=0.03)


def test_all_lost_at_once_start_again_from_the_checkpoint():
    found = run(failures=[50.5, 50.5, 50.5, 50.5], checkpoint_every_s=20.0)
    assert found.failures == 4
    assert found.redone == 10


def test_a_starting_worker_takes_its_share_of_shared_cores():
    shared = Costs(**{**PLAIN.__dict__, "start_share": 0.5})
    assert run(failures=[10.5], costs=shared).goodput < run(failures=[10.5]).goodput - 0.02


def test_restarting_agrees_with_what_theory_expects():
    """First order: a failure costs the restart and half of a checkpoint's interval.

    Source: Young, "A first order approximation to the optimum checkpoint interval", 1974.
    """
    plan = Scenario(
        workers=100,
        strategy="restart",
        duration_s=30 * 86_400.0,
        mtbf_s=100 * 86_400.0 / 4,
        checkpoint_every_s=600.0,
    )
    found = simulate(plan, PLAIN, random.Random(1))
    between_s = plan.mtbf_s / plan.workers
    assert found.goodput == pytest.approx(1 - (60 + 300) / between_s, abs=0.004)


def test_ten_thousand_workers_for_a_day():
    rows = table([1000, 10_000], Scenario(workers=1), Costs(), seed=0)
    forward, rollback, restart = map(float, rows[-1][2:])
    assert forward >= rollback > restart
    assert forward > 95


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"min_workers": 5},
        {"strategy": "hope"},
        {"mtbf_s": 0.0},
        {"duration_s": 0.0},
    ],
)
def test_impossible_plans_are_refused(options):
    with pytest.raises(ConfigError):
        Scenario(**{"workers": 4, **options})


def committed(step, t, generation, size):
    return StepCommitted(step=step, t=t, generation=generation, world_size=size, batches=())


def test_what_starting_workers_take_is_what_the_missing_ones_do_not_explain():
    """Four workers take 1 s; three take 2 s while another starts, and would need 1.33 s at most."""
    events = [
        *(committed(n, float(n), 1, 4) for n in range(8)),
        *(committed(8 + n, 10 + 2.0 * n, 2, 3) for n in range(8)),
    ]
    costs = costs_of(events)
    assert costs.step_s(3, 4) == pytest.approx(4 / 3)
    assert costs.start_share == pytest.approx(1 / 3)
    assert costs.step_s(3, 4) / (1 - costs.start_share) == pytest.approx(2.0)


def test_costs_are_read_from_a_journal():
    events = [
        GenerationFormed(generation=1, members=(0, 1, 2, 3), cause="start", t=0.0),
        *(committed(n, float(n), 1, 4) for n in range(1, 11)),
        WorkerLost(worker=3, rank=3, generation=1, cause="died", t=10.4),
        GenerationFormed(generation=2, members=(0, 1, 2), cause="loss", t=10.4),
        Recovered(
            worker=0, generation=2, step=11, outcome="reduced again", rebuild_s=0.1, stall_s=0.3
        ),
        Recovered(
            worker=1, generation=2, step=11, outcome="reduced again", rebuild_s=0.1, stall_s=0.4
        ),
        *(committed(11 + n, 11.4 + 1.25 * n, 2, 3) for n in range(8)),
        GenerationFormed(generation=3, members=(0, 1, 2, 4), cause="join", t=20.0),
        WorkerJoined(worker=4, generation=3, step=18, copy_s=0.5, copy_bytes=1, t=20.6),
        *(committed(19 + n, 22.65 + n, 3, 4) for n in range(5)),
    ]
    costs = costs_of(events)
    assert costs.work_s + costs.fixed_s == pytest.approx(1.0)
    assert costs.step_s(3, 4) == pytest.approx(1.25)
    assert costs.recover_s == pytest.approx(0.4)
    assert costs.start_s == pytest.approx(9.6)
    assert costs.join_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "nowhere"], "nowhere"),
        (["--sizes", "0"], "min_workers <= workers"),
        (["--mtbf-days", "0"], "positive times"),
        (["--hours", "-1"], "positive times"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(arguments, said, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("simulate: ")
    assert said in told
    assert told.count("\n") == 1


def test_a_row_for_each_size(capsys):
    assert main(["--sizes", "2", "4", "--hours", "0.1"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "workers"
    assert [row.split()[0] for row in rows] == ["2", "4"]
