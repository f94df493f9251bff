"""A run on Ray whose workers share one GPU."""

import os
from pathlib import Path

import pytest
import ray

import elastix
from elastix.events import Recovered, WorkerJoined, WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.replay import compare
from tests import trainables


@pytest.fixture
def cluster(monkeypatch):
    """Ray as it is, whose workers see the GPU."""
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(":")]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    ray.init(address="local", num_cpus=8, num_gpus=1, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("cluster")
def test_a_worker_is_killed_and_replaced(tmp_path):
    result = elastix.ElasticTrainer(
        with_kills(trainables.train, [Kill(worker=1, phase="bucket", step=5)]),
        config={"samples": 240, "epochs": 4, "batch_size": 30, "model": "wide"},
        scaling=elastix.ScalingConfig(num_workers=3, cpus_per_worker=0.5, gpus_per_worker=0.25),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
    ).fit()
    assert result.audit.exact
    assert result.audit.replicas.equal
    told = [event for event in result.events if isinstance(event, WorkerLost)]
    assert [(event.worker, event.cause) for event in told] == [(1, "died")]
    assert {e.worker for e in result.events if isinstance(e, Recovered)} == {0, 2}
    assert [e.worker for e in result.events if isinstance(e, WorkerJoined)] == [3]
    assert compare(result.directory, device="cuda").relative < 1e-9
