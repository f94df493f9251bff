"""What is done about operations of NCCL, with one in its place that needs no GPU.

It does what NCCL was seen to do: an operation that was aborted looks as if it had ended well.
"""

import gc
import threading
import weakref
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastix.comm.driver import GroupDriver
from elastix.comm.network import nccl
from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.comm.network.nccl import GpuGroup
from elastix.comm.network.process_group import Builder, Group, Wiring
from elastix.comm.protocol import wants
from elastix.comm.protocol.membership import Membership
from elastix.comm.thread_safe_inbox import ThreadSafeInbox

WIRING = Wiring(address=("", 0), interface="", backend="nccl", me=0, generation=1, members=(0, 1))


class Future(threading.Event):
    def done(self):
        return self.is_set()


class Work:
    """Of an operation. `ended` when its kernel is through, for whatever reason."""

    def __init__(self):
        self.ended = threading.Event()
        self.result = Future()  # done if NCCL reports an error
        self.fails: BaseException | None = None
        # What NCCL reports when it is asked, once its kernel has ended.
        self.reports: list[str] = []
        self.asked = threading.Event()  # since its kernel has ended
        self.answer = threading.Event()
        self.answer.set()

    def is_completed(self):
        ended = self.ended.is_set()
        if ended and self.reports and self.reports.pop(0):
            self.result.set()
        if ended:
            self.asked.set()
        assert self.answer.wait(60)
        if self.fails is not None:
            raise self.fails
        return ended

    def get_future_result(self):
        return self.result

    def synchronize(self):
        assert self.ended.is_set()

    def wait(self):
        raise AssertionError("it aborts the group if there is an error by now, in this thread")


class Nccl:
    """torch's process group; aborting it ends the kernels, when it is let."""

    def __init__(self, *_):
        self.works = []
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.aborted = threading.Event()
        self.aborts = 0

    def size(self):
        return 2

    def refuse(self, _tensors):
        raise RuntimeError("NCCL reports a lost peer, when the kernel was launched")

    def allreduce(self, _tensors):
        self.works.append(Work())
        return self.works[-1]

    def abort(self):
        self.aborts += 1
        assert self.may_abort.wait(60)
        for work in self.works:
            work.ended.set()
        self.aborted.set()


@pytest.fixture
def group(monkeypatch):
    options = SimpleNamespace(config=SimpleNamespace())
    made = type("ProcessGroupNCCL", (Nccl,), {"Options": lambda: options})
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", made, raising=False)
    group = GpuGroup(None, 0, 2, torch.device("cuda", 0))
    yield group
    group._nccl.may_abort.set()
    group.abort()


def begin(group):
    """An operation, its work, and what is set when it is said to be over."""
    pending, over = group.start(lambda pg: pg.allreduce([])), threading.Event()
    pending.on_finish(over.set)
    return pending, group._nccl.works[-1], over


def watching_thread():
    """That of the newest group."""
    return [one for one in threading.enumerate() if one.name.startswith("nccl-")][-1]


def test_one_that_ends_is_over_and_well(group):
    pending, work, over = begin(group)
    assert not pending.finished()
    work.ended.set()
    assert over.wait(60)
    assert pending.finished()
    assert pending.settle() is None
    assert pending.let_go()
    told = threading.Event()
    pending.on_finish(told.set)  # after its end
    assert told.is_set()


def test_one_that_was_aborted_has_failed_though_it_looks_as_if_it_had_ended_well(group):
    pending, _work, over = begin(group)
    group._nccl.may_abort.clear()
    group.give_up()
    ending = threading.Thread(target=group.abort)
    ending.start()
    assert not pending.let_go()  # kernels may still write
    group._nccl.may_abort.set()
    ending.join(60)
    assert over.wait(60)
    assert "given up" in str(pending.settle())
    assert pending.let_go()


def test_an_end_that_is_seen_while_the_group_is_given_up_does_not_count(group):
    """NCCL may have ended it because of that."""
    pending, work, over = begin(group)
    work.answer.clear()
    work.ended.set()
    assert work.asked.wait(60)  # and it has no answer yet
    group.give_up()
    work.answer.set()
    group.abort()
    assert over.wait(60)
    assert "given up" in str(pending.settle())


def test_of_a_lost_peer_is_told_before_anything_is_aborted(group):
    pending, work, over = begin(group)
    work.result.set()
    work.ended.set()  # torch says so, and the kernel still runs
    assert over.wait(60)
    assert "lost" in str(pending.settle())
    assert not group._nccl.aborted.is_set()
    assert pending.writes  # so its memory is not used again
    assert not pending.let_go()
    group.abort()
    assert pending.let_go()


def test_a_device_that_fails_is_the_end_of_this_worker_alone(group):
    pending, work, over = begin(group)
    work.fails = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    assert over.wait(60)
    with pytest.raises(torch.AcceleratorError, match="ECC"):
        pending.settle()

    def refuse(_group):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(torch.AcceleratorError, match="launch"):
        group.start(refuse)


