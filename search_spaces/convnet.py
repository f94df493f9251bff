"""A convolutional net for small images, with a variable number of blocks.

For classifying images of 8 x 8 to 64 x 64 pixels; the block list is what an architecture search
changes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer
from torch import nn

space = ConfigurationSpace(
    name="convnet",
    space=[
        Integer("blocks", (1, 4), default=2),
        Categorical("width", [8, 16, 32, 64], default=16, ordered=True),
        Categorical("kernel", [3, 5], default=3),
        Categorical("skip", [True, False], default=True),
        Float("dropout", (0.0, 0.5), default=0.0),
    ],
)
"""Hyperparameters of `build`; the width doubles with every second block."""


class Block(nn.Module):
    """Convolution, batch norm, ReLU; the input is added if the shapes allow and it is asked for."""

    def __init__(self, inputs: int, outputs: int, kernel: int, skip: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.skip = skip and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        y = torch.relu(self.norm(self.conv(x)))
        return x + y if self.skip else y


def build(config: Mapping[str, Any], channels: int = 1, classes: int = 10) -> nn.Module:
    """The net of a configuration: (N, channels, H, W) to (N, classes) logits."""
    layers: list[nn.Module] = []
    inputs = channels
    for number in range(config["blocks"]):
        outputs = config["width"] * 2 ** (number // 2)
        layers.append(Block(inputs, outputs, config["kernel"], config["skip"]))
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(config["dropout"])]
    return nn.Sequential(*layers, *head, nn.Linear(inputs * 16, classes))
