"""What the benchmark of rungs claims, and the curves that it makes up."""

import numpy as np
import pytest

from benchmarks.rungs import LAST, Curves, claims


class Table:
    """What Curves asks of one."""

    _means = {str(n): n / 100 for n in range(100)}  # noqa: RUF012 - read alone

    def loss(self, config):
        return config["end"]


def test_a_curve_falls_to_the_entry_of_the_table():
    curves = Curves(Table(), seed=1)
    found = curves.of({"end": 0.25})
    assert len(found) == LAST
    assert found[-1] == pytest.approx(0.25)
    assert np.isfinite(found).all()
    assert found[0] > found[8] > found[-1]
    assert (found == curves.of({"end": 0.25})).all()
    assert (found != Curves(Table(), seed=2).of({"end": 0.25})).any()


def test_claims_compare_the_same_seeds():
    runs = {
        ("table", "random_asha"): [(1.0, 9), (3.0, 9)],
        ("table", "evolution_asha"): [(0.5, 8), (1.5, 8)],
    }
    found = claims(runs)
    assert found["regret"]["table"]["random_asha"] == {"mean": 2.0, "se": 1.0}
    assert found["less_than"]["table"]["random_asha"] == {"mean": -1.0, "se": 0.5}
    assert found["trials"]["table"] == {"random_asha": 9, "evolution_asha": 8}
