"""Workers that are several processes, on a real Ray: each kind of process is killed.

Processes outlive their workers, and never change their place, so who was who is told by their ids.
"""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F

import elastix
from elastix.events import (
    GenerationFormed,
    Recovered,
    Resumed,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from elastix.observe import journal
from tests import pipe_runs
from tests.crew_runs import (
    PlaceKill,
    assert_laws,
    build,
    configure,
    data,
    held_until,
    told_pids,
    train,
)

pytestmark = pytest.mark.timeout(400)


def told(ctx):
    """As crew_runs.train, and which process it is, and what it is told of the group."""
    log = Path(ctx.config["log"])
    (log / f"pid-{ctx.worker}-{ctx.place}").write_text(str(os.getpid()))

    def look(phase, _detail):
        if phase == "batch":
            with (log / f"rank-{ctx.worker}-{ctx.place}").open("a") as file:
                file.write(json.dumps([ctx.step, ctx.rank, ctx.world_size]) + "\n")

    ctx.on_phase(look)
    train(ctx)


def told_ranks(log, worker, place):
    """By step, rank and size of the group as that process was told them."""
    lines = (log / f"rank-{worker}-{place}").read_text().splitlines()
    return {step: (rank, size) for step, rank, size in map(json.loads, lines)}


def evaluates(ctx):
    """After each epoch; what comes of it goes to a file of each process."""
    log = Path(ctx.config["log"])
    (log / f"pid-{ctx.worker}-{ctx.place}").write_text(str(os.getpid()))

    def evaluate(model, _look):
        means = ctx.evaluate(loss, data(23), batch_size=5)
        path = log / f"evaluated-{ctx.step}-{ctx.worker}-{ctx.place}"
        path.write_text(json.dumps([ctx.step, means]))

    train(ctx, after_epoch=evaluate)


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def fit(
    tmp_path,
    workers,
    crew,
    kills=(),
    checkpoint=None,
    function=told,
    exact=False,
    spares=0,
    store=None,
    **options,
):
    """Run, and assert the laws of crews: the events, and the process ids by worker and place."""
    config = configure(tmp_path, kills, **options)
    result = elastix.ElasticTrainer(
        function,
        config=config,
        scaling=elastix.ScalingConfig(num_workers=workers, crew=crew, spares=spares),
        run=elastix.RunConfig(name="test", store=str(store or tmp_path / "store"), exact=exact),
        checkpoint=checkpoint,
        quiet=True,
    ).fit()
    assert_laws(config, list(result.events), crew)
    return result, told_pids(Path(config["log"]))


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def test_a_follower_is_killed_and_then_a_speaker_and_mates_go_on_as_others(
    cluster, tmp_path, capsys
):
    """With num_workers=2 the others wait for the new worker, so each kill has its time."""
    kills = [
        PlaceKill(worker=1, place=1, phase="in backward", step=2),
        PlaceKill(worker=2, place=0, phase="in forward", step=4),
    ]
    often = elastix.CheckpointConfig(every_steps=3)
    result, pids = fit(tmp_path, 2, {"shard": 2}, kills, often, epochs=2)
    assert "A worker died or was killed" not in capsys.readouterr().out  # elastix tells of it
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(1, "died"), (2, "died")]
    assert [e.members for e in of(GenerationFormed, result) if len(e.members) == 2] == [
        (0, 1),
        (0, 2),
        (0, 3),
    ]
    assert [e.worker for e in of(WorkerJoined, result)] == [2, 3]
    assert pids[2, 0] == pids[1, 0]  # it was free
    assert pids[3, 1] == pids[2, 1]
    assert len(set(pids.values())) == 6
    started = {e.worker: (e.pid, *(pid for _, pid in e.mates)) for e in of(WorkerStarted, result)}
    assert started == {w: (pids[w, 0], pids[w, 1]) for w in range(4)}
    assert len(of(WorkerStarted, result)) == 4
    assert result.audit.loaders[0].epochs == 2
    last = of(StepCommitted, result)[-1].step
    assert {e.worker for e in of(Recovered, result)} == {0}
    assert [e.step for e in of(StateStored, result)] == [3, 6, 9, last]
    for worker in range(4):
        speaker, follower = (told_ranks(tmp_path / "log", worker, place) for place in (0, 1))
        assert all(follower[step] == said for step, said in speaker.items() if step in follower)
        assert speaker.keys() & follower.keys()
        assert {rank for rank, _ in speaker.values()} == {min(worker, 1)}
    assert speaker[last - 1] == (1, 2)
    state = result.load()
    assert state.model["blocks.0.up.weight"].shape == (36, 18)  # whole
    assert result.audit.replicas.equal


