"""A benchmark prints no number if what it measures did not happen."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import data, executor, goodput, recovery
from benchmarks.exact import compiled
from benchmarks.goals import ROWS, value_of
from benchmarks.peers.workload import WORLD_SIZE
from elastix.events import WorkerJoined, WorkerLost


def test_a_kill_that_costs_more_than_one_worker_is_not_measured():
    recovery.check_survivors({"stall_s": [0.1] * (WORLD_SIZE - 1)})
    with pytest.raises(RuntimeError, match="3 workers went on"):
        recovery.check_survivors({"stall_s": [0.1] * (WORLD_SIZE - 2)})


@pytest.mark.parametrize(
    ("what", "key"),
    [
        ("steps lost", "audit_steps_lost"),
        ("samples dropped", "audit_dropped"),
        ("samples repeated", "audit_repeated"),
    ],
)
def test_one_bad_kill_of_ten_misses_the_goal(what, key):
    """The median of ten does not know of it."""
    quiet = {"steps_lost": 0.0, "samples_dropped": 0.0, "samples_repeated": 0.0}
    (row,) = (row for row in ROWS if (row.benchmark, row.what) == ("recovery", what))
    for found, reached in (({}, True), ({key: 0}, True), ({key: 2}, False)):
        results = {"elastix": {**quiet, **found}}
        assert row.reached(value_of(row, results), results) is reached


def logged(t, world, counted=True):
    return {"t": t, "world": world, "counted": counted}


def test_what_is_called_undisturbed_says_whether_the_group_was_whole():
    killer = SimpleNamespace(quiet=[(0.0, 10.0), (20.0, 30.0)])
    whole = [logged(t, WORLD_SIZE) for t in (5.0, 25.0, 26.0)]
    beside = [logged(15.0, 4), logged(6.0, 1, counted=False)]
    assert goodput.whole_share([*whole, *beside], killer) == 1.0
    assert goodput.whole_share([*whole, *beside, logged(27.0, 4)], killer) == 0.75
    assert goodput.whole_share(beside, killer) == 0.0


def test_pictures_that_differ_are_not_compared(monkeypatch):
    def read(mode, trials, raw, epochs):
        row = {"wall_s": 1.0, "cpu_s": 1.0, "decodes_a_sample": 1.0}
        return {**row, "digests": ["a" if mode != "shared" or trials < 4 else "b"]}

    monkeypatch.setattr(data, "jpegs", lambda count: [b""] * count)
    monkeypatch.setattr(data, "together", read)
    monkeypatch.setattr(data.ray_data, "runs", lambda *_: [read("", 1, [], 1)])
    with pytest.raises(RuntimeError, match="different batches"):
        data.ingest(2, 1, 1)
    monkeypatch.setattr(data, "together", lambda *_: read("", 1, [], 1))
    assert data.ingest(2, 1, 1)["trials_4"]["cpu_ratio"] == 1.0


def test_trials_that_fail_are_no_trials_a_second(monkeypatch):
    ended = [SimpleNamespace(finished_s=float(n), scored=True, traceback="") for n in range(5)]

    class Campaign:
        def __init__(self, *_, **__):
            pass

        def run(self):
            return ended

    monkeypatch.setattr(executor.elastix, "Campaign", Campaign)
    assert executor.elastix_pool(5) == 1.0
    ended[2].scored, ended[2].traceback = False, "no memory"
    with pytest.raises(RuntimeError, match="1 trials have no score: no memory"):
        executor.elastix_pool(5)


@pytest.mark.parametrize(("graphs", "joins"), [(0, 1), (2, 0)])
def test_no_recompilation_counts_where_nothing_was_compiled_or_nobody_came(
    monkeypatch, graphs, joins
):
    events = [WorkerLost(t=0.0, worker=1, rank=1, generation=1, cause="died")]
    came = WorkerJoined(t=0.0, worker=3, generation=2, step=5, copy_s=0.1, copy_bytes=8)
    events += [came] * joins

    def run(_train, _workers, *, config, **_):
        (Path(config["folder"]) / "0.jsonl").write_text(f"[1, 0, {graphs}]\n")
        return SimpleNamespace(events=events)

    monkeypatch.setattr(compiled, "run_local", run)
    with pytest.raises(RuntimeError, match="not 1 losses"):
        compiled.measure("convnet", 1)
