"""Convolutions along one long axis, then dense layers: for spectra, sensor series, gene expression.

The shape of CANDLE's NT3 (tumour against normal tissue from RNA-seq profiles): few samples, each a
sequence of thousands of values, convolution and pooling first, then a wide head with dropout.
"""

from collections.abc import Mapping
from typing import Any

from ConfigSpace import Categorical, ConfigurationSpace, Float
from torch import nn

from elastix.search.space import Blocks, Space
from search_spaces import ACTIVATIONS

convolution = ConfigurationSpace(
    space=[
        Categorical("filters", [8, 16, 32, 64, 128], default=32, ordered=True),
        Categorical("kernel", [3, 5, 9, 21], default=5, ordered=True),
        Categorical("pool", [1, 2, 4, 10], default=4, ordered=True),
    ]
)
dense = ConfigurationSpace(
    space=[
        Categorical("width", [20, 50, 100, 200], default=50, ordered=True),
        Float("dropout", (0.0, 0.5), default=0.1),
    ]
)

space = Space(
    [
        Float("lr", (1e-4, 1e-1), log=True, default=1e-3),
        Categorical("activation", list(ACTIVATIONS), default="relu"),
    ],
    Blocks("convolutions", convolution, min=1, max=4),
    Blocks("head", dense, min=1, max=3),
)


def build(config: Mapping[str, Any], channels: int = 1, classes: int = 2) -> nn.Module:
    """The net of a configuration: (N, channels, length) to (N, classes) logits, for any length."""
    activation = ACTIVATIONS[config["activation"]]
    layers: list[nn.Module] = []
    inputs = channels
    for part in config["convolutions"]:
        layers += [
            nn.Conv1d(inputs, part["filters"], part["kernel"], padding=part["kernel"] // 2),
            activation(),
            nn.MaxPool1d(part["pool"], ceil_mode=True),  # a rest shorter than the pool counts too
        ]
        inputs = part["filters"]
    layers += [nn.AdaptiveAvgPool1d(16), nn.Flatten()]
    inputs *= 16
    for part in config["head"]:
        layers += [nn.Linear(inputs, part["width"]), activation(), nn.Dropout(part["dropout"])]
        inputs = part["width"]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
