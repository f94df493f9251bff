"""Spares, notices and nodes that come and go, on a real Ray."""

import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
import ray

import elastix
from elastix.data.audit import audit
from elastix.events import (
    Resumed,
    ResumedFromShadow,
    RunEnded,
    SlicesHandedOver,
    StateStored,
    StepCommitted,
    TrialEnded,
    TrialLost,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerStarted,
)
from elastix.observe import journal
from elastix.observe.progress import Progress
from elastix.report import report_page
from elastix.search.trial import TrialState
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.replay import compare
from tests import trainables
from tests.chaos.test_controller import until
from tests.integration.nodes import losses

ROOT = Path(__file__).resolve().parents[2]


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.timeout(300)
def test_a_spare_stands_in_and_a_notice_is_heeded(cluster, tmp_path):
    """Two workers and a spare: one is killed, and one of the rest is told to go."""
    sign = tmp_path / "sign"
    sign.mkdir()
    config = {"samples": 300, "batch_size": 30, "epochs": 8, "step_s": 0.05}
    config |= {"meeting": str(sign), "hold_step": 3, "hold_for": 2, "leavers": {"0": 41}}
    kills = [
        Kill(worker=1, phase="bucket", step=6),
        Kill(worker=0, phase="bucket", step=40, signal=SIGTERM),
    ]
    result = elastix.ElasticTrainer(
        with_kills(trainables.train, kills),
        config=config,
        scaling=elastix.ScalingConfig(num_workers=(1, 2), spares=1, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
    ).fit()
    events = list(result.events)
    assert result.audit.exact
    assert [event.worker for event in of(WorkerLost, events)] == [1]
    assert [(e.worker, e.cause) for e in of(WorkerLeft, events)] == [(0, "notice")]
    spare = of(WorkerJoined, events)[0]
    assert (spare.worker, spare.watched_steps) == (2, 0)  # it was there, and the others let it in
    later = [batch for e in of(StepCommitted, events) if e.step > 10 for batch in e.batches]
    assert not any(batch.owed for batch in later)


def held_until_stored(store, ctx):
    """In the step with the notice until told to store the State, and later until that is done."""
    wait = trainables.until_told_to_store(ctx, [0])
    told = store / "runs" / "test" / "journal.jsonl"

    def look(phase, _detail):
        if ctx.worker == 0 and phase == "bucket" and ctx.step == 4:
            wait()
        if ctx.worker == 0 and phase == "boundary" and ctx.step == 7:
            until(lambda: of(StateStored, journal.read(told)))

    ctx.on_phase(look)
    trainables.train(ctx)


@pytest.mark.timeout(300)
def test_a_worker_that_has_notice_and_nobody_to_leave_to_stores_its_state(cluster, tmp_path):
    """There is no room for another one; so it stays, and is killed when its State is stored.

    It takes more than half: Ray may have lost some to a test whose driver was killed.
    """
    kills = [
        Kill(worker=0, phase="bucket", step=step, signal=how)
        for step, how in ((4, SIGTERM), (8, SIGKILL))
    ]
    result = elastix.ElasticTrainer(
        with_kills(functools.partial(held_until_stored, tmp_path), kills),
        config={"samples": 300, "batch_size": 30, "epochs": 2, "log": str(tmp_path)},
        scaling=elastix.ScalingConfig(
            num_workers=1, cpus_per_worker=ray.cluster_resources()["CPU"] // 2 + 1
        ),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
    ).fit()
    events = list(result.events)
    assert result.audit.exact
    (stored,) = [event for event in of(StateStored, events) if event.reason == "notice"]
    (resumed,) = of(Resumed, events)
    assert stored.step == resumed.step == 5
    assert events[-1].step == 20


@pytest.mark.timeout(300)
def test_a_failed_step_keeps_its_whole_batch(cluster, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    config = {"model": "convnet", "samples": 224, "batch_size": 32, "slices": 8, "epochs": 4}
    result = elastix.ElasticTrainer(
        with_kills(trainables.sliced, [Kill(worker=1, phase="slice", step=3, after=1)]),
        config={**config, "log": str(logs)},
        scaling=elastix.ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
    ).fit()
    events = list(result.events)
    assert result.audit.exact
    assert [event.worker for event in of(WorkerLost, events)] == [1]
    assert [(e.step, e.moved) for e in of(SlicesHandedOver, events)] == [(4, ((1, 0, 4),))]
    batches = [batch for e in of(StepCommitted, events) for batch in e.batches]
    assert not any(batch.owed for batch in batches)
    assert [batch.samples for batch in batches] == [32] * 28
    assert compare(tmp_path / "runs" / "test").relative < 1e-9


@pytest.mark.timeout(300)
def test_all_workers_are_killed_and_the_shadow_goes_on(cluster, tmp_path):
    config = {"samples": 300, "batch_size": 30, "epochs": 6, "step_s": 0.05}
    config |= {"meeting": str(tmp_path), "shadow": 2}
    kills = [Kill(worker=worker, phase="bucket", step=20) for worker in (0, 1)]
    result = elastix.ElasticTrainer(
        with_kills(trainables.train, kills),
        config=config,
        scaling=elastix.ScalingConfig(num_workers=2, shadows=1, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="test", store=str(tmp_path)),
    ).fit()
    events = list(result.events)
    assert result.audit.exact
    assert {event.worker for event in of(WorkerLost, events)} == {0, 1}
    assert [(e.worker, e.step, e.steps_lost) for e in of(ResumedFromShadow, events)] == [(2, 20, 0)]
    assert not of(Resumed, events)
    assert [event.step for event in of(StepCommitted, events)] == list(range(1, 61))
    assert compare(tmp_path / "runs" / "test").relative < 1e-9


def on_nodes(kind, store):
    """In a cluster and a process of its own; the journal of what ran. See nodes.py."""
    command = [sys.executable, "-m", "tests.integration.nodes", kind, str(store)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=580)
    return list(journal.read(store / "runs" / "nodes" / "journal.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_workers_of_a_node_with_other_elastix_code_are_turned_away_once(tmp_path):
    """There is room for two there: they are not tried again, and the run goes on."""
    events = on_nodes("edited", tmp_path)
    assert of(RunEnded, events)[-1].outcome == "finished"
    assert 1 <= len(of(WorkerNotStarted, events)) <= 2
    assert {event.cause for event in of(WorkerNotStarted, events)} == {
        "its node has other elastix code"
    }
    assert len({event.node for event in of(WorkerStarted, events)}) == 1
    assert audit(events).exact


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize("kind", ["edited-campaign", "older-campaign", "edited-groups"])
def test_no_trial_of_a_campaign_runs_on_a_node_with_other_elastix_code(kind, tmp_path):
    """There are two idle CPUs, and two workers wait for room. They are tried there once."""
    events = on_nodes(kind, tmp_path)
    said = (tmp_path / "refused").read_text().split()
    assert said
    assert kind == "edited-groups" or len(said) <= 2
    assert not of(TrialLost, events)
    assert not (tmp_path / "elsewhere").exists()
    assert Counter(event.trial for event in of(TrialEnded, events)) == dict.fromkeys(range(6), 1)
    trials = elastix.Results.open(tmp_path, "nodes")
    assert [trial.state for trial in trials] == [TrialState.FINISHED] * 6


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize(("cloud", "size"), [("aws", 4), ("azure", 4), ("gcp", 2)])
def test_workers_leave_a_node_of_which_the_cloud_says_that_it_is_to_go(cloud, size, tmp_path):
    """All of that node, at a boundary, and nobody else. Others stand in elsewhere, or wait."""
    events = on_nodes(cloud, tmp_path)
    assert audit(events).exact
    assert not of(WorkerLost, events)
    left = of(WorkerLeft, events)
    nodes = {event.worker: event.node for event in of(WorkerStarted, events)}
    assert {event.cause for event in left} == {"draining"}
    (gone,) = {nodes[event.worker] for event in left}
    assert sorted(worker for worker, node in nodes.items() if node == gone) == sorted(
        event.worker for event in left
    )
    sizes = [event.world_size for event in of(StepCommitted, events)]
    assert (max(sizes), sizes[-1]) == (4, size)
    assert len(nodes) == len(left) + size


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_two_workers_of_a_node_that_dies_are_two_losses(tmp_path):
    """Nobody is placed on it while Ray does not know, and the group is at full strength again."""
    events = on_nodes("killed", tmp_path)
    assert audit(events).exact
    gone = of(WorkerLost, events)
    nodes = {event.worker: event.node for event in of(WorkerStarted, events)}
    assert len(gone) == len({loss.worker for loss in gone}) == 2
    assert len({nodes[loss.worker] for loss in gone}) == 1
    assert nodes[gone[0].worker] not in {nodes[w] for w in nodes if w > 3}
    sizes = [event.world_size for event in of(StepCommitted, events)]
    assert sizes[0] == sizes[-1] == 4
    assert losses((tmp_path / "metrics").read_text()) == 2
    progress = Progress()
    for event in events:
        progress.add(event)
    assert len(progress.losses) == 2
    tiles = {tile.name: tile.value for tile in report_page("nodes", tmp_path).tiles}
    assert tiles["workers lost"] == "2"


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_the_group_grows_with_a_node_and_leaves_it_before_it_goes(tmp_path):
    events = on_nodes("drained", tmp_path)
    assert audit(events).exact
    sizes = [event.world_size for event in of(StepCommitted, events)]
    assert sizes[0] == 1
    assert max(sizes) == 2  # more than the run began with
    (join,) = of(WorkerJoined, events)
    assert join.watched_steps > 0
    assert [(e.worker, e.cause) for e in of(WorkerLeft, events)] == [(join.worker, "draining")]
    assert not of(WorkerLost, events)
    assert sizes[-1] == 1


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_node_that_is_removed_without_a_word_costs_its_worker_alone(tmp_path):
    events = on_nodes("removed", tmp_path)
    assert audit(events).exact
    sizes = [event.world_size for event in of(StepCommitted, events)]
    assert sizes[0] == 2
    assert sizes[-1] == 1
    assert len(of(WorkerLost, events)) == 1
    assert of(RunEnded, events)[-1].outcome == "finished"


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_death_on_another_node_is_told_by_those_beside_it_before_ray_does(tmp_path):
    events = on_nodes("beside", tmp_path)
    assert audit(events).exact
    (lost,) = of(WorkerLost, events)
    assert lost.cause == "died"
    started = {event.worker: event.node for event in of(WorkerStarted, events)}
    assert sum(node == started[lost.worker] for node in started.values()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_campaign_of_groups_survives_the_removal_of_a_node(tmp_path):
    events = on_nodes("campaign", tmp_path)
    assert Counter(event.trial for event in of(TrialEnded, events)) == dict.fromkeys(range(8), 1)
    trials = elastix.Results.open(tmp_path, "nodes")
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    runs = [list(journal.read(path)) for path in tmp_path.glob("runs/nodes-*/journal.jsonl")]
    assert len(runs) == 8
    assert all(audit(run).exact for run in runs)
    assert any(of(WorkerLost, run) for run in runs) or of(TrialLost, events)


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize("kind", ["host", "host-groups"])
def test_a_campaign_goes_on_when_its_cluster_grows_to_a_second_host(kind, tmp_path):
    on_nodes(kind, tmp_path)
    trials = elastix.Results.open(tmp_path, "nodes")
    assert [trial.state for trial in trials] == [TrialState.FINISHED] * 6
    with elastix.Store(tmp_path) as store:
        assert all(store.get(trial.ref) for trial in trials)
    assert (tmp_path / "elsewhere").exists()
