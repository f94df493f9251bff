"""exact=True on a real Ray: a run under fire has the bytes of a quiet one."""

import threading
from functools import partial
from pathlib import Path

import pytest

import elastix
from elastix.events import Resumed, RunEnded, StateStored, StepCommitted, WorkerLost
from elastix.observe import journal
from elastix.observe.excepthook import was_told
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.replay import compare
from tests.chaos.test_controller import until
from tests.exact_programs import train

CONFIG = {"model": "convnet", "jitter": True, "num_workers": 1}


def trainer(store, name, workers, train_function=train, **run):
    return elastix.ElasticTrainer(
        train_function,
        config=CONFIG,
        scaling=elastix.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=elastix.RunConfig(name=name, store=str(store), exact=True, **run),
    )


def fit(store, name, workers, kills=()):
    return trainer(store, name, workers, with_kills(train, kills)).fit()


def held(marks: Path, ctx):
    """In the middle of two steps, each until its file is there."""

    def hold(phase, _):
        if phase == "bucket" and ctx.step in (3, 6):
            until((marks / str(ctx.step)).exists)

    ctx.on_phase(hold)
    train(ctx)


@pytest.mark.timeout(300)
def test_a_run_under_fire_has_the_digest_of_a_quiet_one(cluster, tmp_path):
    quiet = fit(tmp_path, "quiet", 1)
    fire = fit(tmp_path, "fire", (1, 3), [Kill(worker=1, phase="bucket", step=3)])
    assert [event.worker for event in fire.events if isinstance(event, WorkerLost)] == [1]
    assert fire.audit.state is not None
    assert fire.audit.lines["bytes"] == quiet.audit.lines["bytes"]
    assert fire.audit.state == quiet.audit.state
    assert compare(fire.directory).apart == ()


@pytest.mark.timeout(300)
def test_a_run_that_is_stopped_and_goes_on_has_the_digest_of_a_quiet_one(cluster, tmp_path):
    """The only State that it stores on its way is that which it goes on from."""
    quiet = fit(tmp_path, "quiet", 1)
    stopped = trainer(tmp_path, "stopped", 2, partial(held, tmp_path), detached=True)

    def follow():
        with pytest.raises(elastix.Interrupted, match="was stopped after step") as raised:
            stopped.fit()
        assert was_told(raised.value)
        (tmp_path / "told").touch()

    def events(kind):
        path = tmp_path / "runs" / "stopped" / "journal.jsonl"
        return [e for e in journal.read(path) if isinstance(e, kind)] if path.exists() else []

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: len(events(StepCommitted)) == 3)
    stopped.stop()
    (tmp_path / "3").touch()
    thread.join(100)
    assert (tmp_path / "told").exists()
    assert [event.outcome for event in events(RunEnded)] == ["interrupted"]
    assert [(event.step, event.reason) for event in events(StateStored)] == [(4, "notice")]
    (tmp_path / "6").touch()
    result = stopped.fit()
    assert [event.step for event in events(Resumed)] == [4]
    assert result.audit.exact
    assert result.audit.state == quiet.audit.state


def test_options_that_follow_the_number_of_workers_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(elastix.ConfigError, match="Guard"):
        elastix.ElasticTrainer(
            train,
            run=elastix.RunConfig(store=str(tmp_path), exact=True),
            failure=elastix.FailureConfig(guard=elastix.Guard(metric="loss")),
        )
