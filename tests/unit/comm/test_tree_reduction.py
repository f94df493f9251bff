"""Reductions over the tree of slices among members that send each other their sums."""

import random
import threading
from contextlib import closing

import pytest
import torch

from elastix.comm.network import tree_reduction
from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.comm.network.process_group import Alone, Builder, Wiring
from elastix.comm.network.tree_reduction import Root, Sharing
from tests.unit.comm.slice_sums import bits, shared_out, slice_values, tree_total

HOST = "127.0.0.1"
SECRET = draw_secret()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


@pytest.fixture
def groups():
    """Makes the sides of a group of so many members, all in this process."""
    with closing(Rendezvous(HOST, SECRET)) as rendezvous:
        made = []

        def make(size, generation):
            over = [threading.Event() for _ in range(size)]
            builders = [
                Builder(
                    Wiring(
                        address=rendezvous.address,
                        interface=HOST,
                        backend="gloo",
                        me=me,
                        secret=SECRET,
                        generation=generation,
                        members=tuple(range(size)),
                        shared=False,
                    ),
                    over[me].set,
                )
                for me in range(size)
            ]
            assert all(event.wait(60) for event in over)
            sides = [builder.result for builder in builders]
            made.extend(sides)
            return sides

        yield make
        for side in made:
            side.abandon()


def settle(pendings):
    for pending in pendings:
        over = threading.Event()
        pending.on_finish(over.set)
        assert over.wait(60)
        assert pending.settle() is None


def reduced(sides, held, rows, reduce, like, **scaled):
    into = [torch.empty_like(like) for _ in sides]
    sharing = Sharing(held, 8)
    under_way = [
        tree_reduction.begin(side, rows[rank], sharing, reduce, Root(into[rank], **scaled))
        for rank, side in enumerate(sides)
    ]
    settle([reduction.pending for reduction in under_way])
    sums = [reduction.go_on() for reduction in under_way]
    settle([pending for pending in sums if pending is not None])
    for reduction in under_way:
        reduction.finish()
    return into


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_sum_is_the_same_to_the_last_bit_for_any_sharing(groups, size):
    sides, draws = groups(size, 1), random.Random(size)
    for dtype in DTYPES:
        for length in (1, size + 1, 3_007):
            leaves = slice_values(8, length, dtype)
            for reduce in ("sum", "max"):
                wanted = tree_total(leaves, reduce)
                for _ in range(2):
                    held, rows = shared_out(leaves, size, draws, reduce)
                    for result in reduced(sides, held, rows, reduce, wanted):
                        assert torch.equal(bits(result), bits(wanted))


@pytest.mark.parametrize("size", [1, 3])
def test_the_root_is_scaled_but_for_what_stands_behind_its_values(groups, size):
    leaves, values = slice_values(8, 3_007, torch.float32), 1_900  # within the part of a member
    wanted = tree_total(leaves, "sum")
    wanted[:values].mul_(0.3)
    held, rows = shared_out(leaves, size, random.Random(0), "sum")
    scaled = {"scale": 0.3, "values": values}
    for result in reduced(groups(size, 1), held, rows, "sum", wanted, **scaled):
        assert torch.equal(bits(result), bits(wanted))


def test_alone_it_is_the_same_sum():
    leaves = slice_values(8, 1000, torch.float32)
    held, rows = shared_out(leaves, 1, random.Random(0), "sum")
    alone = Alone(Wiring(address=("", 0), interface="", backend="gloo", me=0, members=(0,)))
    (result,) = reduced([alone], held, rows, "sum", leaves[0])
    assert torch.equal(bits(result), bits(tree_total(leaves, "sum")))


def test_members_without_slices_are_given_the_sum(groups):
    leaves = slice_values(8, 1000, torch.float32)
    held, rows = shared_out(leaves, 1, random.Random(0), "sum")
    sides = groups(3, 1)
    nobody = frozenset()
    for result in reduced(sides, (nobody, *held, nobody), [[], *rows, []], "sum", leaves[0]):
        assert torch.equal(bits(result), bits(tree_total(leaves, "sum")))


def test_the_sum_in_another_order_would_be_another():
    leaves = slice_values(8, 1000, torch.float32)
    in_a_row = torch.stack(list(leaves.values())).cumsum(0)[-1]
    assert not torch.equal(in_a_row, tree_total(leaves, "sum"))
