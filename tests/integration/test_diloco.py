"""Workers that take inner steps by themselves, on a real Ray, with kills."""

import json

import pytest
import torch

import elastix
from elastix.events import StepCommitted, WorkerLost
from elastix.testing.chaos import Kill, with_kills
from tests.chaos.test_diloco import CONFIG, EXCHANGE, at_place, reference, train
from tests.laws import assert_exactly_once

pytestmark = pytest.mark.timeout(240)


def fit(tmp_path, kills=(), config=None, exchange=EXCHANGE, scaling=None):
    """Run, and assert the laws."""
    log = tmp_path / "log"
    log.mkdir(exist_ok=True)
    settings = {**CONFIG, **(config or {}), "log": str(log)}
    result = elastix.ElasticTrainer(
        with_kills(train, kills) if kills else train,
        config=settings,
        scaling=scaling or elastix.ScalingConfig(num_workers=(2, 3)),
        run=elastix.RunConfig(name="test", store=str(tmp_path / "store")),
        exchange=exchange,
        quiet=True,
    ).fit()
    assert_exactly_once(result.events, settings["epochs"])
    assert any(isinstance(event, WorkerLost) for event in result.events)
    want = reference(settings, result.events, exchange)
    finals = [torch.load(path) for path in log.glob("final-*.pt")]
    for full in finals:
        assert all(torch.equal(full[name], finals[0][name]) for name in want)
        for name, tensor in want.items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-9, atol=1e-12)
    return result


def test_workers_are_killed_in_an_inner_step_and_in_an_outer_one(cluster, tmp_path):
    """Others take their places: they are given outer momentum and go on like all."""
    kills = [
        Kill(worker=1, phase="batch", step=2, after=2),
        Kill(worker=2, phase="bucket", step=6),
    ]
    result = fit(tmp_path, kills, {"inner": "sgd", "epochs": 8})
    steps = [event for event in result.events if isinstance(event, StepCommitted)]
    assert [len(event.batches) for event in steps[:2]] == [4, 4]
    opening = json.loads((tmp_path / "store/runs/test/journal.jsonl").read_text().splitlines()[0])
    assert opening["exchange"]["every_steps"] == 4
    assert opening["sentinel"] is False


@pytest.mark.slow
def test_a_process_of_a_crew_is_killed_in_an_inner_step(cluster, tmp_path):
    config = {"crew": True, "samples": 100, "inner": "sgd", "epochs": 4}
    scaling = elastix.ScalingConfig(num_workers=(1, 2), crew={"shard": 2}, cpus_per_worker=2)
    fit(tmp_path, (), {**config, "at_place": [at_place(1, 1, "batch")]}, scaling=scaling)
