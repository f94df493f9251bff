"""A shadow beside a group of two: what a stored State holds up, and all workers killed at once.

The stall is what the training thread of a worker in the group spends on a State that is stored: at
the boundary, and before the optimizer's step, where what is still being copied is waited for.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.overhead import MODELS
from elastix import CheckpointConfig, Context
from elastix.events import Resumed, ResumedFromShadow, StateStored
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local

_EVERY, _WORKERS = 4, 2


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

    member._checkpoint = timed(member._checkpoint)
    member._copies.finish = timed(member._copies.finish)
    size = 4 * batch
    x, y = torch.rand(2 * size, 1, 32, 32), torch.randint(10, (2 * size,))
    loader = ctx.loader(TensorDataset(x, y), batch_size=size, slices=4)
    for epoch in loader.epochs(ctx.config["steps"] // 2):
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
    """For each State that is stored, the first ones aside; median and highest."""
    with tempfile.TemporaryDirectory() as directory:
        run = run_local(
            train,
            _WORKERS,
            config={"model": model, "folder": directory, "steps": max(6 * _EVERY, steps)},
            checkpoint=CheckpointConfig(every_steps=_EVERY),
            shadows=1,
            replace=True,
            exact=True,
            timeout_s=1800.0,
        )
        found = json.loads((Path(directory) / "result.json").read_text())[2:]
    stored = sum(isinstance(event, StateStored) for event in run.events)
    return {
        "median": 1e3 * statistics.median(found),
        "max": 1e3 * max(found),
        "stored": stored,
    }


def all_killed(times: int) -> dict[str, Any]:
    """Both workers killed at once: steps lost, at most, and how often the shadow went on."""
    lost, resumed = 0, 0
    for number in range(times):
        with tempfile.TemporaryDirectory() as directory:
            phase = ("slice", "bucket", "round")[number % 3]
            kills = [Kill(worker=worker, phase=phase, step=10) for worker in range(_WORKERS)]
            run = run_local(
                with_kills(train, kills),
                _WORKERS,
                config={"model": "convnet", "folder": directory, "steps": 16},
                shadows=1,
                replace=True,
                exact=True,
                timeout_s=600.0,
            )
        from_shadow = [e.steps_lost for e in run.events if isinstance(e, ResumedFromShadow)]
        resumed += bool(from_shadow)
        back = [10 - e.step for e in run.events if isinstance(e, Resumed)]
        lost = max([lost, *from_shadow, *back])
    return {"steps_lost": lost, "times": times, "resumed_from_shadow": resumed}
