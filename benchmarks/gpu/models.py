"""The two models, a step of theirs, and under what terms a part measures."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.overhead import Block


@dataclass(frozen=True)
class Terms:
    """What a part is told.

    Attributes:
        device: with its index, if it is a GPU.
        tiny: as small as can be, to see that it runs.
        seconds: for how long to repeat what is measured; what comes before is not counted.
        folder: for files, in memory where there is room.
    """

    device: torch.device
    tiny: bool
    seconds: float
    folder: Path


class Convnet(nn.Module):
    """Residual blocks with batch norm; 11 M parameters if it is not tiny."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for before, after in zip([width, *widths], widths, strict=False):
            blocks += [Block(before, after, 1 if before == after else 2), Block(after, after, 1)]
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8 * width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) to (N, 1000)."""
        found: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return found


class Layer(nn.Module):
    """Causal attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to the same."""
        shape = (*x.shape[:2], 3, self.heads, -1)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class Transformer(nn.Module):
    """A small language model; 18 M parameters if it is not tiny."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, max(1, width // 64)) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T) to (N, T, words)."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


@dataclass(frozen=True)
class Kind:
    """One of the models.

    Attributes:
        build, batch: take whether they are to be tiny.
        compiled: run it through torch.compile.
        optimizer: as `elastix estimate` knows it.
        steps: in a row, in one measurement.
    """

    build: Callable[[bool], nn.Module]
    batch: Callable[[bool], torch.Tensor]
    compiled: bool
    channels_last: bool
    optimizer: str
    steps: int = 10


def _images(tiny: bool, samples: int = 128) -> torch.Tensor:
    return torch.zeros(4, 3, 16, 16) if tiny else torch.zeros(samples, 3, 64, 64)


def _words(tiny: bool, samples: int = 16) -> torch.Tensor:
    return torch.zeros((2, 16) if tiny else (samples, 512), dtype=torch.long)


_CONVNET = Kind(
    build=lambda tiny: Convnet(4 if tiny else 64),
    batch=_images,
    compiled=False,
    channels_last=True,
    optimizer="sgd",
)
_TRANSFORMER = Kind(
    build=lambda tiny: Transformer(16, 1, 64) if tiny else Transformer(512, 3, 8192),
    batch=_words,
    compiled=True,
    channels_last=False,
    optimizer="adamw",
)


MODELS: dict[str, Kind] = {
    "convnet": _CONVNET,
    "transformer": _TRANSFORMER,
    # Here the GPU is the bottleneck, not the thread that launches kernels.
    "convnet_large": replace(_CONVNET, batch=partial(_images, samples=1024), steps=4),
    "transformer_large": replace(
        _TRANSFORMER, batch=partial(_words, samples=128), compiled=False, steps=4
    ),
}
"""The large ones have eight times the batch, and are not compiled."""


def models_for(tiny: bool) -> list[str]:
    """The names of those to measure: where all are tiny, none is larger than another."""
    return [name for name in MODELS if not (tiny and name.endswith("_large"))]


def optimizer_of(kind: Kind, model: nn.Module) -> torch.optim.Optimizer:
    """As torch makes it on this device, if nothing is said."""
    if kind.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, as if the first class was always right."""
    flat = output.flatten(0, -2)
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device))


def built(kind: Kind, device: torch.device, tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    """Model and batch, equal each time, on the device."""
    torch.manual_seed(0)
    model, batch = kind.build(tiny).to(device), kind.batch(tiny)
    if batch.is_floating_point():
        batch = torch.rand(batch.shape)
    batch = batch.to(device)
    if kind.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = batch.to(memory_format=torch.channels_last)
    return model, batch


def step_of(
    forward: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    boundary: Callable[[], Any] = lambda: None,
) -> Callable[[], None]:
    """What takes one step, and on a GPU does not wait for it."""

    def step() -> None:
        boundary()
        with torch.autocast(batch.device.type, torch.bfloat16):
            output = forward(batch)
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wait_for(device: torch.device) -> None:
    """Until all that was begun on the device is over."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block(step: Callable[[], None], steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, of so many in a row; and those of the training thread alone."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter() - started
    wait_for(device)
    return (time.perf_counter() - started) / steps, issued / steps
