"""Fully connected layers: for tabular data, and as the plainest of baselines.

Depth and the width of each layer are searched. Inputs of any shape are flattened.
"""

from collections.abc import Mapping
from typing import Any

from ConfigSpace import Categorical, ConfigurationSpace, Float
from torch import nn

from elastix.search.space import Blocks, Space
from search_spaces import ACTIVATIONS

layer = ConfigurationSpace(
    space=[
        Categorical("width", [16, 32, 64, 128, 256], default=64, ordered=True),
        Categorical("activation", list(ACTIVATIONS), default="relu"),
    ]
)

space = Space(
    [
        Float("lr", (1e-4, 1e-1), log=True, default=1e-3),
        Float("dropout", (0.0, 0.5), default=0.0),
    ],
    Blocks("body", layer, min=1, max=6),
)


def build(config: Mapping[str, Any], inputs: int = 64, classes: int = 10) -> nn.Module:
    """The net of a configuration: (N, ...) with `inputs` values a sample to (N, classes) logits."""
    layers: list[nn.Module] = [nn.Flatten()]
    for block in config["body"]:
        layers += [nn.Linear(inputs, block["width"]), ACTIVATIONS[block["activation"]]()]
        layers.append(nn.Dropout(config["dropout"]))
        inputs = block["width"]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
