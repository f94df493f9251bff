"""The cursor: every position committed exactly once, whatever happens to the group."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from elastix.data.cursor import Cursor, count, merge, ratio_for, split, split_like, subtract, take
from elastix.data.permutation import FROM
from elastix.data.sample_order import indices, is_scattered, order, order_in_blocks, runs

seeds = st.integers(0, 2**63 - 1)


def positions(spans) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


@st.composite
def disjoint_spans(draw, start: int = 0):
    cuts = sorted(draw(st.sets(st.integers(start, start + 200), max_size=12)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@given(seeds, st.integers(0, 50), st.integers(1, 400))
def test_an_order_is_a_permutation(seed, epoch, length):
    assert sorted(order(seed, epoch, length).tolist()) == list(range(length))


@given(seeds, st.integers(0, 50))
def test_an_order_is_a_pure_function_of_its_arguments(seed, epoch):
    np.random.seed(3)
    one = order(seed, epoch, 60)
    np.random.seed(4)
    assert np.array_equal(one, order(seed, epoch, 60))


@given(seeds, st.integers(0, 50))
def test_orders_differ_by_epoch_and_by_seed(seed, epoch):
    one = order(seed, epoch, 60)
    assert not np.array_equal(one, order(seed, epoch + 1, 60))
    assert not np.array_equal(one, order(seed + 1, epoch, 60))


def test_an_order_never_changes_between_versions():
    assert order(0, 0, 8).tolist() == [6, 3, 5, 0, 7, 2, 1, 4]


@given(disjoint_spans())
def test_merge_keeps_positions_and_leaves_no_neighbours(spans):
    for shuffled in (spans, spans[::-1]):
        merged = merge(shuffled)
        assert positions(merged) == sorted(positions(spans))
        assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_merge_joins_neighbours_and_keeps_overlaps():
    assert merge([(4, 6), (0, 2), (2, 4), (7, 7)]) == ((0, 6),)
    assert count(merge([(0, 4), (2, 6)])) == 8


@given(disjoint_spans(), st.integers(0, 250))
def test_take_cuts_in_order(spans, amount):
    taken, rest = take(spans, amount)
    assert count(taken) == min(amount, count(spans))
    assert positions(taken) + positions(rest) == positions(spans)
    assert all(stop > start for start, stop in (*taken, *rest))


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 60), st.integers(1, 7))
def test_a_split_conserves_positions_in_order_and_is_even(total, workers, batch_size, gap):
    assume(total <= batch_size)
    spans = ((0, total // 2), (total // 2 + gap, total + gap))
    shares = split(merge(spans), workers, batch_size)
    assert len(shares) == workers
    assert [p for share in shares for p in positions(share)] == positions(spans)
    sizes = [count(share) for share in shares]
    used = [size for size in sizes if size]
    assert sizes == used + [0] * (workers - len(used))
    assert max(used) - min(used) <= 1


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 60))
def test_a_share_of_one_is_dealt_only_where_no_other_division_avoids_it(total, workers, batch_size):
    assume(total <= batch_size)
    usual = -(-batch_size // workers)
    sizes = [count(share) for share in split(((0, total),), workers, batch_size)]
    assert max(sizes) <= max(usual, 1)
    used = range(-(-total // usual), workers + 1)
    if any(total // n >= 2 for n in used):
        assert 1 not in sizes


def test_a_split_of_a_small_last_batch_leaves_the_last_workers_without():
    assert split(((0, 5),), 4, 16) == (((0, 3),), ((3, 5),), (), ())


def test_a_draw_takes_owed_samples_first_and_stops_at_the_end_of_the_epoch():
    cursor = Cursor(10, position=7, owed=((1, 3),))
    batch, after = cursor.draw(batch_size=20, epoch=0)
    assert batch == ((1, 3), (7, 10))
    assert after == Cursor(10, 10)
    assert after.draw(20, epoch=0) == ((), after)


def test_what_a_draw_leaves_of_the_owed_stays_owed():
    batch, after = Cursor(10, position=10, owed=((1, 4), (6, 9))).draw(4, epoch=0)
    assert batch == ((1, 4), (6, 7))
    assert after == Cursor(10, 10, owed=((7, 9),))


def test_a_cursor_left_behind_by_a_break_goes_on_into_the_next_epoch():
    assert Cursor(10, position=8).draw(5, epoch=1) == (((8, 13),), Cursor(10, 13))


@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    epoch=st.integers(0, 3),
    used=st.integers(0, 60),
    owed=disjoint_spans(),
)
def test_a_draw_never_crosses_the_epoch_nor_exceeds_the_batch(
    length, batch_size, epoch, used, owed
):
    position = epoch * length + min(used, length)
    owed, _ = take(owed, position)
    owed = tuple((start, stop) for start, stop in owed if stop <= position)
    batch, after = Cursor(length, position, owed).draw(batch_size, epoch)
    drawn = positions(batch)
    assert len(drawn) <= batch_size
    assert all(p < (epoch + 1) * length for p in drawn)
    left = positions(after.owed) + list(range(after.position, (epoch + 1) * length))
    assert sorted(drawn + left) == sorted(
        positions(owed) + list(range(position, (epoch + 1) * length))
    )
    assert bool(batch) == bool(drawn or left)


@given(
    length=st.integers(1, 200),
    micro=st.integers(1, 5),
    places=st.integers(1, 3),
    each=st.integers(1, 4),
    workers=st.integers(1, 4),
    losses=st.lists(st.sets(st.integers(0, 3)), max_size=20),
)
def test_shares_are_whole_micro_batches_but_for_less_than_one_at_the_end(
    length, micro, places, each, workers, losses
):
    """Through losses, too; and whoever has a share of less than a unit has all of the batch."""
    unit = micro * places
    batch_size = each * unit * workers
    cursor, used = Cursor(length), []
    for gone in itertools.chain(losses, itertools.repeat(())):
        batch, cursor = cursor.draw(batch_size, 0, (unit, micro))
        if not batch:
            break
        total = count(batch)
        shares = split(batch, workers, batch_size, unit)
        assert positions(span for share in shares for span in share) == positions(batch)
        for share in shares:
            size = count(share)
            assert size <= max(batch_size // workers, unit)
            if size % unit:
                assert size == total < unit
                assert size % micro == 0 or size < micro
        if total < micro:
            assert not cursor.left(0)
        for worker, share in enumerate(shares):
            if worker in gone:
                cursor = cursor.give_back(share)
            else:
                used += positions(share)
    assert sorted(used) == list(range(length))


def test_nothing_of_no_length_is_left_by_a_subtraction():
    assert subtract(((0, 5), (7, 9)), ((0, 2), (4, 5), (7, 9))) == ((2, 4),)


def test_a_batch_of_two_is_not_made_smaller_to_spare_a_single_sample():
    batch, after = Cursor(3).draw(2, epoch=0)
    assert (batch, after.draw(2, epoch=0)[0]) == (((0, 2),), ((2, 3),))


def test_left_counts_what_is_owed_and_what_was_never_drawn_but_for_what_is_left_out():
    cursor = Cursor(20, position=5, owed=((0, 3),), left_out=((2, 3), (6, 8)))
    assert [cursor.left(epoch) for epoch in (0, 1)] == [2 + 13, 2 + 13 + 20]


@given(length=st.integers(2, 120), batch_size=st.integers(3, 40))
def test_no_last_batch_is_a_single_sample(length, batch_size):
    cursor, sizes = Cursor(length), []
    while (drawn := cursor.draw(batch_size, 0))[0]:
        batch, cursor = drawn
        sizes.append(count(batch))
    assert sum(sizes) == length
    assert 1 not in sizes


@example(length=1, batch_size=4, epochs=1, seed=0)
@settings(max_examples=300)
@given(
    length=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_position_is_committed_exactly_once_through_losses_resizes_and_restarts(
    length, batch_size, epochs, seed
):
    random = np.random.default_rng(seed)
    committed: list[int] = []
    cursor, epoch = Cursor(length), 0
    stored = (cursor, epoch, 0)
    batches = 0
    restarts = losses = 40
    while epoch < epochs:
        batches += 1
        assert batches <= 50 * (epochs * length + 100)
        batch, after = cursor.draw(batch_size, epoch)
        if not batch:
            epoch += 1
            continue
        world = int(random.integers(1, 10))
        shares = split(batch, world, batch_size)
        lost = []
        if losses and random.random() < 0.3:
            losses -= 1
            dead = set(random.choice(world, size=random.integers(1, world + 1), replace=False))
            lost = [span for rank in dead for span in shares[rank]]
            shares = [share for rank, share in enumerate(shares) if rank not in dead]
        committed += [p for share in shares for p in positions(share)]
        cursor = after.give_back(lost)
        event = random.random()
        if event < 0.1:
            stored = (cursor, epoch, len(committed))
        elif event < 0.15 and restarts:
            restarts -= 1
            saved, epoch, kept = stored
            committed = committed[:kept]
            cursor = Cursor(saved.length, saved.position, tuple(map(tuple, map(list, saved.owed))))
    assert sorted(committed) == list(range(epochs * length))
    assert cursor == Cursor(length, epochs * length)


@given(seeds, st.integers(1, 30), st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_indices_follow_the_order_across_epochs(seed, length, start, size, shuffle):
    found = indices(((start, start + size),), seed, length, shuffle)
    epochs = [
        order(seed, e, length) if shuffle else np.arange(length)
        for e in range((start + size) // length + 1)
    ]
    assert found.tolist() == np.concatenate(epochs)[start : start + size].tolist()
    assert found.dtype == np.int64


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_spans_have_no_indices(shuffle):
    assert indices((), 0, 10, shuffle).tolist() == []


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(seeds, st.integers(0, 5), sizes, st.integers(1, 6))
def test_an_order_in_blocks_is_a_permutation_that_needs_few_blocks_and_each_once(
    seed, epoch, sizes, mixed
):
    found = order_in_blocks(seed, epoch, runs(sizes), mixed)
    assert sorted(found.tolist()) == list(range(sum(sizes)))
    assert found.tolist() == order_in_blocks(seed, epoch, runs(sizes), mixed).tolist()
    block = np.repeat(np.arange(len(sizes)), sizes)[found].tolist()
    first = {b: block.index(b) for b in block}
    last = {b: len(block) - 1 - block[::-1].index(b) for b in block}
    for place in range(len(block)):  # whoever keeps `mixed` blocks reads each of them once
        assert sum(first[b] <= place <= last[b] for b in first) <= mixed


def test_an_order_in_blocks_never_changes():
    expected = [9, 1, 8, 0, 3, 2, 4, 6, 7, 5]
    assert sorted(expected) == list(range(10))
    assert order_in_blocks(3, 1, ((2, 4), (1, 2)), 2).tolist() == expected
    assert order_in_blocks(3, 2, ((2, 4), (1, 2)), 2).tolist() != expected


def test_all_blocks_together_are_shuffled_as_a_whole():
    found = order_in_blocks(0, 0, ((50, 20),), 50)
    assert abs(np.abs(np.diff(found)).mean() / (1000 / 3) - 1) < 0.1


@given(seeds, sizes.filter(sum), st.integers(1, 4), st.integers(0, 60), st.integers(0, 60))
def test_indices_follow_the_order_in_blocks_across_epochs(seed, sizes, mixed, start, size):
    blocks, length = runs(sizes), sum(sizes)
    found = indices(((start, start + size),), seed, length, True, blocks, mixed)
    epochs = range((start + size) // length + 1)
    whole = np.concatenate([order_in_blocks(seed, e, blocks, mixed) for e in epochs])
    assert found.tolist() == whole[start : start + size].tolist()


@given(sizes)
def test_runs_are_the_sizes_in_short(sizes):
    assert [size for many, size in runs(sizes) for _ in range(many)] == sizes


ratios = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(total=st.integers(1, 60), ratio=ratios, batch_size=st.integers(1, 60))
def test_a_split_in_a_ratio_is_in_that_ratio_or_none(total, ratio, batch_size):
    spans = ((5, 5 + total),)
    shares = split_like(spans, ratio, batch_size)
    sizes = [total * part / sum(ratio) for part in ratio]
    if shares is not None:
        assert list(map(count, shares)) == sizes
        assert merge(span for share in shares for span in share) == spans
    else:
        single = 1 in sizes and 1 not in map(count, split(spans, len(ratio), batch_size))
        assert single or not all(size.is_integer() for size in sizes)


@given(batch=st.integers(1, 40), times=st.integers(1, 6), workers=st.integers(1, 6))
def test_batches_of_equal_size_or_a_multiple_have_one_ratio(batch, times, workers):
    ratio = list(map(count, split(((0, batch),), workers, batch)))
    assert split_like(((0, batch),), ratio, batch) is not None
    assert split_like(((0, batch * times),), ratio, batch * times) is not None


@pytest.mark.parametrize(
    ("sizes", "workers", "ratio"),
    [
        ((10, 10), 3, (4, 3, 3)),
        ((4, 15), 2, (8, 7)),  # 4 whole and 8 of 15, not all of 15 and 2 of 4
        ((15, 4), 3, (5, 5, 5)),
        ((64, 448), 3, (22, 21, 21)),  # seven times as much
        ((1024, 1000), 7, (2, 1, 1, 1, 1, 1, 1)),  # 250 of 1000, not all of it
        ((7, 7, 3), 1, (7,)),
    ],
)
def test_the_ratio_for_several_sizes_costs_the_least(sizes, workers, ratio):
    assert ratio_for(sizes, workers) == ratio


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), workers=st.integers(1, 6))
def test_the_ratio_for_several_sizes_divides_one_of_them(sizes, workers):
    ratio = ratio_for(sizes, workers)
    assert len(ratio) == workers
    assert any(split_like(((0, size),), ratio, size) is not None for size in sizes)


def test_a_long_order_is_computed_where_it_is_needed_and_one_in_blocks_is_not():
    found = [is_scattered(length, ()) for length in (FROM - 1, FROM, FROM + 1)]
    assert found == [False, True, True]
    assert not is_scattered(FROM, ((1, FROM),))
