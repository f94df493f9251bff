"""What a user switches on for a run: a timeline, loggers."""

import itertools
import json

import pytest

import elastix
from elastix.events import Recovered, RunEnded, RunStarted, StepCommitted
from elastix.testing.chaos import Kill, with_kills
from elastix.train.replica.profiler import FOLDER
from tests import trainables
from tests.notes import Notes

pytestmark = pytest.mark.timeout(300)


class Broken:
    def log(self, event):
        raise OSError("no route to host")

    def close(self):
        raise AssertionError("never called")


def fit(tmp_path, train=trainables.train, workers=(2, 3), **options):
    config = {"samples": 240, "batch_size": 30, "epochs": 2, "model": "wide"}
    return elastix.ElasticTrainer(
        train,
        config=config,
        scaling=elastix.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
        quiet=True,
        **options,
    ).fit()


def spans(entries, process, track=None):
    """Name, start and stop in microseconds, by their start."""
    tracks = {
        e["tid"]: e["args"]["name"]
        for e in entries
        if e["name"] == "thread_name" and e["pid"] == process
    }
    found = [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in entries
        if e["ph"] == "X" and e["pid"] == process and track in (None, tracks[e["tid"]])
    ]
    return sorted(found, key=lambda span: span[1])


def test_a_timeline_shows_every_part_of_a_step_and_a_recovery(cluster, tmp_path):
    train = with_kills(trainables.train, [Kill(worker=1, phase="bucket", detail=1, step=4)])
    failure = elastix.FailureConfig(replace=False)
    profile = elastix.ProfileConfig(steps=(3, 8))
    result = fit(tmp_path, train, profile=profile, failure=failure)
    path = result.directory / FOLDER / "timeline.json"
    merged = json.loads(path.read_text())["traceEvents"]
    for worker in (0, 2):
        steps = [name for name, *_ in spans(merged, worker, "steps")]
        assert steps == [f"step {n}" for n in range(3, 9)]
        done = spans(merged, worker, "training")
        assert all(a[2] <= b[1] + 1 for a, b in itertools.pairwise(done))
        (_, begin, end) = spans(merged, worker, "steps")[0]
        undisturbed = [name for name, start, _ in done if begin <= start < end]
        order = [
            "data",
            "forward",
            "loss",
            "backward",
            "wait for buckets",
            "commit round",
            "optimizer",
        ]
        assert [name for name in undisturbed if name in order] == order
        names = {name for name, *_ in done}
        assert {"build group", "meet"} <= names
        for bucket in range(3):
            reductions = spans(merged, worker, f"bucket {bucket}")
            assert len(reductions) >= 6  # one more where it was done again
            backward = next(s for s in done if s[0] == "backward")
            assert reductions[0][1] >= backward[1]
    (recovery,) = spans(merged, 1_000_000, "recovery of worker 0")
    (told,) = (e for e in result.events if isinstance(e, Recovered) and e.worker == 0)
    assert told.step in (4, 5)  # it may not have begun the step in which the other died
    assert recovery[0].startswith(f"step {told.step} ")
    assert any(e["name"] == "worker 1 lost" for e in merged)
    assert spans(merged, 1, "training")  # what the killed worker had until then
    assert result.audit.exact


def test_torchs_profiler_stands_beside_it(cluster, tmp_path):
    result = fit(tmp_path, workers=2, profile=elastix.ProfileConfig(steps=2, torch=True))
    merged = json.loads((result.directory / FOLDER / "timeline.json").read_text())["traceEvents"]
    for worker in (0, 1):
        operators = [e for e in merged if e["pid"] == 2_000_000 + worker and e["ph"] == "X"]
        assert any(e["name"] == "aten::mm" for e in operators)
        begin, end = spans(merged, worker, "steps")[0][1], spans(merged, worker, "steps")[-1][2]
        inside = [e for e in operators if e["name"] == "aten::mm" and begin <= e["ts"] <= end]
        assert inside  # the two clocks are one


def test_loggers_hear_all_and_cannot_end_a_run(cluster, tmp_path, monkeypatch, caplog):
    notes = Notes()
    board = elastix.TensorBoard(tmp_path / "board")
    result = fit(tmp_path, workers=2, loggers=[Broken(), notes, board])
    assert notes.closed
    assert isinstance(notes.seen[0], RunStarted)
    assert isinstance(notes.seen[-1], RunEnded)
    steps = [e.step for e in notes.seen if isinstance(e, StepCommitted)]
    assert steps == list(range(1, result.audit.steps + 1))
    assert list((tmp_path / "board" / "test").glob("events.out.tfevents.*"))
    assert "logger=Broken raised OSError('no route to host')" in caplog.text


def test_loggers_are_closed_when_a_run_fails(cluster, tmp_path):
    def fails(ctx):
        raise ValueError("a bug of the user's")

    notes = Notes()
    with pytest.raises(elastix.WorkerFailed):
        fit(tmp_path, fails, workers=2, loggers=[notes])
    assert notes.closed
    assert notes.seen[-1].outcome == "failed"
