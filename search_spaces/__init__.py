"""Architectures to train and to search: one file per space, each with `space` and `build(config)`.

`space` is an `elastix.search.space.Space`; `lr` in it is for the optimizer of the train function,
the rest is for `build`. `space.plus(...)` adds hyperparameters of your own.
"""

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
"""What the choices called `activation` mean."""


class Residual(nn.Module):
    """The sum of what a module makes of its input and the input, projected if shapes ask for it."""

    def __init__(self, inner: nn.Module, project: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.project = project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that `inner` takes; its shape comes out."""
        y: torch.Tensor = self.inner(x)
        return y + (x if self.project is None else self.project(x))
