"""Rehearsal on a real Ray."""

import elastix
from elastix.events import WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.replay import compare
from tests.continual import train


def test_a_killed_worker_changes_nothing_that_is_rehearsed(cluster, tmp_path):
    (tmp_path / "logs").mkdir()
    result = elastix.ElasticTrainer(
        with_kills(train, [Kill(worker=1, phase="bucket", detail=1, step=11)]),
        config={"keep": "samples", "log": str(tmp_path / "logs")},
        scaling=elastix.ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
        quiet=True,
    ).fit()
    assert [e.worker for e in result.events if isinstance(e, WorkerLost)] == [1]
    assert result.audit.exact
    assert compare(result.directory).relative < 1e-9
