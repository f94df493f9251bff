"""Fully connected layers of one width: for tabular data, and as the plainest of baselines."""

from collections.abc import Mapping
from typing import Any

from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer
from torch import nn

space = ConfigurationSpace(
    name="mlp",
    space=[
        Integer("layers", (1, 6), default=2),
        Categorical("width", [16, 32, 64, 128, 256], default=64, ordered=True),
        Float("dropout", (0.0, 0.5), default=0.0),
    ],
)
"""Hyperparameters of `build`."""


def build(config: Mapping[str, Any], inputs: int = 64, classes: int = 10) -> nn.Module:
    """The net of a configuration: (N, ...) with `inputs` values a sample to (N, classes) logits."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(config["layers"]):
        layers += [nn.Linear(inputs, config["width"]), nn.ReLU(), nn.Dropout(config["dropout"])]
        inputs = config["width"]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
