"""The simulation against real runs: same failures, costs from the run's own journal."""

import random
import time

import pytest

from elastix.events import StepCommitted, WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.simulate import Costs, Scenario, _gaps, costs_of, simulate
from tests import trainables
from tests.laws import assert_exactly_once

CONFIG = {"model": "mlp", "samples": 1800, "batch_size": 24, "epochs": 2, "pace_s": 0.06}
WORKERS = 3


def paced(ctx):
    """A step takes its time however busy the machine is."""

    def look(phase, detail):
        if phase == "batch":
            time.sleep(ctx.config["pace_s"])

    ctx.on_phase(look)
    trainables.train(ctx)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_predicted_goodput_is_near_the_measured_one(tmp_path):
    kills = [Kill(worker=w, phase="bucket", step=25 + 40 * w) for w in range(3)]
    result = run_local(
        with_kills(paced, kills),
        WORKERS,
        config=CONFIG,
        directory=tmp_path,
        replace=True,
        timeout_s=240.0,
    )
    assert_exactly_once(result.events, CONFIG["epochs"])
    assert set(result.lost) == {0, 1, 2}
    commits = [event for event in result.events if isinstance(event, StepCommitted)]
    begun, ended = commits[0].t, commits[-1].t
    undisturbed = _gaps(result.events)[WORKERS]
    rate = CONFIG["batch_size"] / (sum(undisturbed) / len(undisturbed))
    samples = sum(batch.samples for event in commits[1:] for batch in event.batches)
    measured = samples / ((ended - begun) * rate)
    losses = [e.t - begun for e in result.events if isinstance(e, WorkerLost)]
    plan = Scenario(workers=WORKERS, duration_s=ended - begun, checkpoint_every_s=1e9)
    costs = costs_of(result.events, Costs(checkpoint_s=0.0))
    predicted = simulate(plan, costs, random.Random(0), losses).goodput
    assert predicted < 1.0
    assert abs(predicted - measured) < max(0.05, 0.3 * (1.0 - measured)), (predicted, measured)