def test_what_cannot_be_started_has_failed(group):
    def refuse(_group):
        raise RuntimeError("NCCL communicator was aborted")

    pending = group.start(refuse)
    assert pending.finished()
    assert "aborted" in str(pending.settle())
    group.give_up()
    assert "given up" in str(group.start(lambda pg: pg.allreduce([])).settle())


def test_many_end_in_any_order(group):
    begun = [begin(group) for _ in range(50)]
    for _, work, _ in reversed(begun[10:]):
        work.ended.set()
    for pending, _, over in begun[10:]:
        assert over.wait(60)
        assert pending.settle() is None
    group.abort()
    for pending, _, over in begun[:10]:
        assert over.wait(60)
        assert pending.settle() is not None


def test_an_error_that_is_reported_between_the_last_look_and_the_end_counts(group):
    pending, work, over = begin(group)
    work.reports = ["", "lost"]
    work.ended.set()
    assert over.wait(60)
    assert "lost" in str(pending.settle())


def test_memory_of_one_that_failed_when_it_was_begun_is_kept_until_the_abort(group):
    """Its kernel may have been launched before the error was seen."""
    tensor = torch.zeros(3)
    kept = weakref.ref(tensor)
    operations = Group(WIRING, None, gpus=group)
    pending = operations._gpus.start(lambda pg, tensor=tensor: pg.refuse([tensor]))
    del tensor
    assert pending.finished()
    assert "lost" in str(pending.settle())
    assert pending.writes
    assert not pending.let_go()
    assert kept() is not None
    group.abort()
    assert pending.let_go()


def test_one_that_is_begun_while_the_group_is_aborted_ends(group):
    def launch(pg):
        work = pg.allreduce([])
        group.abort()
        watching.join(60)
        return work

    watching = watching_thread()
    over = threading.Event()
    pending = group.start(launch)
    pending.on_finish(over.set)
    assert over.wait(60)
    assert "given up" in str(pending.settle())


@pytest.mark.parametrize("error", [NotImplementedError("no"), ValueError("no"), KeyError("no")])
def test_whatever_goes_wrong_in_looking_others_are_still_looked_at(group, error):
    failing, work, over = begin(group)
    work.fails = error
    assert over.wait(60)
    assert failing.settle() is error
    assert failing.writes
    pending, work, over = begin(group)
    work.ended.set()
    assert over.wait(60)
    assert pending.settle() is None


def test_a_callback_that_raises_keeps_none_from_hearing(group, caplog):
    pending, work, over = begin(group)
    pending._callbacks.insert(0, lambda: 1 / 0)
    work.ended.set()
    assert over.wait(60)
    assert "ZeroDivisionError" in caplog.text
    _, work, over = begin(group)
    work.ended.set()
    assert over.wait(60)


