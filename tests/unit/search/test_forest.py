"""What the screened evolution asks: places that are learned, what is uncertain, how it is told."""

from typing import NamedTuple

import numpy as np
import pytest
from ConfigSpace import Categorical, ConfigurationSpace, Constant, EqualsCondition, Float, Integer

from elastix.search.config_values import generator
from elastix.search.searchers.forest import KEPT, Encoding, Forest, ranks
from elastix.search.space import Blocks, Space


def space() -> Space:
    block = ConfigurationSpace(
        space=[Categorical("op", ["conv", "pool"]), Categorical("k", [1, 3, 5], ordered=True)]
    )
    block.add(EqualsCondition(block["k"], block["op"], "conv"))
    plain = [
        Float("lr", (1e-4, 1.0), log=True),
        Integer("n", (0, 10)),
        Categorical("mixed", [1, "a", None]),
        Constant("fixed", 3),
    ]
    return Space(plain, Blocks("body", block, min=1, max=2))


class Observed(NamedTuple):
    losses: tuple[float, ...]
    number: int
    reach: int | None = None


def observed(count: int) -> tuple[np.ndarray, list[Observed]]:
    rows = np.random.default_rng(0).random((count, 4), dtype=np.float32)
    return rows, [Observed((float(row[0] * 100),), place) for place, row in enumerate(rows)]


def grown(rows: np.ndarray, losses: list[Observed]) -> Forest:
    forest = Forest(seed=3)
    forest.grow(rows, losses, len(losses))
    return forest


NONE = np.empty((0, 4), dtype=np.float32)


def test_a_configuration_is_a_row_of_numbers():
    pool, conv = {"op": "pool"}, {"op": "conv", "k": 5}
    plain = {"lr": 1e-2, "n": 5, "mixed": "a", "fixed": 3}
    rows = Encoding(space()).rows([{**plain, "body": [pool]}, {**plain, "body": [pool, conv]}])
    lr, n, length, first, absent, second = [0.5, 0.5], [0.5, 0.5], [0, 1], [1, 1], [-1, -1], [-1, 0]
    mixed = [[0, 0], [1, 1], [0, 0]]
    expected = [lr, n, *mixed, length, first, absent, second, [-1, 2]]
    assert np.allclose(sorted(rows.T.round(4).tolist()), sorted(expected))


def test_every_configuration_has_a_row_of_the_same_width():
    encoding = Encoding(space())
    rows = encoding.rows(space().samples(50, generator(0)))
    assert rows.shape == (50, 10)
    assert encoding.rows([]).shape == (0, 10)
    assert Encoding(Space([Constant("one", 1)])).rows([{"one": 1}]).shape == (1, 1)


def test_places():
    assert ranks([(3.0,), (1.0,), (2.0,), (7.0,)]).tolist() == [0.5, 0.0, 0.25, 0.75]
    assert ranks([(5.0,), (1.0,), (1.0,), (5.0,)]).tolist() == [0.5, 0.0, 0.0, 0.5]
    assert ranks([(), (2.0,)]).tolist() == [1.0, 0.0]
    assert ranks([()]).tolist() == [1.0]
    assert ranks([(0.0, 1.0), (1.0, 0.0), (2.0, 2.0), (1.0, 2.0)]).tolist() == [0, 0, 0.75, 0.5]
    assert ranks([(1.0,), (9.0,), (5.0,), ()], [1, 3, None, 2]).tolist() == [0.5, 0.25, 0.0, 1.0]
    assert ranks([(2.0,), (1.0,), (4.0,), (3.0,)], [1, 1, 3, 3]).tolist() == [0.75, 0.5, 0.25, 0]


def test_a_trial_that_is_observed_again_counts_as_it_was_last():
    rows, found = observed(80)
    early = [each._replace(losses=(-each.losses[0],), reach=1) for each in found]
    twice, forest = Forest(seed=3), Forest(seed=3)
    twice.grow(np.concatenate([rows, rows]), [*early, *found], 160)
    forest.grow(np.concatenate([rows[:0], rows]), found, 80)
    lower = [each.lower(rows, NONE, 0.0) for each in (twice, forest)]
    assert all(np.corrcoef(each, rows[:, 0])[0, 1] > 0.9 for each in lower)


def test_it_learns_places_whatever_the_scale_of_the_losses():
    rows, losses = observed(80)
    found = grown(rows, losses).lower(rows, NONE, 0.0)
    assert np.corrcoef(found, rows[:, 0])[0, 1] > 0.9
    stretched = [each._replace(losses=(np.exp(each.losses[0]),)) for each in losses]
    assert (grown(rows, stretched).lower(rows, NONE, 0.0) == found).all()


def test_what_failed_takes_the_last_place():
    rows, losses = observed(80)
    losses = [
        each._replace(losses=()) if row[1] > 0.5 else each
        for row, each in zip(rows, losses, strict=True)
    ]
    found = grown(rows, losses).lower(rows, NONE, 0.0)
    assert found[rows[:, 1] > 0.6].min() > found[rows[:, 1] < 0.4].max()


def test_nothing_new_is_expected_where_a_configuration_is_pending():
    rows, losses = observed(80)
    forest = grown(rows, losses)
    asked = np.random.default_rng(1).random((20, 4), dtype=np.float32)
    mean, lower = forest.lower(asked, NONE, 0.0), forest.lower(asked, NONE, 2.0)
    assert (lower < mean).all()
    pending = forest.lower(asked, asked[:5], 2.0)
    assert pending[:5] == pytest.approx(mean[:5])
    assert (pending[5:] >= lower[5:]).all()
    assert (pending[5:] < mean[5:]).any()


def test_a_forest_follows_from_the_latest_observations_alone():
    """Whether it was grown with each of them, with some, or once."""
    rows, losses = observed(KEPT + 60)
    singly, rarely = Forest(seed=3), Forest(seed=3)
    for count in range(1, len(losses) + 1, 1 if len(losses) < 100 else 41):
        singly.grow(rows[:count][-KEPT:], losses[:count][-KEPT:], count)
    for count in range(len(losses) - 4, len(losses) + 1):
        singly.grow(rows[:count][-KEPT:], losses[:count][-KEPT:], count)
    rarely.grow(rows[-KEPT:], losses[-KEPT:], len(losses))
    found = [forest.lower(rows, NONE, 1.0) for forest in (singly, rarely)]
    assert (found[0] == found[1]).all()
