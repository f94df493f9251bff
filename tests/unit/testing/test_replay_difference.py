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


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.half, torch.complex64],
)
def test_of_any_type(dtype):
    one, other = torch.tensor([1.0, 4.0]).to(dtype), torch.tensor([1.0, 2.0]).to(dtype)
    assert difference(one, one.clone()) == 0.0
    assert difference(one, other) == 0.5
