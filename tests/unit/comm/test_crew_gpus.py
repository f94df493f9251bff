"""How what mates compute together by NCCL is ended, with groups in its place that need no GPU."""

import threading
from types import SimpleNamespace

import pytest
import torch

from elastix.comm.network import crew_gpus, crew_world
from elastix.comm.network.crew_gpus import MatesGpus
from elastix.comm.network.crew_world import Inside

LOST = "a process of this worker is lost"


class Nccl:
    """Of one group. Its abort waits for the device, and so for all other groups' kernels."""

    every: list["Nccl"]
    gpus: MatesGpus

    def __init__(self):
        self.told, self.may_end = threading.Event(), threading.Event()
        self.returned = self.flagged = False

    def abort(self):
        self.flagged = self.gpus.ended
        self.told.set()
        for other in self.every:
            assert other.told.wait(60)
        assert self.may_end.wait(60)
        self.returned = True


class World:
    """torch's; one of its groups has no GPUs."""

    def __init__(self, groups):
        none = SimpleNamespace(_get_backend=self._refuse)
        found = [SimpleNamespace(_get_backend=lambda _, one=one: one) for one in groups]
        self.pg_map = dict.fromkeys(map(_Hashed, [none, *found]))

    def _refuse(self, _device):
        raise RuntimeError("no backend for cuda")


class _Hashed:
    def __init__(self, group):
        self._get_backend = group._get_backend


class Event:
    """What the device comes to."""

    def __init__(self):
        self.asked, self.through = threading.Event(), threading.Event()

    def query(self):
        through = self.through.is_set()
        self.asked.set()
        return through


@pytest.fixture
def gpus(monkeypatch):
    groups = [Nccl(), Nccl(), Nccl()]
    monkeypatch.setattr(crew_gpus.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(crew_gpus.dist.distributed_c10d, "_world", World(groups))
    gpus = MatesGpus(torch.device("cpu"))
    Nccl.every, Nccl.gpus = groups, gpus
    yield gpus
    for group in groups:
        group.may_end.set()
    gpus.close()


@pytest.fixture
def event(monkeypatch):
    event = Event()
    monkeypatch.setattr(crew_gpus, "_mark", lambda _device: event)
    return event


def test_all_groups_are_ended_at_once_and_nothing_counts_from_before_that_on(gpus):
    gpus.end()
    assert gpus.ended
    for group in Nccl.every:
        assert group.told.wait(60)
        assert group.flagged
        assert not group.returned
    gpus.end()
    ending = [thread for thread in threading.enumerate() if thread.name == "abort-mates"]
    assert len(ending) == len(Nccl.every)
    with pytest.raises(RuntimeError, match=LOST):
        gpus.check()


def test_whoever_uses_the_memory_again_waits_until_the_aborts_have_returned(gpus):
    closing = threading.Thread(target=gpus.close)
    closing.start()
    first, *rest = Nccl.every
    for group in rest:
        group.may_end.set()
    assert first.told.wait(60)
    assert closing.is_alive()
    first.may_end.set()
    closing.join(60)
    assert not closing.is_alive()
    assert all(group.returned for group in Nccl.every)


def test_whoever_comes_while_they_are_told_waits_for_them_too(gpus, monkeypatch):
    """A line breaks in one thread while the training thread comes out by itself."""
    start, told, go_on = threading.Thread.start, threading.Event(), threading.Event()

    def slow(thread):
        if thread.name == "abort-mates":
            told.set()
            assert go_on.wait(60)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    ending, closing = (threading.Thread(target=one) for one in (gpus.end, gpus.close))
    ending.start()
    assert told.wait(60)
    assert gpus.ended
    closing.start()
    for group in Nccl.every:
        group.may_end.set()
    go_on.set()
    for thread in (ending, closing):
        thread.join(60)
        assert not thread.is_alive()
    assert all(group.returned for group in Nccl.every)


def test_a_device_that_has_failed_ends_nothing_else(gpus, monkeypatch):
    def refuse(_self):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Nccl, "abort", refuse)
    gpus.close()
    assert gpus.ended


def checking(gpus):
    """What a check says that waits, and the thread that it is in."""
    said = []

    def check():
        try:
            gpus.check(wait=True)
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("sound")

    thread = threading.Thread(target=check)
    thread.start()
    return said, thread


def test_what_the_device_is_through_with_is_sound_if_nothing_was_ended_before(gpus, event):
    gpus.check()
    said, thread = checking(gpus)
    assert event.asked.wait(60)
    assert not said
    event.through.set()
    thread.join(60)
    assert said == ["sound"]


def test_what_it_is_through_with_after_that_is_not(gpus, event):
    said, thread = checking(gpus)
    assert event.asked.wait(60)
    gpus.ended = True  # as `end` has it, before a kernel can hear of it
    event.through.set()
    thread.join(60)
    assert said[0].startswith(LOST)


def test_a_wait_for_the_device_ends_when_operations_are_ended(gpus, event):
    """Kernels of other workers may hold up the device."""
    said, thread = checking(gpus)
    assert event.asked.wait(60)
    gpus.end()
    thread.join(60)
    assert said[0].startswith(LOST)


def test_each_group_is_connected_and_pairs_where_they_send(gpus, event, monkeypatch):
    done = []
    event.through.set()
    monkeypatch.setattr(
        crew_gpus.dist, "all_reduce", lambda tiny, group: done.append(("all", group, len(tiny)))
    )
    monkeypatch.setattr(
        crew_gpus.dist,
        "all_to_all_single",
        lambda _into, _tiny, *sizes, group: done.append(("pairs", group, sizes)),
    )
    shards, stages = _Sized(3), _Sized(2)
    gpus.connect(iter([shards, stages]), [stages])
    assert done == [("all", shards, 3), ("all", stages, 2), ("pairs", stages, ([1, 1], [1, 1]))]
    gpus.ended = True
    with pytest.raises(RuntimeError, match=LOST):
        gpus.connect([shards])


class _Sized:
    def __init__(self, size):
        self.size = lambda: size


def test_a_world_is_cut_on_gpus_before_its_sockets_are(gpus, monkeypatch):
    """What gloo then raises may be heard before anything else; it must not count by then."""
    inside = Inside.__new__(Inside)
    inside._lock, inside._over = threading.Lock(), False
    inside._mine = inside._theirs = set()
    inside._gpus = gpus
    inside._meeting = SimpleNamespace(close=lambda: None)
    found = []
    monkeypatch.setattr(crew_world.sockets, "shut_down", lambda *_: found.append(gpus.ended))
    inside.cut()
    assert found == [True]
    assert inside.silent
    with pytest.raises(RuntimeError, match=LOST):
        inside.check()
    assert inside.carried() is None
