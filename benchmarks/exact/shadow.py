"""A shadow beside a group of two: what a stored State holds up, and all workers killed at once.

The stall is what the training thread of a worker in the group spends on a State that is stored: at
the boundary, and before the optimizer's step, where what is still being copied is waited for.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.exact.counting import Counts
from benchmarks.overhead import MODELS
from elastix import CheckpointConfig, Context
from elastix.events import Resumed, ResumedFromShadow, StateStored, StepCommitted, WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local

_EVERY, _WORKERS, _AGAIN_S = 4, 2, 5.0
_PHASES = ("slice", "bucket", "filled", "round", "left", "boundary")


def train(ctx: Context) -> None:
    """The train function: a large State, a stopwatch around what storing it takes."""
    build, batch = MODELS[ctx.config["model"]]
    folder = Path(ctx.config["folder"])
    ctx.on_phase(lambda name, _: (folder / str(ctx.worker)).touch() if name == "wait" else None)
    torch.manual_seed(0)
    model = build()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    member: Any = ctx._member
    spent: list[float] = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it is around
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[-1] += time.perf_counter() - started

        return call

    member._state.boundary = timed(member._state.boundary)
    member._copies.finish = timed(member._copies.finish)
    size = 4 * batch
    amount = ctx.config["steps"] * size  # one epoch, as a copy is waited for at the end of each
    x, y = torch.rand(amount, 1, 32, 32), torch.randint(10, (amount,))
    loader = ctx.loader(TensorDataset(x, y), batch_size=size, slices=4)
    for epoch in loader.epochs(1):
        for step in epoch:
            for inputs, targets in step:
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            spent.append(0.0)
            while ctx.step == 2 and not (folder / str(_WORKERS)).exists():
                time.sleep(0.01)  # until the shadow is up
    if ctx.rank == 0 and ctx.worker == 0:
        result = [sum(spent[n : n + _EVERY]) for n in range(_EVERY, len(spent) - _EVERY, _EVERY)]
        (folder / "result.json").write_text(json.dumps(result))


def stall_ms(model: str, steps: int) -> dict[str, float]:
    """For each State that is stored, the first ones aside; median and highest.

    `idle_ms` is what the same places take where no State is stored, over as many steps. `exact_ms`
    is the median of an exact run, which stores so large a State itself.
    """
    every = CheckpointConfig(every_steps=_EVERY)
    stored, found = _spent_ms(model, steps, every)
    _, idle = _spent_ms(model, steps, CheckpointConfig())
    _, exact = _spent_ms(model, steps, every, exact=True)
    return {
        "median": statistics.median(found),
        "max": max(found),
        "idle_ms": statistics.median(idle),
        "exact_ms": statistics.median(exact),
        "stored": stored,
    }


def _spent_ms(
    model: str, steps: int, every: CheckpointConfig, *, exact: bool = False
) -> tuple[int, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        run = run_local(
            train,
            _WORKERS,
            config={"model": model, "folder": directory, "steps": max(6 * _EVERY, steps)},
            directory=Path(directory) / "run",
            checkpoint=every,
            shadows=1,
            replace=True,
            exact=exact,
            timeout_s=1800.0,
        )
        found = json.loads((Path(directory) / "result.json").read_text())[2:]
    return sum(isinstance(e, StateStored) for e in run.events), [1e3 * s for s in found]


def killed(seed: int, _amount: int = 1) -> Counts:
    """Both workers killed at once at a random moment: steps lost, and whether the shadow went on.

    `again_s` is from the last kill that was heard of to the next step of the group; `late` are the
    runs in which that took more than five seconds.
    """
    draws = random.Random(seed)
    phase, step = draws.choice(_PHASES), draws.randint(5, 13)
    kills = [Kill(worker=worker, phase=phase, step=step) for worker in range(_WORKERS)]
    with tempfile.TemporaryDirectory() as directory:
        run = run_local(
            with_kills(train, kills),
            _WORKERS,
            config={"model": "convnet", "folder": directory, "steps": 16},
            directory=Path(directory) / "run",
            shadows=1,
            replace=True,
            exact=True,
            timeout_s=1800.0,
        )
    resumed = [e for e in run.events if isinstance(e, ResumedFromShadow)]
    lost = [e.t for e in run.events if isinstance(e, WorkerLost) and e.worker < _WORKERS]
    again = [e.t for e in run.events if isinstance(e, StepCommitted) and e.t > max(lost)]
    again_s = round(min(again) - max(lost), 3)
    return {
        "times": 1,
        "late": int(again_s > _AGAIN_S),
        "resumed_from_shadow": len(resumed),
        "steps_lost": sum(e.steps_lost for e in resumed)
        + sum(step - e.step for e in run.events if isinstance(e, Resumed)),
        "again_s": again_s,
    }
