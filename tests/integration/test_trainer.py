"""ElasticTrainer on a real Ray: what a user calls, sees and can get wrong."""

import functools
import os
import threading
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest
import torch
from ray.util.placement_group import placement_group_table

import elastix
from elastix.events import (
    GenerationFormed,
    Recovered,
    ReplicasCompared,
    Reported,
    RunStarted,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLost,
    WorkerRaised,
)
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.replay import compare
from elastix.train.on_ray import launch, takeover
from elastix.train.on_ray.room import reserve
from tests import trainables
from tests.chaos.test_shared_kills import a_folder, stop_at_the_end

CONFIG = {"samples": 240, "epochs": 2, "batch_size": 30}


def trainer(tmp_path, train=trainables.train, workers=3, config=None, cpus=0.5, **options):
    return elastix.ElasticTrainer(
        train,
        config={**CONFIG, **(config or {})},
        scaling=elastix.ScalingConfig(num_workers=workers, cpus_per_worker=cpus),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
        **options,
    )


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def test_a_run_without_failures_and_one_that_continues_it(
    cluster, tmp_path, capsys, monkeypatch, caplog
):
    result = trainer(tmp_path).fit()
    assert result.audit.exact
    assert result.audit.loaders[0].epochs == 2
    assert result.worker_losses == 0
    assert 0 <= result.metrics["accuracy"] <= 1
    assert [event.step for event in of(StepCommitted, result)] == list(range(1, 17))
    state = result.load()
    assert state.manifest().ref == result.ref
    trainables.Convnet().double().load_state_dict(state.model)
    assert len(of(Reported, result)) == 2
    (final,) = of(ReplicasCompared, result)
    assert (final.step, final.occasion, final.workers) == (16, "final", (0, 1, 2))
    told = capsys.readouterr().out
    assert "generation 1" in told
    assert "samples exact: 16 steps" in told
    assert "replicas equal: compared once after step 16 by 3 workers" in told
    # Ray tells every driver of what befell actors before this test.
    first, *_, last = [line for line in told.splitlines() if "(raylet)" not in line]
    for line in (first, last):
        assert str(tmp_path) in line
        assert f"elastix report test --store {tmp_path}" in line
    journal = result.directory / "journal.jsonl"
    before = journal.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(launch, "origin", lambda: pytest.fail("git was asked"))
        again = trainer(tmp_path, workers=2).fit()
    assert (again.ref, again.metrics, again.worker_losses) == (result.ref, result.metrics, 0)
    assert str(again.audit) == str(result.audit)
    assert journal.read_bytes() == before
    assert "test is finished (16 steps); nothing to do" in capsys.readouterr().out
    longer = trainer(tmp_path, workers=2, config={"epochs": 3}).fit()
    assert longer.audit.exact
    assert longer.audit.loaders[0].epochs == 3
    assert longer.ref != result.ref
    started = [event for event in longer.events if isinstance(event, RunStarted)]
    assert [event.origin["directory"] for event in started] == [str(Path.cwd())] * 2
    assert "took no step" not in caplog.text
    unused = trainer(tmp_path, workers=2, config={"epochs": 3, "what nobody asks for": 1}).fit()
    assert unused.audit.steps == longer.audit.steps
    assert "run 'test' took no step" in caplog.text


def test_a_worker_killed_in_mid_backward_and_its_replacement(cluster, tmp_path):
    train = with_kills(trainables.train, [Kill(worker=1, phase="bucket", step=5)])
    scaling = elastix.ScalingConfig(num_workers=3, cpus_per_worker=0.5)
    result = elastix.ElasticTrainer(
        train,
        config={**CONFIG, "epochs": 4},
        scaling=scaling,
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
    ).fit()
    assert result.audit.exact
    assert result.audit.loaders[0].epochs == 4
    assert [(e.worker, e.rank, e.cause) for e in of(WorkerLost, result)] == [(1, 1, "died")]
    assert {e.worker for e in of(Recovered, result)} == {0, 2}
    # With num_workers=3 the minimum is 3: the survivors finish the step, then wait.
    assert [e.worker for e in of(WorkerJoined, result)] == [3]
    assert of(StepCommitted, result)[-1].world_size == 3
    assert [e.workers for e in of(ReplicasCompared, result)][-1] == (0, 2, 3)
    assert result.audit.replicas.equal
    assert compare(result.directory).relative < 1e-9


def test_a_worker_with_a_flipped_bit_is_evicted_and_the_step_done_again(cluster, tmp_path, capsys):
    flipped = with_kills(trainables.train, [Flip(worker=2, tensor="head.weight", step=5)])
    result = trainer(tmp_path, flipped).fit()
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(2, "diverged")]
    assert result.audit.exact
    assert result.audit.replicas.equal
    assert compare(result.directory).relative < 1e-9
    said = capsys.readouterr().out
    assert "step 6 void: States of workers 2 differ in model; evicted" in said


