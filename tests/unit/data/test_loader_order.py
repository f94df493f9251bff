"""Whose turn it is among loaders, from the turns so far."""

import pytest

from elastix.data.loader_order import expected


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([0, 1] * 3, 0),
        ([1, 0, 1, 0, 1, 0, 1], 0),
        ([0, 0, 1] * 3, 0),
        ([*range(12)] * 3, 0),
        ([*range(13)] * 3, None),  # longer ones are not kept in mind
        ([5, 5, 0, 1, 0, 1, 0, 1], 0),  # whatever came before
        ([0, 1, 0, 1], None),  # seen twice only
        ([0] * 30, None),  # one after the other, as far as one can see
        ([0] * 30 + [1] * 30, None),
        ([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0], None),
        ([], None),
    ],
)
def test_they_take_turns_if_a_sequence_came_three_times(turns, wanted):
    assert expected(turns) == wanted
