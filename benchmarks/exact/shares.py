"""What sentinel and guard take of a step. Two workers.

Both are timed where they are called, and put in relation to the step, by the clock and by the
processor time of their thread over that of the process, which others on the machine hardly change;
norms of gradients also while
these are added up beside the backward pass, though nobody may wait for it. The State of each model
is too large to be hashed whole, so what is seen is a pass. How fast one core
hashes is measured beside it: `sentinel.BYTES_PER_US` has to be below.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blake3 import blake3

from benchmarks.overhead import MODELS
from elastix import Context, Guard
from elastix.comm.network import shared_memory
from elastix.testing.local import run_local

_WARM = 10


def train(ctx: Context) -> None:
    """The train function, with a stopwatch around what is measured."""
    build, batch = MODELS[ctx.config["model"]]
    torch.manual_seed(0)
    model = build()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    member: Any = ctx._member
    spent = {"sentinel": [0.0], "guard": [0.0], "sentinel_cpu": [0.0], "guard_cpu": [0.0]}
    within = threading.local()

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:  # noqa: ANN401 - whatever it is around
            if vars(within):  # counted by whoever has called it
                return function(*args)
            within.here, started, worked = True, time.perf_counter(), time.thread_time()
            try:
                return function(*args)
            finally:
                del within.here
                spent[kind][-1] += time.perf_counter() - started
                spent[f"{kind}_cpu"][-1] += time.thread_time() - worked

        return call

    checks = member._steps.checks
    checks._held = timed("sentinel", checks._held)
    checks.fingerprints.over = timed("sentinel", checks.fingerprints.over)
    member._reducer.remember_buffers = timed("sentinel", member._reducer.remember_buffers)
    checks._judged = timed("guard", checks._judged)
    checks.verdict = timed("guard", checks.verdict)
    checks._watch.counted = timed("guard", checks._watch.counted)
    vars(shared_memory)["norm_of"] = timed("guard", shared_memory.norm_of)
    of_part: Any = shared_memory.Contribution
    of_part.squares = timed("guard", of_part.squares)
    x = torch.rand(batch, 1, 32, 32)
    y = torch.randint(10, (batch,))
    steps: list[float] = []
    worked: list[float] = []
    for _ in range(ctx.config["steps"] + _WARM):
        started, began = time.perf_counter(), time.process_time()
        ctx.boundary()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append(time.perf_counter() - started)
        worked.append(time.process_time() - began)
        for times in spent.values():
            times.append(0.0)
    if ctx.rank == 0:
        whole = {"": sum(steps[_WARM:]), "_cpu": sum(worked[_WARM:])}
        result = {
            kind: sum(times[_WARM:-1]) / whole["_cpu" if kind.endswith("_cpu") else ""]
            for kind, times in spent.items()
        }
        Path(ctx.config["result"]).write_text(
            json.dumps({**result, "step_s": statistics.median(steps[_WARM:])})
        )


def hashed_per_s() -> float:
    """Bytes that one core hashes in a second, a megabyte at a time."""
    data = torch.randint(255, (64 << 20,), dtype=torch.uint8).numpy().data
    started = time.perf_counter()
    for start in range(0, 64 << 20, 1 << 20):
        blake3(data[start : start + (1 << 20)]).digest()
    return (64 << 20) / (time.perf_counter() - started)


def measure(steps: int) -> dict[str, Any]:
    """By model, what share of a step each takes; and how fast a core hashes."""
    found: dict[str, dict[str, float]] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            result = Path(directory) / "result.json"
            config = {"model": name, "steps": steps, "result": str(result)}
            run_local(train, 2, config=config, guard=Guard(), timeout_s=1800.0)
            found[name] = json.loads(result.read_text())
    return {"models": found, "hashed_per_s": hashed_per_s()}