def test_without_the_sentinel_a_checkpoint_shows_it_and_ends_the_run(cluster, tmp_path, capsys):
    flipped = with_kills(trainables.train, [Flip(worker=2, tensor="head.weight", step=5)])
    every = elastix.CheckpointConfig(every_steps=4)
    failure = elastix.FailureConfig(sentinel=False)
    unwatched = trainer(tmp_path, flipped, checkpoint=every, failure=failure)
    with pytest.raises(elastix.ReplicasDiffer, match="after step 8 worker 2 holds another State"):
        unwatched.fit()
    assert "worker 2" in capsys.readouterr().out
    with elastix.Store(tmp_path, read_only=True) as store:
        steps = sorted(tag for tag in store.tags() if tag.startswith("test/step-"))
    assert steps == ["test/step-0000000004"]


def test_a_stopped_worker_is_evicted_for_its_silence(cluster, tmp_path):
    kill = Kill(worker=0, phase="bucket", step=5, signal=SIGSTOP)
    result = trainer(
        tmp_path,
        with_kills(trainables.train, [kill]),
        workers=(2, 3),
        failure=elastix.FailureConfig(hang_timeout_s=8.0, replace=False),
    ).fit()
    assert result.audit.exact
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(0, "silent")]
    assert of(StepCommitted, result)[-1].world_size == 2
    formed = of(GenerationFormed, result)
    assert [event.generation for event in formed] == list(range(1, len(formed) + 1))
    assert [event.members for event in formed[:2]] == [(0, 1, 2), (1, 2)]


def test_nothing_is_left_of_what_a_stopped_worker_shared(cluster, tmp_path):
    seed, folder = a_folder()
    alone = trainer(
        tmp_path,
        stop_at_the_end,
        workers=1,
        config={"seed": seed},
        failure=elastix.FailureConfig(hang_timeout_s=5.0, replace=False),
    )
    with pytest.raises(elastix.TrainError):
        alone.fit()
    assert not folder.exists()


def stop_at_step_10(ctx):
    def look(phase, detail):
        if phase == "batch" and ctx.step == 10 and not ctx.config.get("resumed"):
            raise RuntimeError("stop")

    ctx.on_phase(look)
    trainables.train(ctx)


def test_a_failed_run_continues_from_its_last_checkpoint(cluster, tmp_path):
    checkpoint = elastix.CheckpointConfig(every_steps=4, keep_last=2)
    with pytest.raises(elastix.WorkerFailed):
        trainer(tmp_path, stop_at_step_10, workers=2, checkpoint=checkpoint).fit()
    result = trainer(
        tmp_path, stop_at_step_10, workers=3, config={"resumed": True}, checkpoint=checkpoint
    ).fit()
    assert result.audit.exact
    assert [event.step for event in of(StateStored, result)][:2] == [4, 8]
    steps = [event.step for event in of(StepCommitted, result)]
    before, after = steps[:-8], steps[-8:]
    assert before == list(range(1, len(before) + 1))
    assert len(before) in (9, 10)  # the other worker may not have told of its last step
    assert after == list(range(9, 17))
    with elastix.Store(tmp_path, read_only=True) as store:
        steps = sorted(tag for tag in store.tags() if tag.startswith("test/step-"))
        assert steps == ["test/step-0000000012", "test/step-0000000016"]
        assert store.tags()["test/final"] == result.ref
        assert len(store.log()) == 2
        assert not store.verify()


def test_room_that_an_earlier_attempt_left_reserved_is_given_back(cluster, tmp_path):
    """Ray keeps it if the process died with its node while the room was being placed."""
    run = takeover.run_id(str(tmp_path), "test")
    most = elastix.ScalingConfig(num_workers=7)  # of 8 CPUs, and the run wants one and a half
    (left,), _ = reserve(run, most, 7, 250.0, "detached")
    failure = elastix.FailureConfig(start_timeout_s=100)
    assert trainer(tmp_path, failure=failure).fit().audit.exact
    assert placement_group_table(left)["state"] == "REMOVED"


def raise_on_rank_1(ctx):
    model, optimizer, _ = trainables.make(ctx.config)
    ctx.prepare(model, optimizer)
    if ctx.rank == 1:
        raise KeyError("a bug of the user's")
    trainables_loop(ctx, model, optimizer)


def trainables_loop(ctx, model, optimizer):
    loader = ctx.loader(trainables.samples(240, torch.float64), batch_size=30)
    for epoch in loader.epochs(2):
        for x, y in epoch:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_an_exception_on_one_rank_ends_the_run_with_its_traceback(cluster, tmp_path):
    with pytest.raises(elastix.WorkerFailed) as caught:
        trainer(tmp_path, raise_on_rank_1).fit()
    assert caught.value.rank == 1
    assert "a bug of the user's" in str(caught.value)
    assert "raise_on_rank_1" in caught.value.traceback


def test_a_train_function_that_cannot_be_pickled(cluster, tmp_path):
    lock = threading.Lock()

    def train(ctx):
        with lock:
            pass

    with pytest.raises(elastix.ConfigError, match="'lock', a lock"):
        trainer(tmp_path, train).fit()
    assert not list(tmp_path.iterdir())


@functools.cache
def cached():
    return 1


