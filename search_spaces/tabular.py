"""Residual dense nets over several groups of features: for tabular data from several sources.

The shape of CANDLE's Uno (drug response from gene expression, drug descriptors and doses): each
group of features goes through a tower of its own, what comes out is joined and goes through the
trunk to a number to predict. Towers have one architecture and weights each of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ConfigSpace import Categorical, ConfigurationSpace, Float
from torch import nn

from elastix.search.space import Blocks, Space
from search_spaces import ACTIVATIONS, Residual


def _layer() -> ConfigurationSpace:
    return ConfigurationSpace(
        space=[
            Categorical("width", [32, 64, 128, 256], default=64, ordered=True),
            Categorical("activation", list(ACTIVATIONS), default="relu"),
            Categorical("residual", [True, False], default=True),
        ]
    )


space = Space(
    [
        Float("lr", (1e-4, 1e-1), log=True, default=1e-3),
        Float("dropout", (0.0, 0.5), default=0.1),
    ],
    Blocks("tower", _layer(), min=0, max=4),
    Blocks("trunk", _layer(), min=1, max=6),
)


class Towers(nn.Module):
    """One tower for each group of features; their outputs side by side."""

    def __init__(self, sizes: Sequence[int], towers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.towers = nn.ModuleList(towers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, sum of sizes) to (N, sum of the towers' outputs)."""
        parts = torch.split(x, self.sizes, dim=1)
        return torch.cat([self.towers[i](parts[i]) for i in range(len(self.sizes))], dim=1)


def build(
    config: Mapping[str, Any], inputs: Sequence[int] = (32, 24, 8), outputs: int = 1
) -> nn.Module:
    """The net of a configuration.

    Args:
        config: of `space`.
        inputs: size of each group of features, as they stand side by side in a sample.
        outputs: how many numbers to predict.

    Returns:
        (N, sum of inputs) to (N, outputs).
    """
    towers, joined = [], 0
    for size in inputs:
        layers, width = _stack(config["tower"], size, config["dropout"])
        towers.append(layers)
        joined += width
    trunk, width = _stack(config["trunk"], joined, config["dropout"])
    return nn.Sequential(Towers(inputs, towers), trunk, nn.Linear(width, outputs))


def _stack(
    blocks: Sequence[Mapping[str, Any]], inputs: int, dropout: float
) -> tuple[nn.Module, int]:
    """The layers of a sequence, and the width that comes out."""
    layers: list[nn.Module] = []
    for block in blocks:
        width = block["width"]
        inner = nn.Sequential(
            nn.Linear(inputs, width), ACTIVATIONS[block["activation"]](), nn.Dropout(dropout)
        )
        project = None if inputs == width else nn.Linear(inputs, width, bias=False)
        layers.append(Residual(inner, project) if block["residual"] else inner)
        inputs = width
    return nn.Sequential(*layers), inputs
