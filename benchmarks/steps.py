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

_M_MMAP_THRESHOLD = -3


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 256, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(1000, 384), body, nn.Linear(384, 1000))


def images(batch: int, channels: int) -> torch.Tensor:
    return torch.zeros(batch, channels, 32, 32)


def tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 128, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: images(64, 1)),
    "convnet": (convnet, lambda: images(64, 3)),
    "transformer": (transformer, lambda: tokens(8)),
}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def measure(ctx: elastix.Context) -> None:
    """A train function: bytes that some steps took at their peak, and seconds of a step."""
    # Freed blocks go back to the system at once, so that what is resident is what is alive.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    build, inputs = MODELS[ctx.config["model"]]
    warm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 900, 2))
    warm(images(1, 3)).sum().backward()
    before = _status("VmRSS")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = ctx.prepare(model, optimizer)
    times = []
    for _ in range(ctx.config["steps"]):
        started = time.perf_counter()
        ctx.boundary()
        model(*(inputs(),)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    Path(ctx.config["out"]).write_text(json.dumps({"peak_bytes": peak, "times_s": times}))