def test_a_cached_function_of_the_script_is_named_before_workers_miss_it(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(cached, "__module__", "__main__")

    def train(ctx):
        cached()

    with pytest.raises(elastix.ConfigError, match="it uses 'cached', which functools caches"):
        trainer(tmp_path, train).fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("train", [lambda: None, lambda a, b: None, "train"])
def test_a_train_function_of_another_shape(tmp_path, train):
    with pytest.raises(elastix.ConfigError):
        trainer(tmp_path, train)


def test_more_workers_than_the_cluster_can_ever_place(cluster, tmp_path):
    with pytest.raises(elastix.ConfigError, match=r"room for 16 .*8 CPU"):
        trainer(tmp_path, workers=17).fit()
    scaling = elastix.ScalingConfig(num_workers=2, gpus_per_worker=1)
    run = elastix.RunConfig(store=str(tmp_path))
    if not torch.cuda.is_available():
        with pytest.raises(elastix.ConfigError, match="room for 0"):
            elastix.ElasticTrainer(trainables.train, scaling=scaling, run=run).fit()


def different_models(ctx):
    model = torch.nn.Linear(4, 3 + ctx.worker % 2)
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_that_differ_between_ranks(cluster, tmp_path):
    with pytest.raises(elastix.ConfigError) as caught:
        trainer(tmp_path, different_models, workers=2).fit()
    assert "entry 0 of worker 0 is parameter weight float32[3, 4]" in str(caught.value)
    assert "of worker 1 parameter weight float32[4, 4]" in str(caught.value)
    assert "Raised on worker" in caught.value.__notes__[0]
    journal = elastix.observe.journal.read(tmp_path / "runs" / "test" / "journal.jsonl")
    assert any(isinstance(event, WorkerRaised) for event in journal)


def test_too_many_losses(cluster, tmp_path):
    kills = [Kill(worker=w, phase="bucket", step=2 + w) for w in (1, 2)]
    with pytest.raises(elastix.TooManyFailures, match="max_worker_losses is 1"):
        trainer(
            tmp_path,
            with_kills(trainables.train, kills),
            workers=(1, 3),
            failure=elastix.FailureConfig(max_worker_losses=1, replace=False),
        ).fit()


def below_its_minimum(tmp_path, why, **options):
    train = with_kills(trainables.train, [Kill(worker=1, phase="bucket", step=5)])
    with pytest.raises(elastix.QuorumLost, match=f"and {why}. They stored their State"):
        trainer(tmp_path, train, **options).fit()


def test_a_group_below_its_minimum_stores_its_state_and_gives_up(cluster, tmp_path):
    failure = elastix.FailureConfig(replace=False)  # nobody can come: nobody is waited for
    below_its_minimum(tmp_path, "replace=False", failure=failure)
    result = trainer(tmp_path, trainables.train).fit()  # nothing of it is lost
    assert result.audit.exact
    assert result.audit.loaders[0].epochs == 2
    assert [event.step for event in of(StepCommitted, result)] == list(range(1, 18))


def test_a_group_below_its_minimum_waits_for_who_could_come(cluster, tmp_path):
    failure = elastix.FailureConfig(replace=False, wait_s=1.0)
    room = {"workers": (2, 3), "cpus": 3}  # the third would come if the cluster grew
    below_its_minimum(tmp_path, "none came within wait_s=1", failure=failure, **room)


def test_every_worker_is_lost(cluster, tmp_path):
    kills = [Kill(worker=w, phase="batch", step=3) for w in range(2)]
    train = with_kills(trainables.train, kills)
    unreplaced = elastix.FailureConfig(replace=False)
    with pytest.raises(elastix.QuorumLost, match="no worker is left that has the State"):
        trainer(tmp_path, train, workers=(1, 2), failure=unreplaced).fit()
    result = trainer(tmp_path, train, workers=(1, 2)).fit()
    assert result.worker_losses == 2  # and others began again, where no State had been stored
    assert result.audit.exact


def die_at_once(_ctx):
    os.kill(os.getpid(), SIGKILL)


def dies_before_it_is_up(ctx):
    if ctx.worker == 1:
        os.kill(os.getpid(), SIGKILL)
    trainables.train(ctx)


@pytest.mark.slow
def test_who_is_left_before_there_is_a_group_founds_it_or_ends_the_run_at_once(cluster, tmp_path):
    unreplaced = elastix.FailureConfig(replace=False)
    few = {"workers": (2, 3), "failure": unreplaced}
    result = trainer(tmp_path / "enough", dies_before_it_is_up, **few).fit()
    assert {event.world_size for event in of(StepCommitted, result)} == {2}
    assert result.audit.exact
    with pytest.raises(elastix.QuorumLost, match=r"worker 1 \(died\) was gone before the group"):
        trainer(tmp_path / "few", dies_before_it_is_up, failure=unreplaced).fit()


def test_every_worker_is_lost_before_the_first_step(cluster, tmp_path):
    unreplaced = elastix.FailureConfig(replace=False)
    with pytest.raises(elastix.QuorumLost, match="before the group had come about"):
        trainer(tmp_path, die_at_once, workers=2, failure=unreplaced).fit()