def test_an_exact_run_of_crews_has_the_bytes_of_the_quiet_one(cluster, tmp_path):
    found = []
    for workers, kills in (
        (1, []),
        (2, [PlaceKill(worker=1, place=1, phase="in backward", step=2)]),
    ):
        where = tmp_path / str(workers)
        result, _ = fit(where, workers, {"shard": 2}, kills, slices=4, exact=True)
        assert [e.worker for e in of(WorkerLost, result)] == [kill.worker for kill in kills]
        found.append(result.audit.lines["bytes"])
        assert of(StateStored, result)[-1].digest
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_spare_is_let_in_for_a_worker_that_loses_a_process_and_is_replaced(cluster, tmp_path):
    """Its processes are in the journal before the loss; what is left is part of the next spare."""
    kills = [
        PlaceKill(worker=1, place=1, phase="in backward", step=2),
        PlaceKill(worker=2, place=0, phase="in forward", step=5),
    ]
    held = functools.partial(held_until, {2: 2, 5: 3}, 2)
    result, pids = fit(tmp_path, 2, {"shard": 2}, kills, function=held, spares=1, epochs=2)
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(1, "died"), (2, "died")]
    events = list(result.events)
    for lost, spare in ((1, 2), (2, 3)):
        started, gone, joined = (
            next(at for at, e in enumerate(events) if isinstance(e, kind) and e.worker == worker)
            for kind, worker in ((WorkerStarted, spare), (WorkerLost, lost), (WorkerJoined, spare))
        )
        assert started < gone < joined
        told = [events[started].pid, *(pid for _, pid in events[started].mates)]
        assert told == [pids[spare, 0], pids[spare, 1]]
    assert (pids[3, 0] == pids[1, 0], pids[3, 1] == pids[1, 1]) == (True, False)
    assert of(StepCommitted, result)[-1].world_size == 2


@pytest.mark.slow
def test_a_process_of_a_spare_dies_while_it_waits(cluster, tmp_path):
    kills = [PlaceKill(worker=2, place=1, phase="wait", step=0)]
    held = functools.partial(held_until, {2: 3}, 2)
    result, pids = fit(tmp_path, 2, {"shard": 2}, kills, function=held, spares=1)
    assert [e.worker for e in of(WorkerLost, result)] == [2]
    assert [e.members for e in of(GenerationFormed, result)] == [(0, 1)]
    assert (pids[3, 0] == pids[2, 0], pids[3, 1] == pids[2, 1]) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_process_gets_notice_and_its_worker_leaves_for_a_spare(cluster, tmp_path, place):
    """At a boundary: nobody is lost, and nothing is owed."""
    notice = PlaceKill(worker=1, place=place, phase="in backward", step=3, signal=signal.SIGTERM)
    held = functools.partial(held_until, {2: 2}, 2)
    result, _ = fit(tmp_path, 2, {"shard": 2}, [notice], function=held, spares=1, epochs=2)
    assert [(e.worker, e.cause) for e in of(WorkerLeft, result)] == [(1, "notice")]
    assert of(WorkerLost, result) == of(Recovered, result) == []
    assert not any(batch.owed for step in of(StepCommitted, result) for batch in step.batches)
    assert 2 in {e.worker for e in of(WorkerJoined, result)}
    assert of(StepCommitted, result)[-1].world_size == 2


@pytest.mark.slow
def test_the_halves_of_two_broken_workers_are_a_new_one(cluster, tmp_path):
    kills = [
        PlaceKill(worker=1, place=1, phase="in backward", step=2),
        PlaceKill(worker=2, place=0, phase="in forward", step=2),
    ]
    result, pids = fit(tmp_path, 3, {"shard": 2}, kills)
    assert {e.worker for e in of(WorkerLost, result)} == {1, 2}
    assert (pids[3, 0], pids[3, 1]) == (pids[1, 0], pids[2, 1])
    assert len({pids[4, 0], pids[4, 1], *(pids[w, p] for w in range(3) for p in (0, 1))}) == 8
    assert of(StepCommitted, result)[-1].world_size == 3


