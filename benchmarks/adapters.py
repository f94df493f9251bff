"""What an adapter costs: a script on an elastic group, beside the same script on the peer itself.

Each pair trains the same model on the same data with two processes on this machine over gloo: once
through elastix's adapter, once as the peer runs it (DistributedDataParallel). The runs of a round
take place one after the other, in rotating order. A step is the time from one batch to the next;
the ratio of a round is that of the two runs' median steps. The first steps of a run are left out.
Ray Train's own loop is its functions within a process group, without Ray, as is the adapter's here.
The MLP spends its time in communication, the residual net (`..._convnet`) in its own computation.
Trainer's adapter refuses the second: its batch norms would see parts of a batch.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elastix
from benchmarks.overhead import MODELS
from benchmarks.record import save
from elastix import Context
from elastix.ray_train.reported_checkpoints import ReportedCheckpoints
from elastix.ray_train.torch import TrainLoop
from elastix.testing.local import run_local

_WORKERS = 2
_BATCH = {"mlp": 64, "convnet": 16}  # of both processes
_PARTS = 8  # of a batch that is accumulated
_WARM = 5
Config = Mapping[str, Any]


def parts(config: Config) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """The same for all scripts."""
    torch.manual_seed(0)
    amount = _BATCH[config["model"]] * config["steps"]
    data = TensorDataset(torch.rand(amount, 1, 32, 32), torch.randint(10, (amount,)))
    model = MODELS[config["model"]][0]()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), data


class Times:
    """When each batch was drawn, written down by the first process at the end."""

    def __init__(self, config: Config) -> None:
        self._path = Path(config["result"])
        self._drawn: list[float] = []

    def tick(self) -> None:
        """A batch was drawn."""
        self._drawn.append(time.perf_counter())

    def done(self, rank: int) -> None:
        """Write the median seconds of a step."""
        steps = [
            after - before for before, after in zip(self._drawn, self._drawn[1:], strict=False)
        ]
        if rank == 0:
            self._path.write_text(json.dumps(statistics.median(steps[_WARM:])))


# ------------------------------------------------------------ one script for both of a pair


def fabric(config: Config, ctx: Context | None = None) -> None:
    """Written for Lightning Fabric."""
    from lightning_fabric import Fabric

    model, optimizer, data = parts(config)
    if ctx is None:
        peer = Fabric(accelerator="cpu", strategy="ddp", devices=_WORKERS)
    else:
        peer = Fabric(strategy=elastix.fabric.Strategy(ctx))
    peer.launch()
    model, optimizer = peer.setup(model, optimizer)
    size = _BATCH[config["model"]] // (1 if ctx else _WORKERS)
    loader: Any = peer.setup_dataloaders(DataLoader(data, size, shuffle=True))
    times = Times(config)
    for _ in loader.epochs(1) if ctx else range(1):
        for x, y in loader:
            times.tick()
            optimizer.zero_grad()
            peer.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    times.done(peer.global_rank)


def accelerate(config: Config, ctx: Context | None = None) -> None:
    """Written for Hugging Face Accelerate."""
    from accelerate import Accelerator

    model, optimizer, data = parts(config)
    peer: Any = Accelerator(cpu=True) if ctx is None else elastix.accelerate.Accelerator(ctx)
    size = _BATCH[config["model"]] // (1 if ctx else _WORKERS)
    loader = DataLoader(data, size, shuffle=True)
    model, optimizer, loader = peer.prepare(model, optimizer, loader)
    times = Times(config)
    for _ in loader.epochs(1) if ctx else range(1):
        for x, y in loader:
            times.tick()
            optimizer.zero_grad()
            peer.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    times.done(peer.process_index)


class Classifier(nn.Module):
    """A model as Trainer wants it: it knows its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images and digits to the loss."""
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the names of Classifier's arguments."""
    images, labels = zip(*samples, strict=True)
    return {"x": torch.stack(images), "labels": torch.stack(labels)}


