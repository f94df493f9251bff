"""A convolutional net of variable depth: for classifying small images, 8 x 8 to 64 x 64 pixels.

Each block has a hidden width, a kernel, a stride and the choice of a skip connection of its own.
Between blocks the number of channels is the same for all candidates, so a change to one leaves
what all others have learnt in its place; with batch norm after every convolution a candidate
trains within a few epochs. Both suit searches that inherit and give an architecture little time.

The block is the basic one of He et al. 2016 (Deep Residual Learning for Image Recognition), whose
shortcut is a pooling without parameters where it strides.
"""

from collections.abc import Mapping
from typing import Any

from ConfigSpace import Categorical, ConfigurationSpace, Float
from torch import nn

from elastix.search.space import Blocks, Space
from search_spaces import Residual

block = ConfigurationSpace(
    space=[
        Categorical("hidden", [8, 16, 32, 64], default=32, ordered=True),
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


def build(
    config: Mapping[str, Any], channels: int = 1, classes: int = 10, width: int = 32
) -> nn.Module:
    """The net of a configuration: (N, channels, H, W) to (N, classes) logits.

    Args:
        config: a configuration of `space`.
        channels: of an image.
        classes: to tell apart.
        width: channels between blocks.
    """
    layers: list[nn.Module] = [_convolution(channels, width, 3), nn.ReLU()]
    for part in config["body"]:
        layers += (_block(width, **part), nn.ReLU())
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(config["dropout"])]
    return nn.Sequential(*layers, *head, nn.Linear(width * 16, classes))


def _block(width: int, hidden: int, kernel: int, stride: int, skip: bool) -> nn.Module:
    inner = nn.Sequential(
        _convolution(width, hidden, kernel, stride),
        nn.ReLU(),
        _convolution(hidden, width, kernel),
    )
    if not skip:
        return inner
    return Residual(inner, None if stride == 1 else nn.AvgPool2d(stride, ceil_mode=True))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    """Padded, so that no stride makes an image vanish."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )
