"""What a batch in slices costs, and what it gains with workers of unequal speed.

- A step with as many slices as workers over a step without slices: the same model, in blocks that
  take turns in one run.
- A step of eight slices on two workers over torch's DistributedDataParallel that adds up as many
  micro-batches of the same size (`no_sync` for all but the last), likewise.
- Three workers, of which one needs three times as long for a slice, over the time that all would
  need if slices could be divided at will. Their work is waiting, so that cores play no part.

Part of `python -m benchmarks.exact`; alone: `python -m benchmarks.slices`.
"""

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.overhead import MODELS
from elastix import Context
from elastix.data.cursor import count
from elastix.events import StepCommitted
from elastix.testing.local import run_local

_RANKS = 2
_SLICES = 8
_SLICE_S = (0.04, 0.04, 0.12)
_SHARED_OUT = 24
_SETTLING = 10


def cost(ctx: Context) -> None:
    """The train function of the first two rows; a block of steps of each kind in turn."""
    build, batch = MODELS[ctx.config["model"]]
    rounds, steps = ctx.config["rounds"], ctx.config["steps"]
    torch.manual_seed(0)
    model, theirs = build(), build()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    store = TCPStore("127.0.0.1", ctx.config["port"], is_master=False, timeout=timedelta(minutes=1))
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=_RANKS)
    ddp = DistributedDataParallel(theirs)
    sgd_of_ddp = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def samples(batches: int, size: int) -> TensorDataset:
        amount = batches * size
        return TensorDataset(torch.rand(amount, 1, 32, 32), torch.randint(10, (amount,)))

    def batches(slices: int | None, size: int) -> Iterator[Any]:
        dataset = samples(8, size)
        for epoch in ctx.loader(dataset, batch_size=size, slices=slices).epochs(1 << 30):
            yield from epoch

    whole = batches(None, _RANKS * batch)
    in_two = batches(_RANKS, _RANKS * batch)
    in_eight = batches(_SLICES, _SLICES * batch)
    of_ddp = samples(8, batch).tensors

    def plain() -> None:
        x, y = next(whole)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sliced(steps: Iterator[Any]) -> None:
        for x, y in next(steps):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def accumulating() -> None:
        each = _SLICES // _RANKS
        for number in range(each):
            rows = slice(number * batch, (number + 1) * batch)
            x, y = (tensor[rows].clone() for tensor in of_ddp)
            with ddp.no_sync() if number + 1 < each else nullcontext():
                (F.cross_entropy(ddp(x), y) / each).backward()
        sgd_of_ddp.step()
        sgd_of_ddp.zero_grad()

    def block(step: Callable[[], None]) -> float:
        dist.barrier()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    kinds: dict[str, Callable[[], None]] = {
        "whole": plain,
        "in_two": lambda: sliced(in_two),
        "in_eight": lambda: sliced(in_eight),
        "ddp": accumulating,
    }
    found = [{kind: block(step) for kind, step in kinds.items()} for _ in range(rounds + 1)][1:]
    if ctx.rank == 0:
        Path(ctx.config["result"]).write_text(
            json.dumps(
                {
                    "as_workers": statistics.median(r["in_two"] / r["whole"] for r in found),
                    "over_ddp": statistics.median(r["in_eight"] / r["ddp"] for r in found),
                    **{f"{kind}_s": statistics.median(r[kind] for r in found) for kind in kinds},
                }
            )
        )
    dist.destroy_process_group()


def unequal(ctx: Context) -> None:
    """The train function of the third row."""
    model = torch.nn.Linear(4, 2)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    dataset = TensorDataset(torch.rand(4 * _SHARED_OUT, 4))
    loader = ctx.loader(dataset, batch_size=2 * _SHARED_OUT, slices=_SHARED_OUT)
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


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """All rows: by model what slices cost, and what becomes of workers of unequal speed."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        for name in MODELS:
            port = _free_port()
            _server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            config = {"model": name, "rounds": rounds, "steps": steps, "port": port}
            run_local(cost, _RANKS, config={**config, "result": str(result)}, timeout_s=900.0)
            found[name] = json.loads(result.read_text())
        many = max(2 * _SETTLING, rounds * steps)
        config = {"steps": many, "result": str(result)}
        run = run_local(unequal, len(_SLICE_S), config=config, timeout_s=900.0)
        times = json.loads(result.read_text())
    ideal = _SHARED_OUT / sum(1 / seconds for seconds in _SLICE_S)
    batches = [e.batches[0] for e in run.events if isinstance(e, StepCommitted)]
    shares = [{w: count(spans) for w, spans in batch.shares.items()} for batch in batches]
    changes = [n + 1 for n, (old, new) in enumerate(pairwise(shares)) if old != new]
    found["unequal"] = {
        "over_ideal": statistics.median(times[_SETTLING:]) / ideal,
        "steps": len(shares),
        "changed_after_steps": changes,
    }
    return found


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(json.dumps(measure(options.rounds, options.steps), indent=2))


if __name__ == "__main__":
    main()
