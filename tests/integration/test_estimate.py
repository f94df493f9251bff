"""Estimates beside what three models take in truth; benchmarks.estimate has the clock too."""

import pytest

from benchmarks import steps
from benchmarks.estimate import estimated, measured
from elastix.cost.trace import trace


@pytest.mark.fast("convnet")
@pytest.mark.parametrize("name", list(steps.MODELS))
def test_peak_memory_is_as_estimated(name):
    build, inputs = steps.MODELS[name]
    estimate = trace(build, lambda: (inputs(),), foreach=False)
    peak, _ = measured(name, steps_taken=2)
    assert peak == pytest.approx(estimate.peak_bytes, rel=0.2)


@pytest.mark.fast("mlp, tensor=2")
@pytest.mark.parametrize("name", list(steps.MESHES))
def test_peak_memory_of_each_of_two_processes_is_as_estimated_for_a_place(name):
    model, mesh = steps.MESHES[name]
    peak, _ = measured(model, mesh, steps_taken=2)
    assert peak == pytest.approx(estimated(model, mesh).peak_bytes, rel=0.2)
