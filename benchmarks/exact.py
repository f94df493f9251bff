"""What exactness takes of a step: sentinel, guard, and `exact=True` over slices. Two workers here.

Both are timed where they are called, in the training thread, and put in relation to the step. The
State of each model is too large to be hashed whole, so what is seen is a pass. How fast one core
hashes is measured beside it: `sentinel.BYTES_PER_US` has to be below.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch.utils.data import TensorDataset

from benchmarks import slices
from benchmarks.overhead import MODELS
from benchmarks.record import save
from elastix import Context, Guard
from elastix.testing.local import run_local

_WARM = 10
_SLICES = 8


def measure(ctx: Context) -> None:
    """The train function, with a stopwatch around what is measured."""
    build, batch = MODELS[ctx.config["model"]]
    torch.manual_seed(0)
    model = build()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    member: Any = ctx._member
    spent = {"sentinel": [0.0], "guard": [0.0]}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:  # noqa: ANN401 - whatever it is around
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[kind][-1] += time.perf_counter() - started

        return call

    checks = member._checks
    checks._held = timed("sentinel", checks._held)
    checks.fingerprints.over = timed("sentinel", checks.fingerprints.over)
    member._reducer.remember_buffers = timed("sentinel", member._reducer.remember_buffers)
    checks._judged = timed("guard", checks._judged)
    checks.verdict = timed("guard", checks.verdict)
    checks._watch.counted = timed("guard", checks._watch.counted)
    x = torch.rand(batch, 1, 32, 32)
    y = torch.randint(10, (batch,))
    steps: list[float] = []
    for _ in range(ctx.config["steps"] + _WARM):
        started = time.perf_counter()
        ctx.boundary()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append(time.perf_counter() - started)
        for times in spent.values():
            times.append(0.0)
    if ctx.rank == 0:
        whole = sum(steps[_WARM:])
        result = {kind: sum(times[_WARM:-1]) / whole for kind, times in spent.items()}
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


def step_in_slices(ctx: Context) -> None:
    """The train function: how long a step of eight slices takes, in the median."""
    build, batch = MODELS[ctx.config["model"]]
    torch.manual_seed(0)
    model = build()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    x, y = torch.rand(4 * batch, 1, 32, 32), torch.randint(10, (4 * batch,))
    loader = ctx.loader(TensorDataset(x, y), batch_size=2 * batch, slices=_SLICES)
    steps: list[float] = []
    for epoch in loader.epochs((ctx.config["steps"] + _WARM) // 2):
        for step in epoch:
            started = time.perf_counter()
            for inputs, targets in step:
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - started)
    if ctx.rank == 0:
        Path(ctx.config["result"]).write_text(json.dumps(statistics.median(steps[_WARM:])))


def exact_over_slices(model: str, steps: int, rounds: int) -> float:
    """How much longer a step takes with exact=True, in the median of some pairs of runs."""
    ratios: list[float] = []
    for _ in range(rounds):
        took: list[float] = []
        for exact in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                result = Path(directory) / "result.json"
                config = {"model": model, "steps": steps, "result": str(result)}
                run_local(step_in_slices, 2, config=config, exact=exact, timeout_s=600.0)
                took.append(float(result.read_text()))
        ratios.append(took[1] / took[0])
    return statistics.median(ratios)


def main() -> None:
    """Run all of it, what slices cost included, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact.json"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs for exact=True")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            result = Path(directory) / "result.json"
            config = {"model": name, "steps": options.steps, "result": str(result)}
            run_local(measure, 2, config=config, guard=Guard(), timeout_s=600.0)
            found[name] = json.loads(result.read_text())
    results = {
        "sentinel_share": max(of["sentinel"] for of in found.values()),
        "guard_share": max(of["guard"] for of in found.values()),
        "hashed_per_s": hashed_per_s(),
        "models": found,
        "slices": slices.measure(max(2, options.steps // 10), 20),
        "exact_over_slices": {
            name: exact_over_slices(name, options.steps, options.rounds) for name in MODELS
        },
    }
    save(options.out, results)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
