"""Step time beside torch's DDP: the same model, two ranks on this machine, interleaved in one run.

Each round times a block of DDP steps, a block of elastix steps and a second block of DDP steps, in
rotating order; the ratio of a round is that of its blocks' medians per step. The two DDP blocks
against each other are the noise of the measurement. elastix runs with commit round, buffers
averaged and journal written.

With `--ray` each model is measured twice more, under ElasticTrainer on a local Ray: once with the
journal alone, once with every reader of events as well (Ray's metrics and its dashboard, a
TensorBoard logger). What the readers cost is the difference of those two ratios.
"""

import argparse
import importlib
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import elastix
from benchmarks.record import save
from elastix import Context
from elastix.testing.local import run_local

_RANKS = 2


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def mlp() -> nn.Module:
    """10.5 M parameters."""
    width = 1712
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(1024, width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convnet() -> nn.Module:
    """A residual net with 21 batch norms, 2.8 M parameters."""
    blocks = [Block(16, 32, 1), Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1)]
    blocks += [Block(64, 128, 2), Block(128, 128, 1), Block(128, 256, 2), Block(256, 256, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {"mlp": (mlp, 64), "convnet": (convnet, 8)}
"""Name to (model, samples per rank)."""


_kept: list[DistributedDataParallel] = []


def data_parallel(model: nn.Module) -> DistributedDataParallel:
    """DDP around a model, kept until the process ends.

    Torch frees its reducer, and with it the group's threads, while it holds the interpreter's lock;
    a thread that lets go of its last collective at that moment waits for the lock, for ever.
    """
    _kept.append(DistributedDataParallel(model))
    return _kept[-1]


def measure(ctx: Context) -> None:
    """The train function: both systems in the same processes."""
    name, rounds, steps = (ctx.config[key] for key in ("model", "rounds", "steps"))
    build, batch = MODELS[name]
    port = ctx.config["port"]
    torch.manual_seed(0)
    ours = build()
    theirs = build()
    theirs.load_state_dict(ours.state_dict())
    sgd = torch.optim.SGD(ours.parameters(), lr=1e-3)
    ours, sgd = ctx.prepare(ours, sgd)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=_RANKS)
    ddp = data_parallel(theirs)
    sgd_ddp = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(ctx.rank)
    x = torch.rand(batch, 1, 32, 32, generator=generator)
    y = torch.randint(10, (batch,), generator=generator)

    def block(model: nn.Module, optimizer: torch.optim.Optimizer, elastic: bool) -> float:
        dist.barrier()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            if elastic:
                ctx.boundary()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    kinds = [("ddp", ddp, sgd_ddp), ("elastix", ours, sgd), ("ddp again", ddp, sgd_ddp)]
    result: dict[str, list[float]] = {kind: [] for kind, _, _ in kinds}
    for number in range(rounds + 2):
        for turn in range(3):
            kind, model, optimizer = kinds[(number + turn) % 3]
            taken = block(model, optimizer, kind == "elastix")
            if number >= 2:  # the first rounds warm caches and DDP's buckets
                result[kind].append(taken)
    if ctx.rank == 0:
        Path(ctx.config["result"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run(model: str, rounds: int, steps: int, directory: Path, under: str) -> dict[str, float]:
    """Measure one model; ratios are elastix over DDP, and DDP over itself.

    Args:
        model: one of MODELS.
        rounds: blocks of each kind.
        steps: in a block.
        directory: for what the run writes.
        under: "local" processes, "ray", or "ray, all readers".
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = directory / f"overhead-{model}.json"
    config: dict[str, Any] = {"model": model, "rounds": rounds, "steps": steps}
    config |= {"port": store.port, "result": str(result)}
    if under == "local":
        run_local(measure, _RANKS, config=config, timeout_s=3600.0)
    else:
        with tempfile.TemporaryDirectory() as folder:
            _run_on_ray(config, Path(folder), readers=under != "ray")
    times = json.loads(result.read_text())
    result.unlink()
    ratios = [ours / ddp for ours, ddp in zip(times["elastix"], times["ddp"], strict=True)]
    noise = [again / ddp for again, ddp in zip(times["ddp again"], times["ddp"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    noise_quartiles = statistics.quantiles(noise, n=4)
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_p25": quartiles[0],
        "ratio_p75": quartiles[2],
        "ddp_vs_ddp": statistics.median(noise),
        "ddp_vs_ddp_p25": noise_quartiles[0],
        "ddp_vs_ddp_p75": noise_quartiles[2],
        "ddp_step_s": statistics.median(times["ddp"]),
        "rounds": len(ratios),
    }


def _run_on_ray(config: dict[str, Any], folder: Path, readers: bool) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=readers,
        dashboard_port=0,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}},
    )
    # Workers import it: `torch.distributed.config`, which pickling by value drags in, has locks.
    train = importlib.import_module("benchmarks.overhead").measure
    try:
        elastix.ElasticTrainer(
            train,
            config=config,
            scaling=elastix.ScalingConfig(num_workers=_RANKS),
            run=elastix.RunConfig(name="overhead", store=str(folder / "store")),
            metrics=readers,
            loggers=[elastix.TensorBoard(folder / "board")] if readers else [],
            quiet=True,
        ).fit()
    finally:
        ray.shutdown()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ray", action="store_true", help="also on Ray, without and with readers")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    places = ["local", "ray", "ray, all readers"] if options.ray else ["local"]
    directory = options.out.parent.resolve()
    for model, under in itertools.product(options.models, places):
        row = model if under == "local" else f"{model} ({under})"
        results[row] = run(model, options.rounds, options.steps, directory, under)
        line = "  ".join(f"{key} {value:.4g}" for key, value in results[row].items())
        print(f"{row}: {line}", flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
