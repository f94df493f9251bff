"""A step of elastix beside plain torch and torch's DDP: one process, one GPU, blocks in turn."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gpu.models import (
    MODELS,
    Terms,
    block,
    built,
    models_for,
    optimizer_of,
    step_of,
    wait_for,
)
from benchmarks.overhead import data_parallel
from elastix import CheckpointConfig, Context
from elastix.errors import ElastixError, TrainError
from elastix.testing.local import run_local
from elastix.testing.local_worker import Gpus
from elastix.train.control.messages import OutcomeKind
from elastix.train.replica.link import Settings
from elastix.train.replica.solo import run_alone

AGAIN = "torch again"
_MOST, _LEAST = 40, 3  # rounds
_LONGEST_S = 90.0  # of a model, its compilation included


@contextlib.contextmanager
def _world_of_one(device: torch.device) -> Iterator[None]:
    """The process group that DDP wants."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def contest(ctx: Context) -> None:
    """The train function: all of them in one process, each with its own model."""
    config = ctx.config
    device, tiny = torch.device(config["device"]), config["tiny"]
    kind = MODELS[config["model"]]
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.optimize_ddp = False  # one graph, as for the others
    with _world_of_one(device):
        steps: dict[str, Callable[[], None]] = {}
        began = time.perf_counter()
        for name in ("torch", "ddp", "elastix"):
            model, batch = built(kind, device, tiny)
            optimizer = optimizer_of(kind, model)
            if name == "elastix":
                model, optimizer = ctx.prepare(model, optimizer)
            backend = "eager" if tiny else "inductor"
            forward: Any = torch.compile(model, backend=backend) if kind.compiled else model
            if name == "ddp":
                forward = data_parallel(forward)
            boundary = ctx.boundary if name == "elastix" else _nothing
            steps[name] = step_of(forward, optimizer, batch, boundary)
            for _ in range(3):
                steps[name]()
            wait_for(device)
        steps[AGAIN] = steps["torch"]
        warm_s = time.perf_counter() - began
        found = in_turn(steps, device, 2 if tiny else kind.steps, config["seconds"])
    Path(config["told"]).write_text(json.dumps({**found, "warm_s": warm_s}), encoding="utf-8")


def _nothing() -> None:
    """Between the steps of torch's."""


def in_turn(
    steps: Mapping[str, Callable[[], None]], device: torch.device, each: int, seconds: float
) -> dict[str, Any]:
    """By name, seconds of a step in one round after the other, in rotating order."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names, deadline = list(steps), time.perf_counter() + seconds
    number = 0
    while number < _LEAST or (number < _MOST and time.perf_counter() < deadline):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            found[name].append(block(steps[name], each, device))
        number += 1
    return {
        "step_s": {name: [total for total, _ in blocks] for name, blocks in found.items()},
        "host_s": {
            name: statistics.median(host for _, host in blocks) for name, blocks in found.items()
        },
    }


def spread(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ours over theirs, round by round."""
    ratios = [one / two for one, two in zip(ours, theirs, strict=True)]
    quarters = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": statistics.median(ratios), "p25": quarters[0], "p75": quarters[2]}


def compared(told: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios, and the medians behind them."""
    took = told["step_s"]
    return {
        "elastix_over_torch": spread(took["elastix"], took["torch"]),
        "elastix_over_ddp": spread(took["elastix"], took["ddp"]),
        "ddp_over_torch": spread(took["ddp"], took["torch"]),
        "torch_over_torch": spread(took[AGAIN], took["torch"]),
        "step_s": {name: statistics.median(values) for name, values in took.items()},
        "host_s": told["host_s"],
        "rounds": len(took["torch"]),
        "warm_s": told["warm_s"],
    }


def measure(terms: Terms) -> dict[str, Any]:
    """See the package. `alone`: why a whole run of one worker, with its journal, could not be."""
    found: dict[str, Any] = {}
    models = models_for(terms.tiny)
    for model in models:
        told = terms.folder / f"{model}.json"
        config = {"model": model, "tiny": terms.tiny, "seconds": terms.seconds / len(models)}
        config |= {"device": str(terms.device), "told": str(told)}
        if "alone" not in found:
            try:
                in_a_run(contest, config, terms)
            except ElastixError as error:
                found["alone"] = str(error)
        if "alone" in found:
            alone(contest, config, terms.device)
        found[model] = compared(json.loads(told.read_text(encoding="utf-8")))
    return found


def in_a_run(train: Callable[[Context], None], config: Mapping[str, Any], terms: Terms) -> None:
    """As a run of one worker, in a process of its own.

    Raises:
        ElastixError: what the train function raised, with its traceback; or that took too long.
    """
    gpus = Gpus() if terms.device.type == "cuda" else None
    directory = Path(tempfile.mkdtemp(dir=terms.folder))
    run_local(train, 1, config=config, directory=directory, gpus=gpus, timeout_s=_LONGEST_S)


def alone(
    train: Callable[[Context], None], config: Mapping[str, Any], device: torch.device
) -> None:
    """In this process, as a trial of a campaign.

    Raises:
        TrainError: what the train function raised, with its traceback.
    """
    settings = Settings(
        directory=Path("/nonexistent"),
        run="gpu",
        seed=0,
        min_workers=1,
        checkpoint=CheckpointConfig(),
        alone=True,
    )
    outcome = run_alone(train, dict(config), settings, lambda _: None, device=device)
    if outcome.kind is not OutcomeKind.FINISHED:
        raise TrainError(f"{outcome.summary}\n{outcome.traceback}")
