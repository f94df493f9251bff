"""Futures of readers, against a model that writes them out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastix.data.cache_eviction import NEVER, Horizon, ReaderPosition, victims
from elastix.data.sample_order import order

readers = st.builds(
    lambda seed, epoch, offset, more, shuffle: ReaderPosition(
        seed, epoch, offset, epoch + more, shuffle
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 12),
    st.integers(0, 3),
    st.booleans(),
)


def future(reader: ReaderPosition, length: int) -> list[int]:
    """All that a reader is going to read in this epoch and the next."""
    epochs = range(reader.epoch, min(reader.epochs, reader.epoch + 2))
    every = [order(reader.seed, e, length) if reader.shuffle else range(length) for e in epochs]
    return [int(i) for epoch in every for i in epoch][reader.offset :]


def horizon(length: int) -> Horizon:
    return Horizon(length, lambda seed, epoch: order(seed, epoch, length))


@given(st.integers(1, 12), st.lists(readers, max_size=4))
def test_the_next_use_is_the_nearest_in_any_future(length, those):
    those = [
        ReaderPosition(r.seed, r.epoch, min(r.offset, length), r.epochs, r.shuffle) for r in those
    ]
    futures = [future(reader, length) for reader in those]
    expected = [min((f.index(i) for f in futures if i in f), default=NEVER) for i in range(length)]
    found = horizon(length).next_use(np.arange(length), those)
    assert found.tolist() == expected
    window = 5
    near = sorted((use, i) for i, use in enumerate(expected) if use < window and i % 2)
    missing = np.arange(1, length, 2)
    assert horizon(length).wanted(those, window, missing) == [i for _, i in near]


@given(st.lists(st.integers(0, 9) | st.just(NEVER)), st.integers(0, 12))
def test_victims_are_the_farthest(uses, amount):
    found = victims(np.array(uses, np.int64), amount)
    assert len(set(found.tolist())) == min(amount, len(uses))
    assert [uses[n] for n in found] == sorted(uses, reverse=True)[: len(found)]
