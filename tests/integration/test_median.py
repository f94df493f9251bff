"""The median rule on Ray's workers: it is decided here, and carried out there."""

import itertools
import time

import pytest

import elastix
from elastix.search.trial import TrialState
from tests.search_parts import SPACE

pytestmark = pytest.mark.timeout(300)
GOOD = [{"x": 0.9 + n / 100, "depth": 1} for n in range(4)]
BAD = [{"x": 0.1 + n / 100, "depth": 1} for n in range(3)]


def train(ctx):
    """What is good ends by itself; what is bad goes on until it is told to stop."""
    for number in itertools.count():
        ctx.report(score=ctx.config["x"] + number / 1000)
        if ctx.config["x"] > 0.5 and number == 5:
            return
        time.sleep(0.01)  # an epoch


def run(tmp_path, enqueued, trials, **given):
    return elastix.Campaign(
        train,
        space=SPACE,
        searcher=elastix.Random(),
        metric="score",
        budget=elastix.Budget(trials=trials, parallel=2),
        rungs=elastix.Median(grace=1, others=3),
        enqueued=enqueued,
        scaling=elastix.ScalingConfig(cpus_per_worker=0.5),
        run=elastix.RunConfig(name="median", store=str(tmp_path)),
        quiet=True,
        **given,
    ).run()


def test_workers_stop_what_is_worse_than_most_and_are_free_for_the_next(cluster, tmp_path):
    """Each bad trial runs for ever if its worker does not hear that it is to end."""
    good = run(tmp_path, GOOD, 4)
    assert [trial.state for trial in good] == [TrialState.FINISHED] * 4
    results = run(tmp_path, [*BAD, {"x": 0.99, "depth": 2}], 8)
    states = [trial.state for trial in results]
    assert states == [TrialState.FINISHED] * 4 + [TrialState.STOPPED] * 3 + [TrialState.FINISHED]
    for trial in results[4:7]:
        assert len(trial.results) >= 2  # the grace is one report
        assert trial.scored
        assert trial.metrics["score"] == trial.results[-1]["score"]
    assert [len(trial.results) for trial in results if trial.config["x"] > 0.5] == [6] * 5
    assert results.best.trial.number == 7
