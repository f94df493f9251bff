"""Exact runs in which workers are killed: how soon the gradient is agreed on, and the bytes.

`stalls`: five workers, of which one is killed with SIGKILL in mid-backward. The time is that from
the kill until the last survivor has left the loop over that step's slices: it has the gradient of
the whole batch, the victim's slices included. What these take the survivors to compute is told
beside it, as far as they would take if shared out evenly.

`schedule`: kills in random places of a run of one to five workers, with joiners. It ends with the
bytes of the quiet run of one worker, or not.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.exact import flips
from benchmarks.exact.counting import Counts
from elastix import Context
from elastix.data.cursor import count
from elastix.events import SlicesHandedOver, StepCommitted, WorkerJoined
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local

_WORKERS, _SLICES, _BATCH, _STEPS, _KILL_STEP = 5, 20, 320, 16, 8
_PHASES = ("slice", "bucket", "filled", "round", "left", "boundary", "handed", "batch")


def train(ctx: Context) -> None:
    """The train function of `stalls`: writes down when each step was agreed on."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x, y = torch.rand(_BATCH * _STEPS, 256), torch.randint(10, (_BATCH * _STEPS,))
    log = (Path(ctx.config["folder"]) / f"steps-{ctx.worker}").open("a", buffering=1)
    for epoch in ctx.loader(TensorDataset(x, y), batch_size=_BATCH, slices=_SLICES).epochs(1):
        for step in epoch:
            started, own = time.monotonic(), 0
            for inputs, targets in step:
                F.cross_entropy(model(inputs), targets).backward()
                own += 1
            ended = time.monotonic()
            log.write(f"{ctx.step} {ended!r} {(ended - started) / own!r}\n")
            optimizer.step()
            optimizer.zero_grad()


def _stall(number: int) -> dict[str, Any]:
    victim = 1 + number % (_WORKERS - 1)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        kill = Kill(worker=victim, phase="bucket", step=_KILL_STEP)
        doomed = with_kills(train, [kill], folder / "kill")
        run = run_local(doomed, _WORKERS, config={"folder": directory}, timeout_s=1800.0)
        killed = float((folder / "kill").read_text().split()[0])
        rows = [
            (int(step), float(ended), float(each))
            for worker in set(range(_WORKERS)) - {victim}
            for step, ended, each in map(
                str.split, (folder / f"steps-{worker}").read_text().splitlines()
            )
        ]
    agreed = max(ended for step, ended, _ in rows if step == _KILL_STEP + 1)
    usual = statistics.median(each for step, _, each in rows if 3 < step <= _KILL_STEP)
    step = next(e for e in run.events if isinstance(e, StepCommitted) and e.step == _KILL_STEP + 1)
    had = sum(count(spans) for batch in step.batches for spans in batch.shares.values())
    lost = _SLICES / _WORKERS
    return {
        "stall_s": agreed - killed,
        "whole": had == _BATCH and not any(batch.owed for batch in step.batches),
        "lost_slices_s": usual * lost / (_WORKERS - 1),
    }


def stalls(kills: int) -> dict[str, Any]:
    """So many kills, one in each run."""
    found = [_stall(number) for number in range(kills)]
    seconds = [one["stall_s"] for one in found]
    return {
        "median": statistics.median(seconds),
        "max": max(seconds),
        "all": [round(value, 4) for value in seconds],
        "lost_slices_s": statistics.median(one["lost_slices_s"] for one in found),
        "batch_kept": all(one["whole"] for one in found),
    }


def schedule(seed: int, _amount: int = 1) -> Counts:
    """One schedule of kills and joins, and whether the run ended with the quiet run's bytes."""
    draws = random.Random(seed)
    workers = draws.randint(1, 5)
    lost = draws.sample(range(workers), draws.randint(min(1, workers - 1), workers - 1))
    kills = [Kill(worker=w, phase=draws.choice(_PHASES), step=draws.randrange(25)) for w in lost]
    with tempfile.TemporaryDirectory() as directory:
        run = run_local(
            with_kills(flips.train, kills),
            workers,
            config={"marks": "", "epochs": 2, "planned": []},
            directory=Path(directory),
            exact=True,
            replace=draws.random() < 0.5,
            spares=draws.randint(0, 2),
            max_workers=workers + 2,
            timeout_s=1800.0,
        )
    handed = [e for e in run.events if isinstance(e, SlicesHandedOver)]
    return {
        "schedules": 1,
        "equal": int(flips.final(run) == flips.quiet(2)),
        "lost": len(run.lost),
        "joined": sum(isinstance(event, WorkerJoined) for event in run.events),
        "slices_handed_over": sum(number for e in handed for *_, number in e.moved),
    }
