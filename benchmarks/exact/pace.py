"""Three workers, of which one needs three times as long for a slice: how near to the ideal.

The ideal is the time that all would need if slices could be divided at will. Their work is waiting,
so that cores play no part.
"""

import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from elastix import Context
from elastix.data.cursor import count
from elastix.events import StepCommitted
from elastix.testing.local import run_local

_SLICE_S = (0.04, 0.04, 0.12)
_SLICES = 24
_SETTLING = 10


def train(ctx: Context) -> None:
    """The train function."""
    model = torch.nn.Linear(4, 2)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    dataset = TensorDataset(torch.rand(4 * _SLICES, 4))
    loader = ctx.loader(dataset, batch_size=2 * _SLICES, slices=_SLICES)
    times, started = [], time.perf_counter()
    for epoch in loader.epochs(ctx.config["steps"] // 2):
        for step in epoch:
            for (x,) in step:
                time.sleep(_SLICE_S[ctx.worker])
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    if ctx.rank == 0:
        Path(ctx.config["result"]).write_text(json.dumps(times))


def measure(steps: int) -> dict[str, Any]:
    """Over the ideal when settled, and after which steps the shares have changed."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        config = {"steps": max(2 * _SETTLING, steps), "result": str(result)}
        run = run_local(train, len(_SLICE_S), config=config, timeout_s=1800.0)
        times = json.loads(result.read_text())
    ideal = _SLICES / sum(1 / seconds for seconds in _SLICE_S)
    batches = [e.batches[0] for e in run.events if isinstance(e, StepCommitted)]
    shares = [{w: count(spans) for w, spans in batch.shares.items()} for batch in batches]
    return {
        "over_ideal": statistics.median(times[_SETTLING:]) / ideal,
        "steps": len(shares),
        "changed_after_steps": [
            n + 1 for n, (old, new) in enumerate(pairwise(shares)) if old != new
        ],
    }
