"""Estimates beside what three models take in truth: a real worker, its memory, its clock."""

import json

import pytest

from elastix.cost.devices import this_machine
from elastix.cost.trace import trace
from elastix.testing.local import run_local
from tests import steps


@pytest.mark.parametrize("name", list(steps.MODELS))
def test_peak_memory_and_step_time_are_as_estimated(name, tmp_path):
    build, inputs = steps.MODELS[name]
    estimate = trace(build, lambda: (inputs(),), foreach=False)
    machine = this_machine(threads=1)
    out = tmp_path / "measured.json"
    config = {"model": name, "steps": 5, "out": str(out)}
    run_local(steps.measure, 1, config=config, timeout_s=100)
    measured = json.loads(out.read_text())
    step_s = min(measured["times_s"])
    roofline_s = estimate.roofline_s(machine.peak("float32"), machine.bytes_per_s)
    print(
        f"{name}: peak {measured['peak_bytes'] / 1e6:.0f} MB, estimated "
        f"{estimate.peak_bytes / 1e6:.0f}; step {step_s:.2f} s, roofline {roofline_s:.2f} s"
    )
    assert measured["peak_bytes"] == pytest.approx(estimate.peak_bytes, rel=0.2)
    # Other work on the machine may slow the one or the other measurement.
    assert 0.25 < roofline_s / step_s < 2.0
