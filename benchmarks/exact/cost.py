"""What a batch in slices costs a step, and what `exact=True` costs beside it. Two workers.

- A step with as many slices as workers over a step without slices.
- A step of eight slices over torch's DistributedDataParallel that adds up as many micro-batches of
  the same size (`no_sync` for all but the last).
- The same eight slices with `exact=True`, over those without.

Kinds of steps take turns in blocks within one run, in one order and then in the other. The first
comparison is of steps that hardly differ, so it has more rounds. Exactness belongs to a run, so
runs with and without take turns, and each is put in relation to DDP's blocks in its own run; both
have these two kinds of steps only, as DDP's own take longer with more kinds in turn. Medians over
the rounds; the spread is that of the quartiles.
"""

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.overhead import MODELS, data_parallel
from elastix import Context
from elastix.testing.local import run_local

_RANKS = 2
_SLICES = 8
_CLOSER = 4  # times as many rounds, where steps hardly differ


def train(ctx: Context) -> None:
    """The train function: a block of steps of each kind in turn."""
    build, batch = MODELS[ctx.config["model"]]
    rounds, steps = ctx.config["rounds"], ctx.config["steps"]
    torch.manual_seed(0)
    model, theirs = build(), build()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    store = TCPStore("127.0.0.1", ctx.config["port"], is_master=False, timeout=timedelta(minutes=1))
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=_RANKS)
    ddp = data_parallel(theirs)
    sgd_of_ddp = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def batches(slices: int | None, size: int) -> Iterator[Any]:
        dataset = _samples(8, size)
        for epoch in ctx.loader(dataset, batch_size=size, slices=slices).epochs(1 << 30):
            yield from epoch

    def plain(steps: Iterator[Any]) -> None:
        x, y = next(steps)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sliced(steps: Iterator[Any]) -> None:
        for x, y in next(steps):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(step: Callable[[], None]) -> float:
        dist.barrier()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    in_eight = batches(_SLICES, _SLICES * batch)
    whole, in_two = batches(None, _RANKS * batch), batches(_RANKS, _RANKS * batch)
    known: dict[str, Callable[[], None]] = {
        "eight": lambda: sliced(in_eight),
        "ddp": partial(_accumulate, ddp, sgd_of_ddp, _samples(8, batch).tensors, batch),
        "whole": lambda: plain(whole),
        "two": lambda: sliced(in_two),
    }
    order = list(ctx.config["kinds"])
    found = []
    for _ in range(rounds + 1):
        found.append({kind: block(known[kind]) for kind in order})
        order.reverse()
    found = found[1:]  # what comes first takes longer
    if ctx.rank == 0:
        Path(ctx.config["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def _samples(batches: int, size: int) -> TensorDataset:
    amount = batches * size
    return TensorDataset(torch.rand(amount, 1, 32, 32), torch.randint(10, (amount,)))


def _accumulate(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[torch.Tensor],
    batch: int,
) -> None:
    """A step of DDP over as many micro-batches as a worker has slices."""
    each = _SLICES // _RANKS
    for number in range(each):
        rows = slice(number * batch, (number + 1) * batch)
        x, y = (tensor[rows].clone() for tensor in samples)
        with ddp.no_sync() if number + 1 < each else nullcontext():
            (F.cross_entropy(ddp(x), y) / each).backward()
    optimizer.step()
    optimizer.zero_grad()


def _run(
    model: str, rounds: int, steps: int, kinds: Sequence[str], *, exact: bool = False
) -> list[dict[str, float]]:
    """By round, seconds of a step of each kind."""
    with tempfile.TemporaryDirectory() as directory:
        result, port = Path(directory) / "result.json", _free_port()
        _server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        config = {"model": model, "rounds": rounds, "steps": steps, "port": port, "kinds": kinds}
        config["result"] = str(result)
        run_local(train, _RANKS, config=config, exact=exact, timeout_s=900.0)
        found: list[dict[str, float]] = json.loads(result.read_text())
        return found


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "p25": values[0], "p75": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "p25": low, "p75": high}


def measure(model: str, rounds: int, steps: int) -> dict[str, Any]:
    """Ratios with their spread, and seconds of each kind of step."""
    beside_ddp, turns = ("eight", "ddp"), 2 if rounds > 2 else 1
    each = -(-rounds // turns)
    usual: list[dict[str, float]] = []
    exact: list[dict[str, float]] = []
    today: list[dict[str, float]] = []
    for number in range(turns):
        usual += _run(model, each, steps, beside_ddp)
        exact += _run(model, each, steps, beside_ddp, exact=True)
        today += _run(model, _CLOSER * each, steps, ("whole", "two"))
        print(f"{model}: {number + 1} of {turns} times three runs", flush=True)
    middle = statistics.median(r["eight"] / r["ddp"] for r in usual)
    return {
        "slices_over_today": spread([r["two"] / r["whole"] for r in today]),
        "eight_slices_over_plain": spread([r["eight"] / r["ddp"] for r in usual]),
        "exact_over_slices": spread([r["eight"] / r["ddp"] / middle for r in exact]),
        "exact_s": statistics.median(r["eight"] for r in exact),
        "exact_ddp_s": statistics.median(r["ddp"] for r in exact),
        **{f"{kind}_s": statistics.median(r[kind] for r in usual) for kind in beside_ddp},
        **{f"{kind}_s": statistics.median(r[kind] for r in today) for kind in ("whole", "two")},
    }
