"""The tree of slices: one sum to the last bit, whoever holds what."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastix.comm.slice_tree import (
    Node,
    Operand,
    PartialSums,
    additions,
    evaluate,
    held_nodes,
    is_power_of_two,
)


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _tree_sum(values: dict[int, float], start: int, stop: int) -> float | None:
    """By the definition: a node is its left child plus its right, absent ones left out."""
    if stop - start == 1:
        return values.get(start)
    middle = (start + stop) // 2
    left, right = _tree_sum(values, start, middle), _tree_sum(values, middle, stop)
    if left is None or right is None:
        return right if left is None else left
    return left + right


_WIDE = st.builds(math.ldexp, st.floats(-1, 1), st.integers(-60, 60))


@st.composite
def _batches(draw):
    """Slices with values, some absent, shared out in any way, and in any order of computing."""
    slices = 1 << draw(st.integers(0, 6))
    present = draw(st.sets(st.integers(0, slices - 1), min_size=1))
    values = {n: draw(_WIDE) for n in sorted(present)}
    workers = draw(st.integers(1, 5))
    owner = {n: draw(st.integers(0, workers - 1)) for n in sorted(present)}
    return slices, values, workers, owner, draw(st.permutations(sorted(present)))


@given(_batches())
def test_any_assignment_gives_the_sum_of_the_definition_to_the_last_bit(batch):
    slices, values, workers, owner, order = batch
    sums = [PartialSums(values, slices, lambda a, b: a + b) for _ in range(workers)]
    for number in order:
        sums[owner[number]].insert(number, values[number])
    rows = [[value for _, value in worker.in_order()] for worker in sums]
    present = frozenset(values)
    by_rank = tuple(
        held_nodes(frozenset(n for n in owner if owner[n] == worker), present, slices)
        for worker in range(workers)
    )
    steps = additions(by_rank, present, slices)
    total = evaluate(steps, lambda at: rows[at.rank][at.row], lambda a, b, _f, _g: a + b)
    wanted = _tree_sum(values, 0, slices)
    assert wanted is not None
    assert _bits(total) == _bits(wanted)


@given(_batches())
def test_what_a_worker_ends_with_is_what_all_know_it_holds(batch):
    slices, values, workers, owner, order = batch
    for worker in range(workers):
        sums = PartialSums(values, slices, lambda a, b: a + b)
        mine = [number for number in order if owner[number] == worker]
        for number in mine:
            assert sums.insert(number, values[number]) in sums.sums
        nodes = held_nodes(frozenset(mine), frozenset(values), slices)
        assert tuple(node for node, _ in sums.in_order()) == nodes
        assert len(nodes) <= max(1, 2 * (slices.bit_length() - 1)) or not _contiguous(mine, values)


def _contiguous(mine, values):
    present = sorted(values)
    places = sorted(present.index(number) for number in mine)
    return places == list(range(places[0], places[0] + len(places))) if places else True


def test_left_comes_before_right_wherever_the_sum_is_taken():
    """Of numbers nobody can tell, but for the payload of what is not a number."""

    def pair(left, right):
        return f"({left}{right})"

    for held, order in ((range(8), (3, 0, 2, 1, 7, 6, 4, 5)), ((1, 2, 3, 6), (6, 3, 2, 1))):
        present = frozenset(range(8))
        others = [n for n in range(8) if n not in held]
        sides = [PartialSums(present, 8, pair) for _ in range(2)]
        for side, numbers in zip(sides, (order, others), strict=True):
            for number in numbers:
                side.insert(number, str(number))
        rows = [[value for _, value in side.in_order()] for side in sides]
        nodes = tuple(held_nodes(frozenset(h), present, 8) for h in (order, others))
        total = evaluate(
            additions(nodes, present, 8),
            lambda at, rows=rows: rows[at.rank][at.row],
            lambda a, b, *_: pair(a, b),
        )
        assert total == "(((01)(23))((45)(67)))"


def test_plain_addition_from_left_to_right_would_differ():
    values = {0: 1e16, 1: 1.0, 2: 1.0, 3: 1.0}
    assert sum(values.values()) != _tree_sum(values, 0, 4)


def test_a_slice_that_nobody_holds_is_an_error_and_no_smaller_sum():
    present = frozenset(range(4))
    left = held_nodes(frozenset([0, 1, 2]), present, 4)
    assert left == (Node(1, 0), Node(0, 2))
    with pytest.raises(ValueError, match="slice 3"):
        additions((left, ()), present, 4)


def test_sums_are_told_which_of_their_arguments_they_may_write_to():
    present = frozenset(range(4))
    steps = additions(((Node(0, 0), Node(0, 2)), (Node(0, 1), Node(0, 3))), present, 4)
    assert steps[0] == Operand(0, 0)
    free = []
    evaluate(steps, lambda _at: 0.0, lambda _a, _b, f, g: free.append((f, g)) or 0.0)
    assert free == [(False, False), (False, False), (True, True)]


def test_powers_of_two():
    assert [n for n in range(-1, 20) if is_power_of_two(n)] == [1, 2, 4, 8, 16]
