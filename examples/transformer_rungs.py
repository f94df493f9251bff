"""Search a small transformer: a space with conditions, and rungs that let the better half go on.

An image of a digit is a sequence of eight rows. Each layer mixes rows by attention, which has
heads, or by a convolution, which has a kernel: neither has what belongs to the other.
`python examples/transformer_rungs.py [STORE]`; under a minute on two cores.
"""

import argparse
import sys
import tempfile
from collections import Counter
from typing import Any

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastix
from elastix import Blocks, Categorical, ConfigurationSpace, EqualsCondition, Float, Space

WIDTH = 32

layer = ConfigurationSpace()
mixer = Categorical("mixer", ["attention", "convolution"], default="attention")
heads = Categorical("heads", [1, 2, 4], default=2, ordered=True)
kernel = Categorical("kernel", [3, 5], default=3, ordered=True)
layer.add(mixer, heads, kernel, Categorical("ratio", [1, 2, 4], default=2, ordered=True))
layer.add(
    EqualsCondition(heads, mixer, "attention"),  # there are heads only beside attention
    EqualsCondition(kernel, mixer, "convolution"),
)
space = Space([Float("lr", (1e-4, 1e-1), log=True, default=3e-3)], Blocks("body", layer, max=4))


class Attention(nn.Module):
    """Rows attend to each other: (N, 8, WIDTH) to the same."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return mixed


class Convolution(nn.Module):
    """Rows look at their neighbours: (N, 8, WIDTH) to the same."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel // 2, groups=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return mixed


class Layer(nn.Module):
    """Mixes rows, then looks at each by itself."""

    def __init__(self, mixer: str, ratio: int, heads: int = 0, kernel: int = 0) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = Attention(heads) if mixer == "attention" else Convolution(kernel)
        wide = ratio * WIDTH
        self.feed = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.before(x))
        fed: torch.Tensor = self.feed(self.between(x))
        return x + fed


class Places(nn.Module):
    """Adds to each row what is learned of its place."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.places


def build(config: dict[str, Any]) -> nn.Module:
    """(N, 8, 8) images to (N, 10) logits."""
    body = [Layer(**block) for block in config["body"]]
    return nn.Sequential(
        nn.Linear(8, WIDTH), Places(), *body, nn.Flatten(), nn.Linear(8 * WIDTH, 10)
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def accuracy(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def train(ctx: elastix.Context) -> None:
    """Four epochs, a report after each: a rung may hold it after the first or the second."""
    training, validation = digits()
    model = build(ctx.config)
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(training, batch_size=64).epochs(4):
        for images, labels in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ctx.report(**ctx.evaluate(accuracy, validation, batch_size=400))


def main() -> int:
    """Search, and say how far trials came."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.add_argument("store", nargs="?", help="directory; a new temporary one by default")
    store = parser.parse_args().store or tempfile.mkdtemp(prefix="elastix-")
    ray.init(log_to_driver=False)
    results = elastix.Campaign(
        train,
        space=space,
        searcher=elastix.Evolution(population=4, sample=2),
        metric="accuracy",
        budget=elastix.Budget(trials=16, parallel=2),
        rungs=elastix.Asha(first=1, eta=2, last=4),
        scaling=elastix.ScalingConfig(cpus_per_worker=0.5),
        run=elastix.RunConfig(name="transformer-rungs", store=store),
    ).run()
    levels = Counter(len(trial.results) for trial in results)
    print(f"\n{results.best}: {results.best.config}")
    for level, count in sorted(levels.items()):
        print(f"{count} trials ended after {level} of 4 epochs")
    print(f"{sum(level * count for level, count in levels.items())} epochs in all, not 64")
    return 0 if results.best.metrics["accuracy"] > 0.8 and set(levels) <= {1, 2, 4} else 1


if __name__ == "__main__":
    sys.exit(main())
