"""A transformer encoder of variable depth: for classifying sequences of tokens.

Text, event logs, k-mers of DNA. Width is one for the whole net; each layer has its own number of
heads and its own feed-forward. Layers keep their shapes when one is inserted or removed elsewhere,
so children inherit nearly everything.
"""

from collections.abc import Mapping
from typing import Any

import torch
from ConfigSpace import Categorical, ConfigurationSpace, Float
from torch import nn

from elastix.search.space import Blocks, Space
from search_spaces import ACTIVATIONS, Residual

layer = ConfigurationSpace(
    space=[
        Categorical("heads", [1, 2, 4, 8], default=4, ordered=True),
        Categorical("ratio", [1, 2, 4], default=2, ordered=True),
        Categorical("activation", list(ACTIVATIONS), default="gelu"),
    ]
)

space = Space(
    [
        Float("lr", (1e-5, 1e-2), log=True, default=1e-3),
        Float("dropout", (0.0, 0.3), default=0.0),
        Categorical("width", [32, 64, 128], default=64, ordered=True),
    ],
    Blocks("body", layer, min=1, max=6),
)


class Attention(nn.Module):
    """Every token attends to every other one, after layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to the same."""
        y = self.norm(x)
        z: torch.Tensor = self.attention(y, y, y, need_weights=False)[0]
        return z


class Embedding(nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, T) whole numbers to (N, T, width); T at most `length`."""
        vectors: torch.Tensor = self.tokens(tokens)
        return vectors + self.places[: tokens.shape[1]]


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to (N, width)."""
        return x.mean(dim=1)


def build(
    config: Mapping[str, Any], vocabulary: int = 256, length: int = 64, classes: int = 10
) -> nn.Module:
    """The net of a configuration: (N, T) tokens below `vocabulary` to (N, classes) logits."""
    width, dropout = config["width"], config["dropout"]
    layers: list[nn.Module] = [Embedding(vocabulary, length, width)]
    for block in config["body"]:
        inner = block["ratio"] * width
        feed = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            ACTIVATIONS[block["activation"]](),
            nn.Dropout(dropout),
            nn.Linear(inner, width),
        )
        layers += [Residual(Attention(width, block["heads"], dropout)), Residual(feed)]
    return nn.Sequential(*layers, nn.LayerNorm(width), Mean(), nn.Linear(width, classes))
