"""A convolutional net of variable depth: for classifying small images, 8 x 8 to 64 x 64 pixels.

Each block has a width, a kernel, a stride and the choice of a skip connection of its own. With
batch norm after every convolution it trains within a few epochs, so it suits searches that give
an architecture little.
"""

from collections.abc import Mapping
from typing import Any

from ConfigSpace import Categorical, ConfigurationSpace, Float
from torch import nn

from elastix.search.space import Blocks, Space
from search_spaces import Residual

block = ConfigurationSpace(
    space=[
        Categorical("width", [8, 16, 32, 64], default=16, ordered=True),
        Categorical("kernel", [3, 5], default=3),
        Categorical("stride", [1, 2], default=1),
        Categorical("skip", [True, False], default=True),
    ]
)

space = Space(
    [
        Float("lr", (1e-4, 1e-1), log=True, default=1e-3),
        Float("dropout", (0.0, 0.5), default=0.0),
    ],
    Blocks("body", block, min=1, max=6),
)


def build(config: Mapping[str, Any], channels: int = 1, classes: int = 10) -> nn.Module:
    """The net of a configuration: (N, channels, H, W) to (N, classes) logits."""
    layers: list[nn.Module] = []
    inputs = channels
    for part in config["body"]:
        layers.append(_block(inputs, part["width"], part["kernel"], part["stride"], part["skip"]))
        inputs = part["width"]
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(config["dropout"])]
    return nn.Sequential(*layers, *head, nn.Linear(inputs * 16, classes))


def _block(inputs: int, outputs: int, kernel: int, stride: int, skip: bool) -> nn.Module:
    """Convolution, batch norm, ReLU; padded, so that no stride makes an image vanish."""
    inner = nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )
    if not skip:
        return inner
    alike = inputs == outputs and stride == 1
    return Residual(inner, None if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False))
