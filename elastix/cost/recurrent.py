"""What an LSTM layer on a CPU computes and keeps, which torch's own operator does not tell.

oneDNN is given such a layer with all its steps as one operator. torch's formulas of FLOPs do not
have it, and where tensors have no data it says that nothing is kept for the backward pass. Other
recurrent layers, and those on tensors of other types, are traced step by step.

Pure: shapes alone. Not here: when a layer runs, and what else is alive then (trace).
"""

from collections.abc import Mapping
from typing import Any

import torch

_KEPT = {4: (8, 20), 2: (4, 12)}
_KEPT_AND_USED = {4: (24, 38), 2: (20, 24)}
"""By the bytes of an element, bytes for each sample and step: for the wider of input and state, and
for the state. The whole is what torch 2.13 takes, within a tenth; the first part of it is written
in the forward pass, and the rest is not resident before the backward pass."""


def layer_flops(given: torch.Tensor, *weights: Any, **_: Any) -> int:  # noqa: ANN401
    """Of the forward pass. The arguments are those of torch's operator."""
    rows = given.numel() // max(1, given.shape[-1])
    return 2 * rows * int(weights[0].numel() + weights[1].numel())


def layer_backward_flops(*given: Any, **options: Any) -> int:  # noqa: ANN401
    """Of the backward pass: gradients of what it was given, and of the weights."""
    return 2 * layer_flops(*given, **options)


def kept_bytes(given: torch.Tensor, result: torch.Tensor) -> int:
    """Bytes that a layer keeps for its backward pass."""
    return _bytes(given, result, _KEPT)


def used_bytes(given: torch.Tensor, result: torch.Tensor) -> int:
    """Bytes that its backward pass uses beside those."""
    return _bytes(given, result, _KEPT_AND_USED) - _bytes(given, result, _KEPT)


def _bytes(given: torch.Tensor, result: torch.Tensor, each: Mapping[int, tuple[int, int]]) -> int:
    width, state = given.shape[-1], result.shape[-1]
    wide, narrow = each[given.element_size()]
    return result.numel() // max(1, state) * (wide * max(width, state) + narrow * state)
