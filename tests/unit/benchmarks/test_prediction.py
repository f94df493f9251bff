"""How far the simulation was off, run by run."""

import json
import sys

import pytest

from benchmarks import prediction
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


def test_a_second_call_goes_on_after_the_runs_that_are_kept(monkeypatch, tmp_path):
    out, seeds = tmp_path / "prediction.json", []

    def measured(every_s, minutes, seed):
        seeds.append((every_s, seed))
        if len(seeds) == 3:
            raise KeyboardInterrupt
        return RUNS[seed]

    monkeypatch.setattr(prediction, "measure_elastix", measured)
    monkeypatch.setattr(sys, "argv", ["prediction", "--runs", "3", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        prediction.main()
    assert not out.exists()
    prediction.main()
    assert json.loads(out.read_text()) == summary(RUNS)
    assert seeds == [(15.0, 0), (15.0, 1), (15.0, 2), (15.0, 2)]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--kill-every", "30", "--runs", "1"])
    prediction.main()
    assert seeds[4:] == [(30.0, 0)]
