"""Rounds of the group: what the payloads of its members come to."""

import math
from types import SimpleNamespace

import pytest

from elastix.comm.protocol.calls import OperationKind
from elastix.train.replica.rounds import GroupMean

GROUP = SimpleNamespace(rank=0, size=3)


@pytest.mark.parametrize(
    ("said", "mean"),
    [
        ([(1.0, 3), (5.0, 1)], 2.0),
        ([(1.0, 3), (math.inf, 0)], 1.0),
        ([(1.0, None), (5.0, None)], 3.0),
        ([(1.0, 3), (5.0, 1), (100.0, None)], 2.0),
        ([(math.nan, 0), (100.0, None)], 100.0),
    ],
    ids=["by samples", "one has none", "nobody knows", "a newcomer", "a newcomer alone"],
)
def test_a_mean_is_over_those_who_have_samples_or_know_of_none(said, mean):
    works = [GroupMean(OperationKind.MEAN, {"loss": value}, samples) for value, samples in said]
    total = sum(work.payload(GROUP) for work in works)
    assert [work.means(total) for work in works] == [{"loss": mean}] * len(works)


def test_a_mean_of_nobody_is_no_number():
    work = GroupMean(OperationKind.MEAN, {"loss": 1.0}, 0)
    assert math.isnan(work.means(work.payload(GROUP))["loss"])