def test_memory_is_let_go_with_its_operation(group):
    def of(work):
        work.tensor = torch.zeros(3)
        return weakref.ref(work.tensor)

    gc.disable()  # as it may not come for long
    try:
        ended, work, over = begin(group)
        aborted, other, gone = begin(group)
        kept = [of(work), of(other)]
        work.ended.set()
        assert over.wait(60)
        watching = watching_thread()
        group._nccl.works.clear()
        group.abort()
        assert gone.wait(60)
        watching.join(60)
        del ended, work, aborted, other
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_if_it_cannot_be_connected_nothing_is_left(group, monkeypatch):
    """No memory on the device, say."""

    def refuse(_device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nccl.torch.cuda, "set_device", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        group.connect(lambda: False)
    assert group.closed


def test_it_is_aborted_once_and_whoever_asks_for_that_waits_for_its_end(group):
    pending, _, over = begin(group)
    group._nccl.may_abort.clear()
    asking = [threading.Thread(target=group.abort) for _ in range(3)]
    for one in asking:
        one.start()
    assert not group.closed
    group._nccl.may_abort.set()
    for one in asking:
        one.join(60)
        assert not one.is_alive()
    assert group._nccl.aborts == 1
    assert over.wait(60)
    assert pending.settle() is not None


def test_what_the_training_thread_waits_for_in_cuda_ends_when_the_group_has_changed(group):
    """It hears nothing then; whoever hears the news for it calls `unblock`."""
    inbox = ThreadSafeInbox()
    driver = GroupDriver(SimpleNamespace(), inbox, WIRING)
    driver._protocol.group = Group(WIRING, None, gpus=group)
    pending, _, over = begin(group)
    driver.unblock()  # there is no newer one
    assert not group.given_up
    inbox.publish(Membership(2, (0,), urgent=True))
    driver.unblock()
    assert group.given_up  # at once, so that no end counts from now on
    assert over.wait(60)
    assert "given up" in str(pending.settle())


@pytest.fixture
def connecting(monkeypatch):
    """A peer and this worker connect their GPUs, and the kernels never end: somebody has died.

    The driver of this worker, the peer's wiring, and what counts the kernels.
    """
    kernels = threading.Semaphore(0)

    def allreduce(self, tensors):
        work = Nccl.allreduce(self, tensors)
        kernels.release()
        return work

    options = SimpleNamespace(config=SimpleNamespace())
    fields = {"Options": lambda: options, "allreduce": allreduce}
    made = type("ProcessGroupNCCL", (Nccl,), fields)
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setattr(nccl.torch.cuda, "set_device", lambda _device: None)
    secret = draw_secret()
    with closing(Rendezvous("127.0.0.1", secret)) as there:
        own = replace(WIRING, address=there.address, interface="127.0.0.1", secret=secret)
        peer = Builder(replace(own, me=1), lambda: None)
        participant = SimpleNamespace(phase=lambda _name, _detail: None)
        yield GroupDriver(participant, ThreadSafeInbox(), own), kernels
        peer.abandon()
        for thread in threading.enumerate():
            if thread.name == "build-1":
                thread.join(60)


def test_a_group_that_is_being_connected_ends_when_it_is_history(connecting):
    """Its kernel would hold up the training thread, in CUDA, which alone takes that group."""
    driver, kernels = connecting
    driver._inbox.publish(Membership(1, (0, 1), urgent=False))
    assert kernels.acquire(timeout=60)
    assert kernels.acquire(timeout=60)
    builder = driver._next_group.look(1)
    driver.unblock()  # there is no newer one
    assert builder.result is None
    driver._inbox.publish(Membership(2, (0,), urgent=True))
    driver.unblock()
    driver._inbox.wait(lambda: builder.result is not None, 60)
    assert "abandoned" in str(builder.failed)


@pytest.mark.parametrize("late", [False, True])
def test_so_does_one_for_which_this_worker_prepares_meanwhile(connecting, late):
    driver, kernels = connecting
    over = threading.Event()

    def prepare(_generation):
        """Waits for the device."""
        assert kernels.acquire(timeout=60)
        assert kernels.acquire(timeout=60)
        if not late:
            driver._inbox.publish(Membership(2, (0,), urgent=True))
            driver.unblock()
        driver._inbox.wait(lambda: driver._builder.result is not None, 60)
        over.set()

    if late:  # it was heard before there was anything to end
        driver._inbox.publish(Membership(2, (0,), urgent=True))
        driver.unblock()
    with pytest.raises(wants.Failed, match="abandoned"):
        driver._build(wants.Build(1, (0, 1), prepare=SimpleNamespace(prepare=prepare)))
    assert over.is_set()


def test_news_that_came_while_a_group_was_built_ends_what_it_launches(group):
    driver = GroupDriver(SimpleNamespace(), ThreadSafeInbox(), WIRING)
    driver._inbox.publish(Membership(2, (0,), urgent=True))
    driver.unblock()
    used = driver._protocol.group = Group(WIRING, None, gpus=group)
    operation = SimpleNamespace(launch=lambda _: [group.start(lambda pg: pg.allreduce([]))])
    with pytest.raises(wants.Failed, match="given up"):
        driver._reduce_buckets(wants.ReduceBuckets(used, operation))


def test_news_is_heard_also_if_a_later_proposal_came_before_it(group):
    driver = GroupDriver(SimpleNamespace(), ThreadSafeInbox(), WIRING)
    driver._inbox.on_urgent(driver.unblock)
    driver._protocol.group = Group(WIRING, None, gpus=group)
    driver._inbox.publish(Membership(3, (0,), urgent=False))
    assert not group.given_up
    driver._inbox.publish(Membership(2, (0,), urgent=True))
    assert group.given_up


def test_a_worker_that_is_broken_gives_up_its_groups(group):
    """What its mates did not send flows into them when that is ended."""
    driver = GroupDriver(SimpleNamespace(), ThreadSafeInbox(), WIRING)
    driver._protocol.group = Group(WIRING, None, gpus=group)
    driver.break_up()
    assert group.given_up
    assert driver.broken


def test_what_may_be_wrong_yet_goes_to_nobody(group):
    """Not while backward runs, either: those who have all of a step take it without asking."""
    driver = GroupDriver(SimpleNamespace(), ThreadSafeInbox(), WIRING)
    used = driver._protocol.group = Group(WIRING, None, gpus=group)
    assert driver.usable
    asked = []

    def check(wait):
        asked.append(wait)
        raise RuntimeError("a mate is lost")

    driver.doubt_within(check)
    assert not driver.usable
    operation = SimpleNamespace(launch=lambda _: pytest.fail("launched"), payload=lambda _: None)
    for ask in (
        lambda: driver._reduce_buckets(wants.ReduceBuckets(used, operation)),
        lambda: driver._payload(wants.Payload(used, operation)),
        driver.boundary,
    ):
        with pytest.raises(RuntimeError, match="a mate is lost"):
            ask()
    assert asked == [True] * 3
    with pytest.raises(RuntimeError, match="a mate is lost"):
        driver.run(operation)
    assert asked[3:] == [False]