@pytest.mark.slow
def test_each_worker_loses_a_process_and_the_run_goes_on_from_what_the_others_hold(
    cluster, tmp_path
):
    """And all processes evaluate, before and after."""
    kills = [
        PlaceKill(worker=0, place=1, phase="in backward", step=7),
        PlaceKill(worker=1, place=0, phase="in backward", step=7),
    ]
    result, pids = fit(tmp_path, 2, {"shard": 2}, kills, epochs=3, function=evaluates)
    assert [(e.step, e.held) for e in of(Resumed, result)] == [(7, True)]
    assert [e.step for e in of(StepCommitted, result)] == list(range(1, 16))
    assert (pids[2, 0], pids[2, 1]) == (pids[0, 0], pids[1, 1])
    evaluated = [json.loads(path.read_text()) for path in (tmp_path / "log").glob("evaluated-*")]
    assert len(evaluated) >= 3 * 4
    for step in (5, 10, 15):
        told = [means for at, means in evaluated if at == step]
        assert told
        assert all(means == told[0] for means in told)


def looks_at_one_place(ctx):
    """The model gathers its parts, and nobody else is there."""

    def look(model, _look):
        if ctx.place == 0:
            model(data(4)[:][0])

    train(ctx, after_epoch=look)


@pytest.mark.slow
def test_places_that_wait_for_each_other_for_ever_end_the_run(cluster, tmp_path):
    with pytest.raises(elastix.TrainError, match=r"have parted, and wait .* of test_crews.py"):
        fit(tmp_path, 2, {"shard": 2}, function=looks_at_one_place, epochs=2)


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(cluster, tmp_path):
    """A kill on each mesh, and as many epochs again; no sample comes twice."""
    store, last = tmp_path / "store", 0
    meshes = [{"shard": 2}, {"shard": 2, "tensor": 2}, {"shard": 2}]
    for epochs, crew in enumerate(meshes, start=1):
        kills = [PlaceKill(worker=1, place=1, phase="in backward", step=last + 2)]
        where = tmp_path / str(epochs)
        result, _ = fit(where, 2, crew, kills, epochs=epochs, samples=48, store=store)
        steps = [e.step for e in of(StepCommitted, result)]
        assert steps == list(range(1, steps[-1] + 1))
        assert steps[-1] > last
        last = steps[-1]
    assert result.audit.exact
    assert result.audit.loaders[0].epochs == 3


@pytest.mark.slow
def test_tensors_split_and_sharded_with_a_kill_in_forward(cluster, tmp_path):
    kills = [PlaceKill(worker=1, place=3, phase="in forward", step=2)]
    result, pids = fit(tmp_path, 2, {"shard": 2, "tensor": 2}, kills)
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(1, "died")]
    assert [pids[2, place] == pids[1, place] for place in range(4)] == [True, True, True, False]


def in_stages(ctx):
    (Path(ctx.config["log"]) / f"pid-{ctx.worker}-{ctx.place}").write_text(str(os.getpid()))
    pipe_runs.train(ctx)


@pytest.mark.slow
def test_a_stage_is_killed_while_its_mate_waits_for_it(cluster, tmp_path):
    kills = [
        PlaceKill(worker=1, place=0, phase="in forward", step=2, after=1),
        PlaceKill(worker=2, place=1, phase="in backward", step=5),
    ]
    result, pids = fit(tmp_path, 2, {"pipe": 2}, kills, function=in_stages, epochs=2)
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(1, "died"), (2, "died")]
    assert (pids[2, 1], pids[3, 0]) == (pids[1, 1], pids[2, 0])
    assert set(result.load().model) == set(build().state_dict())


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_node_is_lost_and_its_worker_comes_again_with_another(tmp_path):
    command = [sys.executable, "-m", "tests.integration.nodes", "crews", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=580)
    events = list(journal.read(tmp_path / "runs" / "nodes" / "journal.jsonl"))
    assert_laws(events[0].config, events, {"shard": 2})
    started = {e.worker: e for e in events if isinstance(e, WorkerStarted)}
    lost = {e.worker for e in events if isinstance(e, WorkerLost)}
    (join,) = [e.worker for e in events if isinstance(e, WorkerJoined)]
    for worker in started.values():
        assert {worker.node} == {node for node, _ in worker.mates}
    assert started[join].node not in {started[other].node for other in (0, 1)}
    assert len(lost & {0, 1}) == 1  # Ray may place one more before it knows that the node is gone
