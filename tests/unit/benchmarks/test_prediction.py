"""How far the simulation was off, run by run."""

import pytest

from benchmarks.prediction import summary


def run(measured, predicted):
    return {"elastix": measured, "predicted_elastix": predicted}


RUNS = [
    run(0.90, 0.90),
    run(0.90, 0.88),  # a loss of 0.12 where 0.10 was measured
    run(0.96, 0.94),
]


def test_the_error_is_that_of_the_loss_and_all_runs_are_told():
    found = summary(RUNS)
    assert found["loss_error"] == pytest.approx({"median": 0.2, "min": 0.0, "max": 0.5})
    assert found["measured"] == {"median": 0.9, "min": 0.9, "max": 0.96}
    assert found["predicted"] == {"median": 0.9, "min": 0.88, "max": 0.94}
    assert found["runs"] == RUNS
