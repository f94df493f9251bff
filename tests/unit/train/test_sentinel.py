"""Which bytes of a State are hashed when: all of them in turn, the same on all, and few enough."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastix.train.replica.sentinel import BYTES_PER_US, SHARE, SMALL, TENSOR_COST, Rotation

LARGE = [40 << 20, 3, 0, 7 << 20, 1 << 10]


def passed(rotation, sizes, steps, step_us):
    """What was hashed in each of these steps."""
    found = []
    for _ in range(steps):
        found.append(rotation.pieces(sizes))
        rotation.committed(sizes, step_us)
    return found


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
        if rotation.state_dict()["resting"] or not rotation.state_dict()["at"]:
            break
    for size, spans in zip(sizes, seen, strict=True):
        stops = [0, *(stop for _, stop in spans)]
        assert [start for start, _ in spans] == stops[:-1]  # each byte once, without a gap
        assert whole or stops[-1] == size


def test_hashing_takes_its_share_of_a_step_and_no_more():
    rotation = Rotation()
    found = passed(rotation, LARGE, 40, 200_000)
    assert all(nbytes(pieces) <= max(SMALL, 200_000 * SHARE * BYTES_PER_US) for pieces in found)
    assert nbytes(found[12]) >= 200_000 * SHARE * BYTES_PER_US - len(LARGE) * TENSOR_COST


def test_a_pass_begins_once_a_minute_at_most():
    step_us = 500_000  # 5 MB a step: 10 steps for all of it
    found = passed(Rotation(), LARGE, 400, step_us)
    begun = [
        number
        for number, pieces in enumerate(found)
        if pieces and pieces[0].start == 0 and pieces[0].place == 0
    ]
    assert len(begun) > 2
    assert all(b - a in (120, 121) for a, b in itertools.pairwise(begun[1:]))


def test_a_step_in_which_all_waited_does_not_count_as_a_long_one():
    rotation = Rotation()
    passed(rotation, LARGE, 20, 10_000)
    rotation.committed(LARGE, 60_000_000)
    assert rotation.step_us == 20_000


def test_whoever_is_given_the_state_chooses_alike():
    first, second = Rotation(), Rotation()
    passed(first, LARGE, 17, 30_000)
    second.load_state_dict(first.state_dict())
    assert passed(first, LARGE, 50, 80_000) == passed(second, LARGE, 50, 80_000)


def test_a_state_of_before_begins_anew():
    rotation = Rotation()
    passed(rotation, LARGE, 17, 30_000)
    rotation.load_state_dict({})
    assert rotation.state_dict() == Rotation().state_dict()
