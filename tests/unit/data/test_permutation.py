"""Orders of millions of samples, computed where they are needed."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastix.data import sample_order
from elastix.data.loader import Loader
from elastix.data.permutation import FROM, scattered
from elastix.data.sample_order import indices, order_of
from elastix.errors import ConfigError
from tests.unit.data.test_loader import Pace, source

MANY = 10_000_019


def places(count, start=0):
    return np.arange(start, start + count)


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 5))
@example(1, 0, 0)
@example(1024, 0, 0)
@example(1025, 0, 0)
def test_it_is_a_permutation(length, seed, epoch):
    found = scattered(seed, epoch, length, places(length))
    assert np.array_equal(np.sort(found), places(length))


def test_it_never_changes():
    assert scattered(3, 1, MANY, places(5, 77)).tolist() == FROZEN


FROZEN = [891315, 9437071, 5229168, 9408058, 9585743]


@pytest.mark.parametrize("length", [MANY, 1 << 23])
def test_it_looks_random(length):
    """Where samples go, how far neighbours come apart, and bits: chi2 of 99 degrees."""
    found = scattered(5, 0, length, places(100_000, 12345))
    apart = np.diff(found) % length
    for values in (found, apart):
        counts = np.histogram(values, bins=100, range=(0, length))[0]
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 149  # one in a thousand
    for bit in range(14):
        assert abs(np.mean(found >> bit & 1) - 0.5) < 0.01
        assert abs(np.mean((found >> bit ^ places(100_000)) & 1) - 0.5) < 0.01


def test_epochs_and_seeds_have_nothing_in_common():
    one, other, third = (
        scattered(seed, epoch, MANY, places(100_000)) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )
    for a, b in ((one, other), (one, third)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.015
        assert len(np.intersect1d(a, b)) < 1200  # 1000 by chance


def test_positions_of_a_long_stream_are_those_of_the_whole_order():
    epoch = np.concatenate([order_of(4, number, FROM, (), 0) for number in (0, 1)])
    spans = ((5, 9), (FROM // 2 - 70_000, FROM // 2 + 1), (FROM - 3, FROM + 3))
    wanted = np.concatenate([epoch[start:stop] for start, stop in spans])
    assert np.array_equal(indices(spans, 4, FROM, True), wanted)


def test_the_middle_is_reached_without_what_comes_before(monkeypatch):
    def refuse(*_):
        raise AssertionError("a whole order was drawn")

    computed = []

    def counted(seed, epoch, length, wanted):
        computed.append(len(wanted))
        return scattered(seed, epoch, length, wanted)

    monkeypatch.setattr(sample_order, "order", refuse)
    monkeypatch.setattr(sample_order, "scattered", counted)
    half = MANY // 2
    assert len(indices(((half, half + 64),), 99, MANY, True)) == 64
    assert computed == [1 << 15]  # the part in which all of them are


def test_a_cursor_of_an_order_that_was_drawn_as_a_whole_is_refused():
    loader = Loader(0, source(length=FROM), Pace())
    assert loader.opened().scattered
    state = loader.state_dict()
    loader.load_state_dict(state)
    del state["scattered"]  # as an earlier version has it
    with pytest.raises(ConfigError, match="scattered=False"):
        loader.load_state_dict(state)
    assert "scattered" not in Loader(0, source(), Pace()).state_dict()
