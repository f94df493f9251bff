"""The fleet around the conductor does what a fleet does; counted, not timed."""

import json

from benchmarks import long_run, size
from elastix.testing.simulate import Costs

COSTS = Costs(work_s=9.0, fixed_s=1.0)


def test_half_an_hour_of_a_hundred_workers_in_which_one_is_lost_each_minute():
    found, fleet = size.day(100, 0.5, 60.0, COSTS)
    heard = found["events"]
    assert found["losses"] == 30
    assert heard["loss"] == 30
    assert found["generations"] == 1 + 30 + 30 - (found["in_the_group_at_the_end"] < 100)
    assert heard["CaughtUp"] == found["generations"] - 31
    # All survivors suspect somebody, and all members confirm each generation but the first of it.
    assert heard["Suspect"] == 30 * 99
    assert heard["Entered"] == 100 + 30 * 99 + heard["CaughtUp"] * 100
    assert found["steps"] == 180
    assert len(fleet.conductor.holders) >= 99


def test_what_one_event_costs_is_taken_for_each_kind():
    found = size.events(10, 1, COSTS)
    assert found.keys() == {
        "heartbeat_us",
        "tick_us",
        "step_us",
        "loss_us",
        "loss_us_per_message",
        "join_us_per_message",
    }
    assert all(cost > 0 for cost in found.values())


def test_what_things_take_is_what_was_measured(tmp_path):
    results = tmp_path / "recovery.json"
    found = {"step_s": 0.2, "stall_s": {"median": 0.1, "max": 0.4}, "contributes_s": 6.0}
    results.write_text(json.dumps({"elastix": found}))
    costs = size.costs_in(results)
    assert (costs.step_s(5, 5), costs.recovery_s(5), costs.start_s) == (0.2, 0.1, 6.0)


def test_the_journal_of_a_long_run_is_read_by_all_who_read_one(tmp_path):
    found = long_run.journal_of(20_000, tmp_path)
    assert found["bytes_per_step"] > 100
    assert set(found["peak_mib"]) == {"open", "result", "report"}
    assert all(found[f"{name}_s"] > 0 for name in found["peak_mib"])
    assert not list(tmp_path.iterdir())
