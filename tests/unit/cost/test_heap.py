"""The heap that estimates grow: blocks apart, holes found again, and none of a block's own size."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastix.cost.heap import Heap

MIB = 1 << 20


def test_a_hole_does_not_fit_a_block_of_its_own_size():
    heap = Heap()
    first = heap.take(MIB)
    heap.take(MIB)
    heap.give(first)
    heap.take(MIB)
    assert 3 * MIB <= heap.peak < 3 * MIB + 100


def test_a_smaller_block_goes_into_the_smallest_hole_that_fits():
    heap = Heap()
    holes = []
    for size in (5, 3, 4):
        holes.append(heap.take(size * MIB))
        heap.take(64)  # so that they stay apart
    before = heap.peak
    for hole in holes:
        heap.give(hole)
    assert heap.take(3 * MIB - 200).start == holes[1].start
    assert heap.take(3 * MIB).start == holes[2].start
    assert heap.peak == before


def test_holes_side_by_side_are_one():
    heap = Heap()
    first, second, third, _ = (heap.take(MIB) for _ in range(4))
    before = heap.peak
    heap.give(first)
    heap.give(third)
    heap.give(second)
    assert heap.take(3 * MIB - 96).start == first.start
    assert heap.peak == before


def test_large_blocks_go_back_whole():
    heap = Heap()
    for _ in range(5):
        heap.give(heap.take(40 * MIB))
    assert 40 * MIB <= heap.peak < 40 * MIB + 100


@given(st.data())
def test_blocks_never_overlap_and_what_is_given_back_is_there_again(data):
    heap, taken = Heap(), []
    for _ in range(data.draw(st.integers(1, 60))):
        if taken and data.draw(st.booleans()):
            heap.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
            continue
        size = data.draw(st.integers(0, 2000) | st.sampled_from([40 * MIB, 33 * MIB]))
        taken.append(heap.take(size))
        assert taken[-1].size >= size
        placed = sorted((b.start, b.start + b.size) for b in taken if b.start is not None)
        assert all(end <= start for (_, end), (start, _) in pairwise(placed))
        assert heap.peak >= sum(block.size for block in taken)
    while taken:
        heap.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
    assert heap.take(1000).start == 0
