"""The timeline's files: what is written, what a killed writer leaves, what merging makes of it."""

import json

import pytest

from elastix.config import ProfileConfig
from elastix.errors import ConfigError
from elastix.events import GenerationFormed, RunEnded, StateStored, WorkerJoined, WorkerLost
from elastix.observe.timeline import Timeline, merge, read


def spans(entries, process=None):
    return [
        (e["name"], e["ts"], e["dur"])
        for e in entries
        if e["ph"] == "X" and process in (None, e["pid"])
    ]


def names(entries, kind):
    return {e["pid"]: e["args"]["name"] for e in entries if e["name"] == kind}


def write(directory, worker, finish=True):
    timeline = Timeline(directory / f"worker-{worker}.json", worker, f"worker {worker}")
    timeline.span("training", "forward", 10.0, 10.5, step=1)
    timeline.span("bucket 0", "reduce", 10.25, 10.75)
    timeline.instant("training", "here", 11.0)
    timeline.flush()
    if finish:
        timeline.close()
    return timeline


def test_spans_are_in_microseconds_on_named_tracks(tmp_path):
    write(tmp_path, 3)
    entries = read(tmp_path / "worker-3.json")
    assert spans(entries) == [("forward", 10.0e6, 0.5e6), ("reduce", 10.25e6, 0.5e6)]
    assert names(entries, "process_name") == {3: "worker 3"}
    tracks = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["bucket 0", "training"]
    by_name = {e["name"]: tracks[e["tid"]] for e in entries if e["ph"] in "Xi"}
    assert by_name == {"forward": "training", "reduce": "bucket 0", "here": "training"}


def test_a_killed_worker_leaves_a_trace_that_can_be_read(tmp_path):
    write(tmp_path, 0)
    path = tmp_path / "worker-0.json"
    path.write_text(path.read_text()[:-20])  # torn in the last line
    assert [name for name, *_ in spans(read(path))] == ["forward", "reduce"]


def test_merging_makes_one_json_file_of_all(tmp_path):
    for worker in (0, 1):
        write(tmp_path, worker)
    torch_trace = {
        "baseTimeNanoseconds": 10_000_000_000,
        "traceEvents": [
            {"ph": "X", "name": "aten::mm", "pid": 4711, "tid": 4711, "ts": 5.0, "dur": 1.0},
            {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "args": {"name": "python"}},
        ],
    }
    (tmp_path / "worker-1.torch.json").write_text(json.dumps(torch_trace))
    events = [
        GenerationFormed(t=9.0, generation=1, members=(0, 1), cause="start"),
        WorkerLost(t=10.4, worker=1, rank=1, generation=1, cause="died"),
        GenerationFormed(t=10.5, generation=2, members=(0,), cause="loss"),
        WorkerJoined(t=10.6, worker=2, generation=3, step=1, copy_s=0.25, copy_bytes=1),
        StateStored(t=10.7, ref="r", step=1, reason="final", stored_bytes=1, store_s=0.5),
        RunEnded(t=12.0, outcome="finished", step=3),
    ]
    merged = json.loads(merge(tmp_path, events).read_text())["traceEvents"]
    assert spans(merged, 0) == spans(merged, 1)[:2] == spans(read(tmp_path / "worker-0.json"))
    assert ("aten::mm", 10_000_005.0, 1.0) in spans(merged)
    assert set(names(merged, "process_name").values()) == {
        "run",
        "worker 0",
        "worker 1",
        "worker 1: torch.profiler",
    }
    told = {name: (ts, dur) for name, ts, dur in spans(merged)}
    assert told["generation 1"] == (10.0e6, 0.5e6)
    assert told["generation 2"] == (10.5e6, 0.5e6)
    assert told["copy of the State to worker 2"] == pytest.approx((10.35e6, 0.25e6))
    assert told["checkpoint after step 1"] == pytest.approx((10.2e6, 0.5e6))
    assert any(e["name"] == "worker 1 lost" for e in merged)
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "timeline.json"


def test_a_worker_that_was_killed_while_torch_wrote_its_trace_has_none_of_torch(tmp_path):
    write(tmp_path, 0)
    (tmp_path / "worker-0.torch.json").write_text('{"traceEvents": [{"ph": "X", ')
    merged = json.loads(merge(tmp_path).read_text())["traceEvents"]
    assert spans(merged) == spans(read(tmp_path / "worker-0.json"))


def test_only_what_happened_while_steps_were_recorded_is_told(tmp_path):
    write(tmp_path, 0)
    events = [
        GenerationFormed(t=1.0, generation=1, members=(0,), cause="start"),
        GenerationFormed(t=2.0, generation=2, members=(0,), cause="loss"),
        WorkerLost(t=500.0, worker=1, rank=1, generation=1, cause="died"),
        RunEnded(t=1000.0, outcome="finished", step=3),
    ]
    merged = json.loads(merge(tmp_path, events).read_text())["traceEvents"]
    told = {name: (ts, dur) for name, ts, dur in spans(merged)}
    assert "generation 1" not in told
    assert told["generation 2"] == (10.0e6, 1.0e6)  # cut to what the workers have
    assert not any("lost" in e["name"] for e in merged)


def test_merging_nothing(tmp_path):
    assert json.loads(merge(tmp_path / "timeline").read_text())["traceEvents"] == []


def test_which_steps():
    assert ProfileConfig(steps=5).window(100) == (100, 105)
    assert ProfileConfig(steps=(3, 4)).window(100) == (2, 4)
    assert ProfileConfig.from_dict({"steps": [3, 4]}) == ProfileConfig(steps=(3, 4))


@pytest.mark.parametrize("steps", [0, (0, 2), (3, 2), (1, 2, 3), 1.5, True])
def test_steps_that_cannot_be(steps):
    with pytest.raises(ConfigError, match="steps"):
        ProfileConfig(steps=steps)
