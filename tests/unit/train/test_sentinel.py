"""Which bytes of a State are hashed when: all of them in turn, the same on all, and few enough."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastix.train.replica.sentinel import BYTES_PER_US, SHARE, SMALL, TENSOR_COST, Piece, Rotation

ROOT = Path(__file__).parents[3]
LARGE = [40 << 20, 3, 0, 7 << 20, 1 << 10]


def passed(rotation, sizes, steps, step_us):
    """What was hashed in each of these steps."""
    found = []
    for _ in range(steps):
        found.append(rotation.pieces(sizes))
        rotation.committed(sizes, step_us)
    return found


def cost(sizes):
    """Of a whole pass."""
    return sum(sizes) + TENSOR_COST * len(sizes)


def nbytes(pieces):
    return sum(piece.stop - piece.start for piece in pieces)


def test_a_small_state_is_hashed_whole_in_every_step():
    sizes = [1 << 10, 0, 64, 100 << 10]
    for pieces in passed(Rotation(), sizes, 5, 100):
        assert [(p.place, p.start, p.stop) for p in pieces] == [
            (place, 0, size) for place, size in enumerate(sizes)
        ]


@given(
    sizes=st.lists(st.integers(0, 3 << 20), min_size=1, max_size=12).filter(
        lambda sizes: sum(sizes) > SMALL
    ),
    step_us=st.integers(100, 3_000_000),
)
def test_every_byte_has_its_turn_once_in_a_pass(sizes, step_us):
    rotation, seen = Rotation(), [[] for _ in sizes]
    whole = False
    while True:
        pieces = rotation.pieces(sizes)
        if nbytes(pieces) == sum(sizes):
            whole = True  # steps have become long enough for all of it
            break
        for piece in pieces:
            seen[piece.place].append((piece.start, piece.stop))
        rotation.committed(sizes, step_us)
        if rotation.state_dict()["at"] in (0, cost(sizes)):
            break
    for size, spans in zip(sizes, seen, strict=True):
        stops = [0, *(stop for _, stop in spans)]
        assert [start for start, _ in spans] == stops[:-1]  # each byte once, without a gap
        assert whole or stops[-1] == size


def test_hashing_takes_its_share_of_a_step_and_no_more():
    rotation = Rotation()
    sizes = [3, 8 << 30, 1 << 10]  # more than a minute of it
    found = passed(rotation, sizes, 40, 200_000)
    assert all(nbytes(pieces) <= max(SMALL, 200_000 * SHARE * BYTES_PER_US) for pieces in found)
    assert nbytes(found[12]) >= 200_000 * SHARE * BYTES_PER_US - len(sizes) * TENSOR_COST


@pytest.mark.parametrize(
    ("said", "state_bytes", "minutes"),
    [
        ("a State of up to 600 MB is compared within a minute", 600_000_000, 1),
        ("one of 12 GB within 20 minutes", 12_000_000_000, 20),
    ],
)
def test_a_pass_takes_no_longer_than_the_documents_say(said, state_bytes, minutes):
    assert said in " ".join((ROOT / "docs" / "failures.md").read_text(encoding="utf-8").split())
    rotation, sizes = Rotation(), [state_bytes - TENSOR_COST]
    passed(rotation, sizes, 20, 1_000_000)
    rotation.load_state_dict({"step_us": rotation.step_us})  # a pass begins
    steps = passed(rotation, sizes, minutes * 60, 1_000_000)
    assert steps[-1][-1].stop == sizes[0]


def test_of_what_can_be_hashed_within_a_minute_no_more_is_hashed_in_a_step_than_that_takes():
    rotation = Rotation()
    step_us = 500_000
    found = passed(rotation, LARGE, 200, step_us)
    evenly = -(-cost(LARGE) * step_us // 60_000_000)
    assert SMALL < evenly < step_us * SHARE * BYTES_PER_US / 10
    assert max(map(nbytes, found)) == evenly
    settled = [nbytes(pieces) for pieces in found[20:100]]
    assert min(settled) >= evenly - len(LARGE) * TENSOR_COST  # and there is no rest


def test_a_pass_begins_once_a_minute_at_most():
    step_us = 500_000  # 120 steps
    found = passed(Rotation(), LARGE, 400, step_us)
    begun = [
        number
        for number, pieces in enumerate(found)
        if pieces and pieces[0].start == 0 and pieces[0].place == 0
    ]
    assert len(begun) > 2
    assert {b - a for a, b in itertools.pairwise(begun[1:])} == {120}


def test_a_step_in_which_all_waited_does_not_count_as_a_long_one():
    rotation = Rotation()
    passed(rotation, LARGE, 20, 10_000)
    rotation.committed(LARGE, 60_000_000)
    assert rotation.step_us == 20_000


def test_many_tiny_tensors_are_no_small_state():
    most = SMALL // (TENSOR_COST + 1)
    assert len(Rotation().pieces([1] * most)) == most
    assert len(Rotation().pieces([1] * 2 * most)) == most + 1  # the last one in part
    exact = [SMALL - TENSOR_COST]
    assert Rotation().pieces(exact) == [Piece(0, 0, exact[0])]
    assert nbytes(Rotation().pieces([exact[0] + 1])) <= SMALL


def test_it_is_known_whether_all_was_compared_in_the_last_step_that_counts():
    small, large = [SMALL - TENSOR_COST], [SMALL]
    rotation = Rotation()
    assert rotation.whole  # nothing counts yet that could have come of another State
    for sizes, whole in ((small, True), (large, False), (small, True)):
        rotation.committed(sizes, 1000)
        assert rotation.whole == whole
        joiner = Rotation()
        joiner.load_state_dict(rotation.state_dict())
        assert joiner.whole == whole
    assert Rotation().state_dict().pop("whole")
    before = {"step_us": 1000, "at": 0, "passing_us": 0}  # a State of a version that did not say so
    rotation.load_state_dict(before)
    assert not rotation.whole


def test_after_a_rest_a_pass_begins_anew():
    rotation = Rotation()
    sizes = [2 * SMALL]
    state = rotation.state_dict()
    reached = []
    for _ in range(70_000):  # steps of a millisecond, so more than a minute
        rotation.committed(sizes, 1000)
        state = rotation.state_dict()
        reached.append(state["at"])
        if not state["at"]:
            break
    assert state == {**Rotation().state_dict(), "whole": 0}
    assert reached[:4] == [SMALL, 2 * SMALL, cost(sizes), cost(sizes)]
    assert len(reached) == 60_000


def test_no_piece_is_empty():
    for pieces in passed(Rotation(), [0, 3, 0, 40 << 20, 0], 100, 200_000):
        assert all(piece.start < piece.stop for piece in pieces)


def test_when_all_was_hashed_the_next_pass_begins_anew():
    sizes = [20 * SMALL]
    for steps, rests in ((5, False), (30, True)):  # within a pass, and in the rest after it
        rotation = Rotation()
        passed(rotation, sizes, steps, 500_000)
        assert (rotation.state_dict()["at"] == cost(sizes)) == rests
        rotation.committed([1, 2], 500_000)
        assert rotation.state_dict() == {**Rotation().state_dict(), "step_us": rotation.step_us}


def test_a_pass_ends_with_the_last_byte_and_not_after_it():
    rotation = Rotation()
    sizes = [2 * SMALL - TENSOR_COST]  # two steps of the least budget
    hashed = [nbytes(pieces) for pieces in passed(rotation, sizes, 4, 1000)]
    assert hashed == [SMALL, SMALL - TENSOR_COST, 0, 0]


@pytest.mark.parametrize("steps", [17, 200])
def test_whoever_is_given_the_state_chooses_alike(steps):
    first, second = Rotation(), Rotation()
    passed(first, LARGE, steps, 300_000)
    assert (first.state_dict()["at"] == cost(LARGE)) == (steps > 17)
    second.load_state_dict(first.state_dict())
    assert passed(first, LARGE, 400, 280_000) == passed(second, LARGE, 400, 280_000)


def test_a_state_of_before_begins_anew():
    rotation = Rotation()
    passed(rotation, LARGE, 17, 30_000)
    rotation.load_state_dict({})
    assert rotation.state_dict() == {**Rotation().state_dict(), "whole": 0}
