"""The fleet around the conductor does what a fleet does; counted, not timed."""

import json
import sys

import pytest

from benchmarks import long_campaign, long_run, many_models, many_workers, processes, size
from benchmarks.goals import STORE_ASKED
from elastix.store import Store
from elastix.testing.simulate import Costs

COSTS = Costs(work_s=9.0, fixed_s=1.0)


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Here it is no matter what a process holds that has imported nothing but what it needs."""
    monkeypatch.setattr(processes, "START", "forkserver")


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


def test_other_parts_and_sizes_stay_in_the_file(tmp_path, monkeypatch):
    out = tmp_path / "size.json"

    def measured(part, options, costs):
        sizes = (None,) if part == "hour" else map(str, options.workers)
        yield from ((size, {"cpu": 1}) for size in sizes)

    monkeypatch.setattr(size, "measured", measured)
    for given in ("workers --workers 16 64", "workers --workers 32", "hour"):
        monkeypatch.setattr(sys, "argv", ["size", "--out", str(out), "--parts", *given.split()])
        size.main()
    found = json.loads(out.read_text())
    assert list(found["workers"]) == ["16", "32", "64"]
    assert found["hour"] == {"cpu": 1}
    parts = json.loads((tmp_path / "about.json").read_text())["size"]["parts"]
    assert list(parts) == ["workers 16", "workers 64", "workers 32", "hour"]


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
    found = long_run.journal_of(3_000, tmp_path)
    assert found["bytes_per_step"] > 100
    assert set(found["peak_mib"]) == {"open", "result", "report"}
    assert all(found[f"{name}_s"] > 0 for name in found["peak_mib"])
    assert not list(tmp_path.iterdir())


def test_a_store_grows_from_size_to_size_and_answers_in_each(tmp_path):
    found = dict(many_models.store_of((300, 600), tmp_path, questions=20))
    assert found.keys() == {300, 600}
    for models, figures in found.items():
        assert figures["models"] == models
        assert figures["bytes_per_model"] > 500
        timed = [name for name in figures if name.endswith(("_us", "_s"))]
        assert {*STORE_ASKED, "lcs_us", "gc_s", "first_nearest_s"} <= set(timed)
        assert set(figures["peak_mib"]) == {"adopt", "use", "collect"}
    assert not list(tmp_path.iterdir())


def test_models_are_written_as_a_store_writes_them(tmp_path):
    family = many_models.Family()
    family.grow(tmp_path, 250)
    with Store(tmp_path) as store:
        assert store.verify() == []
        assert [entry.ref for entry in reversed(store.log())] == [r.hex() for r in family.refs]
        last = store.get(family.refs[-1].hex())
        assert last.parents == (store.log()[0].parents[0],)
        assert store.put(last) == family.refs[-1].hex()
        name, owner = next(iter(family.latest[-1].owners.items()))
        assert store.owner(family.refs[-1].hex(), name) == owner


def test_a_campaign_whose_driver_was_killed_goes_on_and_is_read_by_all(tmp_path):
    found = long_campaign.campaign_of(150, tmp_path)
    assert 100 <= found["resumed"] <= 150
    assert found["journal_bytes"] > 100
    assert set(found["peak_mib"]) == {"driver", "resume", "dataframe", "show", "report"}
    assert not list(tmp_path.iterdir())


def test_processes_that_are_killed_leave_an_exact_run_and_equal_replicas():
    found = many_workers.workers_of(4, 3.0, 1.0)
    assert found["kills"] >= 1
    assert found["losses"] >= 1
    assert (found["exact"], found["equal"]) == (True, True)
    assert 1 <= found["replicas"] <= 4
    assert found["least"] >= 1
    assert found["pss_mib"] > 1
