"""How far the simulation was off, run by run, and what the runs' journals say together."""

import json

import pytest

from benchmarks.prediction import costs_in, summary
from elastix.testing.simulate import Costs


def run(measured, predicted, **costs):
    return {"elastix": measured, "predicted_elastix": predicted, "costs": vars(Costs(**costs))}


RUNS = [
    run(0.90, 0.90, start_s=5.0),
    run(0.90, 0.88, start_s=6.0),  # a loss of 0.12 where 0.10 was measured
    run(0.96, 0.94, start_s=9.0),
]


def test_the_error_is_that_of_the_loss_and_all_runs_are_told():
    found = summary(RUNS)
    assert found["loss_error"] == pytest.approx({"median": 0.2, "min": 0.0, "max": 0.5})
    assert found["measured"] == {"median": 0.9, "min": 0.9, "max": 0.96}
    assert found["predicted"] == {"median": 0.9, "min": 0.88, "max": 0.94}
    assert found["runs"] == RUNS


def test_what_things_took_is_the_median_of_the_runs(tmp_path):
    results = tmp_path / "prediction.json"
    results.write_text(json.dumps(summary(RUNS)))
    assert costs_in(results) == Costs(start_s=6.0)
