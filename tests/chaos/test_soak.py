"""A long run in which workers die and join all the time: laws 1 and 5 to the end."""

import math
import os
import random
import threading
import time
from pathlib import Path
from signal import SIGKILL

import pytest
import torch.nn.functional as F

from elastix.events import Reported
from elastix.state import capture
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.chaos.test_endurance import resources
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.trainables import digest, make, note, notes

WORKERS = 4
EARLY = slice(20, 120)
"""Steps by which the witness is measured, for what it has at the end."""
CALM_EPOCHS, MOST_CALM_EPOCHS = 20, 200
MORE_THREADS = 3
WITNESS = 2
"""The one that does not die, so that somebody can tell of it: neither rank 0 nor the last."""


def train(ctx):
    """Every worker but the witness dies at a random place after a random time.

    When time is up and enough have died nobody dies any more, and what was abandoned last has some
    epochs to end, or more of them on a slow machine.
    """
    config = ctx.config
    calm, dead = Path(config["calm"]), Path(config["dead"])
    calm_epochs, threads = 0, []

    def through():
        return Path(config["over"]).exists() and len(list(dead.iterdir())) >= config["deaths"]

    if ctx.worker != WITNESS:
        life_s = random.Random(ctx.worker).expovariate(1 / (config["kill_every_s"] * WORKERS))
        end = time.monotonic() + life_s
        places = random.Random(ctx.worker + 1)

        def die(_phase, _detail):
            if time.monotonic() > end and places.random() < 0.2 and not through():
                (dead / str(ctx.worker)).touch()
                os.kill(os.getpid(), SIGKILL)

        ctx.on_phase(die)
    model, optimizer, dataset = make({"samples": 240})
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, batch_size=24)
    log = Path(config["log"]) / f"{ctx.worker}.jsonl"
    for epoch in loader.epochs(1_000_000):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            note(log, ctx.step, digest(capture({"": model}, {"optimizer": optimizer})))
            if ctx.worker == WITNESS:
                note(Path(config["used"]) / "0.jsonl", ctx.step, resources())
                threads.append(resources()[1])
        ctx.report(epoch=epoch.number)
        if ctx.worker == WITNESS and through() and threads[EARLY]:
            calm_epochs += 1
            settled = min(threads[-10:]) <= min(threads[EARLY]) + MORE_THREADS
            if calm_epochs >= (CALM_EPOCHS if settled else MOST_CALM_EPOCHS):
                calm.touch()
        over = ctx.evaluate(lambda *_: float(calm.exists()), dataset, batch_size=240)
        if sum(over.values()) > 0:
            return


@pytest.mark.parametrize(
    ("seconds", "every_s"),
    [
        pytest.param(5, 1.0, marks=pytest.mark.timeout(280)),
        pytest.param(1800, 5.0, marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
)
def test_a_kill_every_few_seconds_and_joiners_all_along(tmp_path, seconds, every_s):
    logs, used, dead = tmp_path / "logs", tmp_path / "used", tmp_path / "dead"
    for folder in (logs, used, dead):
        folder.mkdir()
    deaths = math.ceil(seconds / every_s / 4)
    config = {
        "log": str(logs),
        "used": str(used),
        "over": str(tmp_path / "over"),
        "calm": str(tmp_path / "calm"),
        "dead": str(dead),
        "deaths": deaths,
        "kill_every_s": every_s,
    }
    threading.Timer(seconds, (tmp_path / "over").touch).start()
    result = run_local(
        train,
        WORKERS,
        config=config,
        directory=tmp_path / "run",
        replace=True,
        spares=1,
        hang_timeout_s=60.0,
        timeout_s=seconds + 200,
    )
    epochs = 1 + max(e.metrics["epoch"] for e in result.events if isinstance(e, Reported))
    assert len(result.lost) >= deaths
    assert WITNESS not in result.lost
    assert joins(result.events)
    assert_exactly_once(result.events, epochs)
    assert_replicas_identical(logs, set(result.lost), result.events)
    sizes = [event.world_size for event in committed(result.events)]
    print(f"{len(sizes)} steps, {len(result.lost)} lost, {len(joins(result.events))} joined")
    figures = [values for _, values in sorted(notes(used)[0].items())]
    early = [min(column) for column in zip(*figures[EARLY], strict=True)]
    late = [min(column) for column in zip(*figures[-100:], strict=True)]
    print(f"descriptors, threads, pages: {early} -> {late}")
    assert late[0] <= early[0] + 6, f"descriptors {early[0]} -> {late[0]}"
    assert late[1] <= early[1] + MORE_THREADS, f"threads {early[1]} -> {late[1]}"
    assert late[2] <= early[2] * 1.15 + 4000, f"resident pages {early[2]} -> {late[2]}"
    (tmp_path / "over").unlink()
    (tmp_path / "calm").unlink()
    if seconds < 100:  # it trains on all of it again
        assert compare(tmp_path / "run").relative < 1e-7
