"""Memory of buckets, and operations of groups that were left: these may still write to it."""

import threading
from contextlib import closing

import pytest
import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.gradients.buffer_bucket import BufferBucket
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.comm.network.process_group import Builder, Wiring

HOST, MEMBERS = "127.0.0.1", (0, 1)
SIZE = 5


def gradients():
    return GradientBucket([torch.nn.Parameter(torch.zeros(SIZE))])


def buffers():
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(SIZE))
    return BufferBucket([(module, "mean")], "sum")


def counter():
    return Bucket([torch.zeros(SIZE)], "sum", torch.float32)


@pytest.fixture
def groups():
    """The group of two members, as each of them has it; through sockets."""
    secret, through = draw_secret(), [threading.Event() for _ in MEMBERS]
    with closing(Rendezvous(HOST, secret)) as rendezvous:
        builders = [
            Builder(
                Wiring(
                    address=rendezvous.address,
                    interface=HOST,
                    backend="gloo",
                    me=me,
                    secret=secret,
                    generation=1,
                    members=MEMBERS,
                    shared=False,
                ),
                told.set,
            )
            for me, told in zip(MEMBERS, through, strict=True)
        ]
        assert all(told.wait(60) for told in through)
        yield [builder.result for builder in builders]
        for builder in builders:
            builder.result.abandon()


def finish(pending):
    over = threading.Event()
    pending.on_finish(over.set)
    assert over.wait(60)


@pytest.mark.parametrize("make", [gradients, buffers, counter])
def test_a_step_after_a_void_one_is_not_written_by_what_was_under_way_in_that(groups, make):
    """recovery="rollback": a step in which somebody is lost ends without its buckets' reductions.

    A member that was late begins them in the group that was left, when the step is done again.
    """
    mine, theirs = make(), make()
    for bucket in (mine, theirs):
        bucket.renew()
        bucket.begin()
        bucket.flat.fill_(1.0)
    mine.launch(groups[0], 1)
    under_way = mine.pending
    mine.begin()
    mine.flat.fill_(7.0)
    theirs.launch(groups[1], 1)
    finish(under_way)
    assert mine.flat.tolist() == [7.0] * len(mine.flat)


@pytest.mark.parametrize("make", [gradients, buffers, counter])
def test_memory_of_a_step_that_is_over_is_used_again(groups, make):
    mine, theirs = make(), make()
    for bucket, group in zip((mine, theirs), groups, strict=True):
        bucket.renew()
        bucket.begin()
        bucket.launch(group, 1)
    finish(mine.pending)
    assert mine.pending.settle() is None
    before = mine.flat
    mine.begin()
    assert mine.flat is before
