"""Batches in slices: how they are cut, what is committed of them, and what is read ahead."""

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.data import read_ahead
from elastix.data.cursor import count, merge, split
from elastix.data.drawn_batch import sliced
from elastix.data.loader import Loader
from elastix.data.slice_assignment import Assignment, shares
from elastix.data.source import Source
from tests.unit.data.test_loader import Numbers, Pace


def draw(total, slices=8, batch_size=32, us=(1, 1, 1)):
    members = tuple(10 * rank for rank in range(len(us)))
    assignment = Assignment(members, shares(us, slices), tuple(us))
    return sliced(0, ((100, 100 + total),), batch_size, assignment, full=total == batch_size)


@settings(max_examples=60)
@given(
    slices=st.integers(1, 16),
    each=st.integers(1, 9),
    starts=st.lists(st.integers(1, 50)),
    data=st.data(),
)
def test_slices_are_even_and_none_has_a_single_sample_in_vain(slices, each, starts, data):
    batch_size = slices * each
    total = data.draw(st.integers(1, batch_size))
    batch = ((7, 7 + total // 2), (90, 90 + total - total // 2))
    found = split(batch, slices, batch_size)
    sizes = [count(spans) for spans in found]
    assert len(found) == slices
    assert merge(span for spans in found for span in spans) == merge(batch)
    assert max(sizes) <= each
    filled = [size for size in sizes if size]
    assert sizes == filled + [0] * (slices - len(filled))
    assert max(filled) - min(filled) <= 1
    assert 1 not in filled or total == 1 or each < 4
    if total == batch_size:
        assert set(sizes) == {each}


def test_what_is_committed_says_who_has_computed_what():
    batch = draw(32)
    whole = batch.commit(5, (0, 10, 20))
    assert {w: count(s) for w, s in whole.shares.items()} == {0: 12, 10: 12, 20: 8}
    left = batch.commit(5, (0, 20))
    assert (left.loader, left.owed) == (5, ())
    assert sum(count(s) for s in left.shares.values()) == 32
    assert sum(batch.handed_over((0, 20)).values()) == 3
    assert {lost for lost, _ in batch.handed_over((0, 20))} == {10}
    assert batch.handed_over((0, 10, 20)) == {}


def test_of_a_void_step_all_is_owed():
    batch = draw(32)
    assert batch.commit(0, ()).owed == batch.spans


def test_empty_slices_of_a_short_batch_are_nobodys():
    batch = draw(5)  # slices of 3 and 2 samples, and six empty ones
    assert batch.sizes == (3, 2)
    assert [batch.of(member, batch.members) for member in batch.members] == [[0, 1], [], []]
    assert batch.handed_over((10, 20)) == {(0, 10): 1, (0, 20): 1}


# ------------------------------------------------------------------ reading ahead


class Reader:
    """Stands in for processes that are two slices ahead; counts how often it began."""

    begun = 0

    def __init__(self, make, rescue):
        self.sampler = make().batch_sampler

    def begin(self):
        Reader.begun += 1
        self.tasks = iter(self.sampler)
        self.ahead = deque([next(self.tasks, None), next(self.tasks, None)])

    def next(self):
        self.ahead.append(next(self.tasks, None))
        return torch.tensor(self.ahead.popleft()[0].keys)


class SlicedPace(Pace):
    def begin_step(self, loader, draw, at):
        return draw, at


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(read_ahead, "ProcessReader", Reader)
    monkeypatch.setattr(read_ahead.Lines, "hand_over", lambda lines, wanted: [])
    Reader.begun = 0


def steps_of(me, members=(0, 1)):
    source = Source(
        dataset=Numbers(64),
        batch_size=16,
        slices=8,
        shuffle=False,
        num_workers=1,
        device=torch.device("cpu"),
    )
    pace = SlicedPace(me, members)
    loader = Loader(0, source, pace)
    return loader, iter(next(loader.epochs(1)))


def test_what_is_handed_over_is_read_beside_what_was_read_ahead(reader):
    loader, steps = steps_of(me=1)
    for first in (0, 16, 32):
        batch, at = next(steps)
        read = [loader.read_slice(batch, number, at).tolist() for number in (4, 5, 6, 7)]
        read.append(loader.read_slice(batch, 0, at).tolist())  # worker 0 was lost
        starts = [first + 2 * number for number in (4, 5, 6, 7, 0)]
        assert read == [[start, start + 1] for start in starts]
        loader.commit((1,))
    assert Reader.begun == 1


def test_a_wrong_guess_begins_anew_at_the_slice_that_is_wanted(reader):
    loader, steps = steps_of(me=0)
    batch, at = next(steps)
    assert loader.read_slice(batch, 0, at).tolist() == [0, 1]
    assert loader.read_slice(batch, 2, at).tolist() == [4, 5]  # not the one that comes next
    assert loader.read_slice(batch, 3, at).tolist() == [6, 7]
    assert Reader.begun == 3  # the second time only to end what they were at
