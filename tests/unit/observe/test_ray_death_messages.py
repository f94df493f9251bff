"""Which of Ray's paragraphs on dead workers are printed. Its printer is a list here."""

import pytest
import ray._private.worker as ray_worker

from elastix.events import WorkerLost, WorkerStarted
from elastix.observe.ray_death_messages import Deaths, GroupDeaths


def paragraph(node, pid):
    text = (
        "A worker died or was killed while executing a task by an unexpected system error. Lease "
        f"ID: 00 Worker ID: 6e57 Node ID: {node} Worker IP address: 192.0.2.2 Worker port: 35191 "
        f"Worker PID: {pid} Worker exit type: SYSTEM_ERROR Worker exit detail: the OOM killer\n"
    )
    return {"lines": [text], "pid": "raylet", "is_err": False}


@pytest.fixture(autouse=True)
def nothing_is_late(monkeypatch):
    monkeypatch.setattr(Deaths, "_late", set())
    monkeypatch.setattr(Deaths, "_print", None)


@pytest.fixture
def printed(monkeypatch):
    found = []
    monkeypatch.setattr(
        ray_worker, "print_to_stdstream", lambda data, ignore_prefix: found.append(data)
    )
    return found


def says(data):
    ray_worker.print_to_stdstream(data, ignore_prefix=False)


def test_a_death_is_told_by_ray_unless_it_was_told_already(printed):
    before = ray_worker.print_to_stdstream
    with Deaths() as deaths, Deaths():
        for pid in (1, 2, 3):
            deaths.expect("a0", pid)
        deaths.told("a0", 1)
        says(paragraph("a0", 1))
        says(paragraph("a0", 2))
        says(paragraph("a0", 3))
        assert printed == []
        deaths.told("a0", 2)
        others = [
            paragraph("b1", 1),
            paragraph("a0", 4),
            {"lines": ["node a0 has no memory left"], "pid": "raylet", "is_err": False},
            {"lines": ["A worker died or was killed, I fear"], "pid": 1, "is_err": False},
        ]
        for data in others:
            says(data)
        assert printed == others
    assert printed == [*others, paragraph("a0", 3)], "nobody told of it"
    assert ray_worker.print_to_stdstream is before
    says(paragraph("a0", 1))
    assert printed[-1] == paragraph("a0", 1)


def test_what_ray_says_of_a_death_after_the_end_is_dropped_too_if_it_was_told(printed):
    before = ray_worker.print_to_stdstream
    with Deaths() as deaths:
        for pid in (1, 2):
            deaths.expect("a0", pid)
        deaths.told("a0", 1)
    says(paragraph("a0", 2))
    says(paragraph("a0", 1))
    assert printed == [paragraph("a0", 2)]
    assert ray_worker.print_to_stdstream is before
    says(paragraph("a0", 1))  # another process of the same number
    assert len(printed) == 2


def test_a_group_tells_of_its_workers_by_their_events():
    heard = []

    class Heard:
        def expect(self, node, pid):
            heard.append(("expect", node, pid))

        def told(self, node, pid):
            heard.append(("told", node, pid))

    group = GroupDeaths(Heard())
    group.hear(WorkerStarted(worker=3, pid=30, node="n0", device="cpu"))
    group.hear(WorkerLost(worker=9, rank=-1, generation=0, cause="died"))  # it never came up
    group.hear(WorkerLost(worker=3, rank=0, generation=1, cause="died"))
    assert heard == [("expect", "n0", 30), ("told", "n0", 30)]


def test_of_a_worker_that_is_several_processes_any_may_have_died():
    heard = []

    class Heard:
        def expect(self, node, pid):
            heard.append(("expect", node, pid))

        def told(self, node, pid):
            heard.append(("told", node, pid))

    group = GroupDeaths(Heard())
    group.hear(WorkerStarted(worker=3, pid=30, node="n0", device="cpu", mates=(("n1", 31),)))
    group.hear(WorkerLost(worker=3, rank=0, generation=1, cause="died"))
    assert heard == [
        ("expect", "n0", 30),
        ("expect", "n1", 31),
        ("told", "n0", 30),
        ("told", "n1", 31),
    ]
