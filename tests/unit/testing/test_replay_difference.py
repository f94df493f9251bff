"""How far a stored tensor is from a replayed one."""

import math

import pytest
import torch

from elastix.testing.replay import difference


@pytest.mark.parametrize(
    ("stored", "replayed", "expected"),
    [
        ([1.0, 4.0], [1.0, 3.0], 0.25),
        ([math.inf, 4.0], [math.inf, 3.0], 0.25),
        ([math.nan, 4.0], [math.nan, 4.0], 0.0),
        ([math.nan, 4.0], [2.0, 4.0], math.inf),
        ([2.0, 4.0], [math.inf, 4.0], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([0.0], [0.5], 0.5),
        ([], [], 0.0),
    ],
)
def test_relative_to_the_largest_finite_value_and_infinite_where_one_alone_is_finite(
    stored, replayed, expected
):
    assert difference(torch.tensor(stored), torch.tensor(replayed)) == expected
