"""What an adapter costs: the same training loop, written for elastix and for a peer.

Each script trains the same model on the same data in a run of two workers on this machine; the runs
of a round take place one after the other, in rotating order, and the ratio of a round is that of
its median step times, from one batch to the next. The first steps of a run are left out.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastix
from benchmarks.overhead import mlp
from benchmarks.record import save
from elastix import Context
from elastix.ray_train.reported_checkpoints import ReportedCheckpoints
from elastix.ray_train.torch import TrainLoop
from elastix.testing.local import run_local

_WORKERS = 2
_BATCH = 64
_WARM = 5


def parts(ctx: Context) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """The same for all scripts."""
    torch.manual_seed(0)
    amount = _BATCH * ctx.config["steps"]
    data = TensorDataset(torch.rand(amount, 1, 32, 32), torch.randint(10, (amount,)))
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), data


class Times:
    """When each batch was drawn, written down by the first worker at the end."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._drawn: list[float] = []

    def tick(self) -> None:
        """A batch was drawn."""
        self._drawn.append(time.perf_counter())

    def done(self) -> None:
        """Write the median seconds of a step."""
        steps = [
            after - before for before, after in zip(self._drawn, self._drawn[1:], strict=False)
        ]
        if self._ctx.rank == 0:
            Path(self._ctx.config["result"]).write_text(
                json.dumps(statistics.median(steps[_WARM:]))
            )


def plain(ctx: Context) -> None:
    """Written for elastix."""
    model, optimizer, data = parts(ctx)
    model, optimizer = ctx.prepare(model, optimizer)
    times = Times(ctx)
    for epoch in ctx.loader(data, batch_size=_BATCH).epochs(1):
        for x, y in epoch:
            times.tick()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    times.done()


def fabric(ctx: Context) -> None:
    """Written for Lightning Fabric."""
    from lightning_fabric import Fabric

    model, optimizer, data = parts(ctx)
    peer = Fabric(strategy=elastix.fabric.Strategy(ctx))
    peer.launch()
    model, optimizer = peer.setup(model, optimizer)
    loader = peer.setup_dataloaders(DataLoader(data, _BATCH, shuffle=True))
    times = Times(ctx)
    for _ in loader.epochs(1):  # type: ignore[union-attr]
        for x, y in loader:
            times.tick()
            optimizer.zero_grad()
            peer.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    times.done()


def accelerate(ctx: Context) -> None:
    """Written for Hugging Face Accelerate."""
    model, optimizer, data = parts(ctx)
    peer = elastix.accelerate.Accelerator(ctx)
    loader = DataLoader(data, _BATCH, shuffle=True)
    model, optimizer, loader = peer.prepare(model, optimizer, loader)
    times = Times(ctx)
    for _ in loader.epochs(1):
        for x, y in loader:
            times.tick()
            optimizer.zero_grad()
            peer.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    times.done()


def ray_train(ctx: Context) -> None:
    """Written for Ray Train; the loop alone, without Ray."""
    from elastix import ray_train as train

    def loop() -> None:
        model, optimizer, data = parts(ctx)
        model = train.torch.prepare_model(model)
        loader = train.torch.prepare_data_loader(DataLoader(data, _BATCH, shuffle=True))
        times = Times(ctx)
        for _ in loader.epochs(1):
            for x, y in loader:
                times.tick()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        times.done()

    TrainLoop(loop, ReportedCheckpoints(Path(ctx.config["result"]).parent))(ctx)


SCRIPTS: dict[str, Callable[[Context], None]] = {
    "elastix": plain,
    "fabric": fabric,
    "accelerate": accelerate,
    "ray_train": ray_train,
}


def step_s(train: Callable[[Context], None], steps: int) -> float:
    """Median seconds of a step in one run."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        config = {"steps": steps, "result": str(result)}
        run_local(train, _WORKERS, config=config, directory=Path(folder) / "run", timeout_s=600.0)
        return float(json.loads(result.read_text()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    options = parser.parse_args()
    names = list(SCRIPTS)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            taken[name].append(step_s(SCRIPTS[name], options.steps))
    results: dict[str, dict[str, float]] = {}
    for name in names[1:]:
        ratios = [peer / ours for peer, ours in zip(taken[name], taken["elastix"], strict=True)]
        results[name] = {
            "ratio_median": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "step_s": statistics.median(taken[name]),
            "rounds": len(ratios),
        }
        print(name, "  ".join(f"{key} {value:.4g}" for key, value in results[name].items()))
    save(options.out, results)


if __name__ == "__main__":
    main()
