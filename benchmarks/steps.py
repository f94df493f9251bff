"""Three models whose training step is measured, and the measuring."""

import ctypes
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import elastix
from elastix.comm.network.crew_world import DeviceMesh

_M_MMAP_THRESHOLD = -3


def mlp(width: int = 2048) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(1024, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 256, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def transformer(width: int = 384) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(1000, width), body, nn.Linear(width, 1000))


def images(batch: int, channels: int) -> torch.Tensor:
    return torch.zeros(batch, channels, 32, 32)


def tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 128, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: images(64, 1)),
    "convnet": (convnet, lambda: images(192, 3)),  # beside which 20 MB of libraries are little
    "transformer": (transformer, lambda: tokens(8)),
}


SMALL: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(12),
    "transformer": lambda: transformer(12),
}
"""The same for the first step of a process, with which torch imports what it needs."""

MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "mlp, shard=2": ("mlp", {"shard": 2}),
    "mlp, tensor=2": ("mlp", {"tensor": 2}),
    "transformer, shard=2": ("transformer", {"shard": 2}),
}
"""Model and mesh of workers that are two processes."""


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of an MLP over `tensor`, or those of either over `shard`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    if "tensor" in (mesh.mesh_dim_names or ()):
        kinds = (ColwiseParallel, RowwiseParallel)
        plan: dict[str, ParallelStyle] = {n: kinds[i % 2]() for i, n in enumerate(linear)}
        parallelize_module(model, mesh["tensor"], plan)
        return
    body = list(model.children())[1]
    layers = body.layers if isinstance(body, nn.TransformerEncoder) else model
    for layer in layers.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def measure(ctx: elastix.Context) -> None:
    """A train function: bytes that some steps took at their peak, and seconds of a step."""
    # Freed blocks go back to the system at once, so that what is resident is what is alive.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    name, mesh = ctx.config["model"], ctx.mesh
    build, inputs = MODELS[name]
    batch = inputs()
    warm: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 900, 2))
    warm(images(1, 3)).sum().backward()
    if mesh is not None:
        warm = SMALL[name]()
        parallelize(warm, mesh)
        warm(batch[:2]).square().mean().backward()
        torch.optim.AdamW(warm.parameters(), foreach=False).step()
        batch = batch[: len(batch) // mesh.shape[0]] if "shard" in ctx.config["mesh"] else batch
    before = _status("VmRSS")
    model = build()
    if mesh is not None:
        parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    model, optimizer = ctx.prepare(model, optimizer)
    times = []
    for _ in range(ctx.config["steps"]):
        started = time.perf_counter()
        ctx.boundary()
        model(batch.clone()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    Path(f"{ctx.config['out']}-{ctx.place}").write_text(
        json.dumps({"peak_bytes": peak, "times_s": times})
    )
