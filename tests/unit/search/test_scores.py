"""What the reports of a trial come to."""

import random

import pytest

from elastix.search.scores import Latest, losses, merged
from elastix.search.trial import Objectives

BOTH = Objectives.of(["a", "b"], "min")


@pytest.mark.parametrize("seed", range(20))
def test_the_last_values_are_the_same_whatever_order_reports_come_in(seed):
    rng = random.Random(seed)
    results = {
        seq: {
            name: rng.choice([None, rng.random()]) for name in rng.sample("abc", rng.randint(0, 2))
        }
        for seq in range(8)
    }
    latest = Latest({})
    for seq in rng.sample(range(8), 8):
        latest.add(seq, results[seq])
    last = merged(results)
    known = tuple(last[name] for name in BOTH.names if last.get(name) is not None)
    wanted = known if len(known) == 2 else None
    assert latest.losses(BOTH) == losses(BOTH, results) == wanted


def test_where_the_last_value_is_no_number_there_are_no_losses():
    assert losses(BOTH, {0: {"a": 1.0, "b": 2.0}, 1: {"a": "text"}}) is None
    assert losses(BOTH, {1: {"a": 1.0, "b": 2.0}, 0: {"a": "text"}}) == (1.0, 2.0)
    assert losses(BOTH, {}) is None


def test_the_last_report_is_given_itself_where_it_says_all():
    last = {"a": 1.0, "b": None}
    assert merged({0: {"a": 0.0, "b": None}, 1: last}) is last
    assert merged({0: {"a": 0.0, "b": 2.0}, 1: last}) == {"a": 1.0, "b": 2.0}
    assert [*merged({0: {"b": 1, "a": 2}, 1: {"a": 3, "b": 4}})] == ["b", "a"]
    assert merged({}) == {}
