"""exact=True on a real Ray: a run under fire has the bytes of a quiet one."""

import pytest

import elastix
from elastix.events import WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.replay import compare
from tests.exact_programs import train

CONFIG = {"model": "convnet", "jitter": True, "num_workers": 1}


def fit(store, name, workers, kills=()):
    return elastix.ElasticTrainer(
        with_kills(train, kills),
        config=CONFIG,
        scaling=elastix.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=elastix.RunConfig(name=name, store=str(store), exact=True),
    ).fit()


@pytest.mark.timeout(300)
def test_a_run_under_fire_has_the_digest_of_a_quiet_one(cluster, tmp_path):
    quiet = fit(tmp_path, "quiet", 1)
    fire = fit(tmp_path, "fire", (1, 3), [Kill(worker=1, phase="bucket", step=3)])
    assert [event.worker for event in fire.events if isinstance(event, WorkerLost)] == [1]
    assert fire.audit.state is not None
    assert fire.audit.lines["bytes"] == quiet.audit.lines["bytes"]
    assert fire.audit.state == quiet.audit.state
    assert compare(fire.directory).apart == ()


def test_options_that_follow_the_number_of_workers_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(elastix.ConfigError, match="Guard"):
        elastix.ElasticTrainer(
            train,
            run=elastix.RunConfig(store=str(tmp_path), exact=True),
            failure=elastix.FailureConfig(guard=elastix.Guard(metric="loss")),
        )
