"""Steps in slices on real processes that end by SIGKILL: each failed step keeps its whole batch."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastix.comm.gradients import buckets
from elastix.data.cursor import count
from elastix.events import Recovered, SlicesHandedOver
from elastix.state import capture
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.laws import assert_exactly_once, assert_replicas_identical, committed
from tests.trainables import digest, make, note

CONFIG = {"model": "wide", "samples": 112, "batch_size": 32, "slices": 8, "epochs": 2}
STEPS = 8  # of them two with a short batch: 16 samples


def sliced(ctx):
    config = ctx.config
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 256 << 10
    model, optimizer, dataset = make(config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    loader = ctx.loader(
        dataset,
        batch_size=config["batch_size"],
        slices=config["slices"],
        num_workers=config.get("num_workers", 0),
    )
    log = Path(config["log"]) / f"{ctx.worker}.jsonl"
    for epoch in loader.epochs(config["epochs"]):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            others = {"optimizer": optimizer, "scheduler": scheduler}
            note(log, ctx.step, digest(capture({"": model}, others)))


def run(tmp_path, kills=(), workers=3, config=None, **options):
    logs = tmp_path / "logs"
    logs.mkdir()
    settings = {**CONFIG, **(config or {}), "log": str(logs)}
    result = run_local(
        with_kills(sliced, kills), workers, config=settings, directory=tmp_path / "run", **options
    )
    assert {kill.worker for kill in kills} == set(result.lost)
    assert_exactly_once(result.events, settings["epochs"])
    assert_replicas_identical(logs, set(result.lost), result.events)
    steps = committed(result.events)
    batches = [batch for step in steps for batch in step.batches]
    assert not any(batch.owed for batch in batches)
    a_epoch = -(-settings["samples"] // settings["batch_size"])
    assert len(steps) == a_epoch * settings["epochs"]
    rest = settings["samples"] % settings["batch_size"] or settings["batch_size"]
    sizes = [count(s for share in b.shares.values() for s in share) for b in batches]
    assert sizes == ([settings["batch_size"]] * (a_epoch - 1) + [rest]) * settings["epochs"]
    return result


def handed_over(result):
    return [event for event in result.events if isinstance(event, SlicesHandedOver)]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_nobody_is_lost(tmp_path, workers):
    assert not handed_over(run(tmp_path, workers=workers))


PLACES = {
    "first slice": Kill(worker=1, phase="slice", step=3),
    "second slice": Kill(worker=1, phase="slice", step=3, after=1),
    "first bucket": Kill(worker=1, phase="bucket", detail=0, step=3),
    "last bucket": Kill(worker=1, phase="bucket", detail=2, step=3),
    "between its slices and the round": Kill(worker=1, phase="filled", step=3),
    "first step": Kill(worker=1, phase="filled", step=0),
    "between steps": Kill(worker=1, phase="boundary", step=3),
    "last step": Kill(worker=1, phase="slice", step=STEPS - 1),
}
STANDS = {
    "commit round": Kill(worker=1, phase="round", detail=1, step=3),
    "out of the commit round": Kill(worker=1, phase="left", detail=1, step=3),
}


@pytest.mark.parametrize(
    ("workers", "shared"), [(3, True), (5, True), (2, False)], ids=["3", "5", "2 by sockets"]
)
@pytest.mark.parametrize("place", PLACES)
def test_the_others_compute_what_a_lost_worker_had(tmp_path, place, workers, shared):
    result = run(tmp_path, [PLACES[place]], workers, shared=shared)
    (event,) = handed_over(result)
    assert event.step == (PLACES[place].step or 0) + 1
    assert {lost for lost, _, _ in event.moved} == {1}
    assert {e.worker for e in result.events if isinstance(e, Recovered)} == set(range(workers)) - {
        1
    }


@pytest.mark.parametrize("place", STANDS)
def test_a_step_that_all_hold_stands_with_what_the_lost_worker_had(tmp_path, place):
    result = run(tmp_path, [STANDS[place]])
    assert [event.step for event in handed_over(result)] in ([], [5])
