"""What a worker measures of itself, and how the controller gathers it."""

import torch

from elastix.event_records import from_record, to_record
from elastix.events import WorkersMeasured
from elastix.train.control.usage_events import Measures
from elastix.train.replica.usage import Parts, Usage


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_time_of_a_step_is_shared_out_among_its_parts():
    clock = Clock()
    parts = Parts(clock)
    places = ("boundary", "batch", "bucket", "filled", "round", "left", "boundary")
    for seconds, place in zip((2, 1, 3, 1, 0.5, 0.25, 1.25), places, strict=True):
        clock.now += seconds
        parts.phase(place, 0)
    clock.now += 10
    assert parts.seconds() == {
        "start": 2,
        "data": 1 + 10,
        "compute": 3 + 1 + 1.25,
        "reduce": 0.5,
        "wait": 0.25,
    }


def test_a_process_that_computes_uses_a_core_and_memory():
    usage = Usage(Parts(), torch.device("cpu"))
    sum(i * i for i in range(2_000_000))
    found = usage.measure()
    assert found["cpu"] > 0
    assert found["memory"] > 1e6
    assert "gpu" not in found
    assert 0 < found["start_s"] <= 1.0


def test_points_come_every_few_seconds_and_of_members_alone():
    measures = Measures()
    assert measures.due((0, 1), 1, 100.0) is None
    measures.hear(0, {"cpu": 1.0})
    measures.hear(7, {"cpu": 2.0})
    assert measures.due((0, 1), 1, 104.0) is None
    event = measures.due((0, 1), 5, 105.5)
    assert (event.step, event.workers) == (5, {0: {"cpu": 1.0}})
    assert measures.due((0, 1), 6, 111.0) is None  # nothing new was said
    assert from_record(to_record(event)) == event


def test_of_very_many_workers_there_is_a_point_less_often():
    measures, members = Measures(), range(1000)
    measures.due(members, 0, 0.0)
    measures.hear(3, {"cpu": 1.0})
    assert measures.due(members, 0, 40.0) is None
    assert isinstance(measures.due(members, 0, 51.0), WorkersMeasured)