def transformers(config: Config, ctx: Context | None = None) -> None:
    """Written for Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, optimizer, data = parts(config)
    times = Times(config)

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            times.tick()

    args = TrainingArguments(
        output_dir=str(Path(config["result"]).parent / "out"),
        per_device_train_batch_size=_BATCH["mlp"] // _PARTS,
        gradient_accumulation_steps=_PARTS if ctx else _PARTS // _WORKERS,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,  # the search for them would cost the peer alone
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    given = {"args": args, "train_dataset": data, "data_collator": collate, "callbacks": [Ticks()]}
    given |= {"model": Classifier(model), "optimizers": (optimizer, None)}
    peer = Trainer(**given) if ctx is None else elastix.transformers.Trainer(ctx, **given)
    peer.train()
    times.done(dist.get_rank() if ctx is None else ctx.rank)


def ray_train(config: Config, ctx: Context | None = None) -> None:
    """Written for Ray Train; the loop alone, without Ray."""
    if ctx is None:
        _ddp(config)
        return
    from elastix import ray_train as train

    def loop() -> None:
        model, optimizer, data = parts(config)
        model = train.torch.prepare_model(model)
        loader = train.torch.prepare_data_loader(
            DataLoader(data, _BATCH[config["model"]], shuffle=True)
        )
        times = Times(config)
        for _ in loader.epochs(1):
            for x, y in loader:
                times.tick()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        times.done(ctx.rank)

    TrainLoop(loop, ReportedCheckpoints(Path(config["result"]).parent))(ctx)


def _ddp(config: Config) -> None:
    """What Ray Train's prepare_model and prepare_data_loader make of the loop."""
    dist.init_process_group("gloo")
    model, optimizer, data = parts(config)
    model = DistributedDataParallel(model)
    size = _BATCH[config["model"]] // _WORKERS
    loader = DataLoader(data, size, sampler=DistributedSampler(data))
    times = Times(config)
    for x, y in loader:
        times.tick()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    times.done(dist.get_rank())


SCRIPTS: dict[str, Callable[..., None]] = {
    "fabric": fabric,
    "accelerate": accelerate,
    "ray_train": ray_train,
    "transformers": transformers,
}
PAIRS: dict[str, tuple[str, str]] = {
    **{name: (name, "mlp") for name in SCRIPTS},
    **{f"{name}_convnet": (name, "convnet") for name in ("fabric", "accelerate", "ray_train")},
}
"""Key of the results to (script, model)."""


# ------------------------------------------------------------ running them


class Adapted:
    """A script as a train function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, ctx: Context) -> None:
        """Run it."""
        SCRIPTS[self._name](ctx.config, ctx)


def _rank(name: str, config: Config, rank: int, port: int) -> None:
    """One process of the peer's own, as torchrun starts it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(_WORKERS),
        "LOCAL_WORLD_SIZE": str(_WORKERS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    torch.set_num_threads(1)
    SCRIPTS[name](config)


def step_s(pair: str, adapted: bool, steps: int) -> float:
    """Median seconds of a step in one run."""
    name, model = PAIRS[pair]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        config = {"steps": steps, "result": str(result), "model": model}
        if adapted:
            where = Path(folder) / "run"
            run_local(Adapted(name), _WORKERS, config=config, directory=where, timeout_s=600.0)
        else:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            spawn = multiprocessing.get_context("spawn")
            ranks = [
                spawn.Process(target=_rank, args=(name, config, rank, port))
                for rank in range(_WORKERS)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        return float(json.loads(result.read_text()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--only", nargs="+", default=list(PAIRS), choices=PAIRS, help="these pairs")
    options = parser.parse_args()
    taken: dict[tuple[str, bool], list[float]] = {}
    for number in range(options.rounds):
        for name in options.only:
            for adapted in (False, True) if number % 2 else (True, False):
                found = step_s(name, adapted, options.steps)
                taken.setdefault((name, adapted), []).append(found)
    results: dict[str, dict[str, float]] = {}
    for name in options.only:
        ours, peers = taken[name, True], taken[name, False]
        ratios = [mine / theirs for mine, theirs in zip(ours, peers, strict=True)]
        results[name] = {
            "ratio_median": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "step_s": statistics.median(ours),
            "peer_step_s": statistics.median(peers),
            "rounds": len(ratios),
        }
        print(name, "  ".join(f"{key} {value:.4g}" for key, value in results[name].items()))
    save(options.out, results)


if __name__ == "__main__":
    main()
