"""What the benchmark of populations claims, from runs as they end."""

from benchmarks.population import claims


def test_each_claim_compares_the_same_seeds():
    runs = {("digits", "population", seed): 0.9 + seed / 100 for seed in range(4)}
    runs |= {("digits", "tune_pbt", seed): 0.9 for seed in range(4)}
    runs |= {("digits", "random_asha", seed): 0.95 for seed in range(3)}
    runs |= {("mnist1d", "population", 0): 0.5}
    costs = {"child": [4.0, 6.0, 8.0], "chosen": [1.0], "fresh": [2.0]}
    found = claims(runs, costs)
    assert found["seeds"] == {"digits": 3}
    assert found["accuracy"]["digits"]["population"] == {"mean": 0.91, "se": 0.0058}
    assert found["over_tune_pbt"]["digits"] == {"mean": 0.01, "se": 0.0058, "no_worse": True}
    assert found["over_random_asha"]["digits"]["no_worse"] is False
    assert found["exploit_explore_cpu_ms"]["median"] == 7.0
    assert found["fresh_cpu_ms"] == 2.0
