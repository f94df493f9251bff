"""The training function of the Ray Train benchmark, as it runs in each of Ray's workers."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import prepare_model
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from benchmarks.peers.workload import (
    GLOBAL_BATCH,
    VICTIM,
    IndexedSamples,
    StepLog,
    batches_of,
    build_model,
    build_optimizer,
    kill_in_mid_backward,
    load,
)

_STATE_FILE = "state.pt"


@dataclass(frozen=True)
class LoopConfig:
    """What the training function is given, as a dictionary.

    Attributes:
        steps: Steps in the pass.
        kill_step: The step in which the victim dies.
        checkpoint_every: Steps between checkpoints.
        folder: Where the step logs and the victim's stamp go.
    """

    steps: int
    kill_step: int
    checkpoint_every: int
    folder: str


def stamp_path(folder: Path) -> Path:
    """Returns where the victim leaves its stamp."""
    return folder / "kill.json"


def train_loop(config: dict[str, Any]) -> None:
    """Trains for one pass, from the latest checkpoint if there is one.

    Args:
        config: A ``LoopConfig`` as a dictionary.
    """
    settings = LoopConfig(**config)
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    folder = Path(settings.folder)
    model = build_model()
    optimizer = build_optimizer(model)
    step = first_step = _restore(model, optimizer)
    if rank == VICTIM and not stamp_path(folder).exists():
        kill_in_mid_backward(model, lambda: step == settings.kill_step, stamp_path(folder))
    ddp = prepare_model(model)
    dataset = IndexedSamples(settings.steps * GLOBAL_BATCH)
    sampler: DistributedSampler[int] = DistributedSampler(
        dataset, num_replicas=world, rank=rank, shuffle=True
    )
    sampler.set_epoch(0)
    log = StepLog(folder / f"steps-{rank}.jsonl", rank, attempt=_common_start_time())
    for inputs, labels, ids in load(dataset, batches_of(list(sampler), first_step)):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(inputs), labels)
        loss.backward()
        log.write(step, ids.tolist(), world=world, counted=True)
        optimizer.step()
        step += 1
        if step % settings.checkpoint_every == 0:
            _report(model, optimizer, step, loss.item(), writes=rank == 0)
            if _is_over(folder):
                return


def _is_over(folder: Path) -> bool:
    over = [(folder / "over").exists()]
    dist.broadcast_object_list(over, src=0)
    return over[0]


def _common_start_time() -> float:
    start: list[float] = [time.monotonic()]
    dist.broadcast_object_list(start, src=0)
    return start[0]


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / _STATE_FILE, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _report(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float, writes: bool
) -> None:
    metrics = {"step": step, "loss": loss}
    if not writes:
        ray.train.report(metrics)
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / _STATE_FILE)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
