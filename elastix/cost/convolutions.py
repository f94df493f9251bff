"""What a convolution on a CPU holds beside its operands: copies in the layout that oneDNN works on.

Pure: shapes alone. Not here: when a convolution runs, and what else is alive then (trace).
"""

from collections.abc import Sequence
from typing import Any

import torch

_BLOCK = 16  # channels


def copied_bytes(given: Sequence[Any], out: Any) -> int:  # noqa: ANN401 - a tensor, or gradients
    """Bytes that a convolution holds at its peak beside what it reads and writes.

    oneDNN copies both into a layout with channels in blocks of 16; images with fewer channels it
    reads as they are. Forward, the copy of the result is there with that of the images, and then
    with the result. Backward, the gradient of the images is computed likewise, and after it that
    of the weights, with a copy of each of its two factors.

    Numbers of 64 bits torch multiplies itself, as a matrix that has each pixel's neighbourhood.

    Args:
        given: images and weights; backward, the gradient of the result before these.
        out: the result; backward, the gradients of images and weights.
    """
    forward = isinstance(out, torch.Tensor)
    result, images, weights = (out, *given[:2]) if forward else given[:3]
    if images.dtype == torch.float64:
        dilation, transposed = given[5 if forward else 6 :][:2]
        return _neighbourhoods(images if transposed else result, weights, dilation)
    if forward:
        copies = _blocked(result) + max(0, _read(images) - result.nbytes)
    else:
        below = 0 if out[0] is None else _blocked(out[0]) - out[0].nbytes
        copies = _blocked(result) + max(_read(images), below)
    return int(copies + weights.nbytes)


def _neighbourhoods(images: torch.Tensor, weights: torch.Tensor, dilation: Sequence[int]) -> int:
    """Bytes of that matrix, for a group of channels; if they are dilated, for one image."""
    pixels = images.numel() // max(1, images.shape[0] * images.shape[1])
    of_one: int = weights[0].numel() * pixels * images.element_size()
    return of_one if any(step > 1 for step in dilation) else of_one * int(images.shape[0])


def _read(images: torch.Tensor) -> int:
    """Bytes of a copy of what a convolution reads."""
    return _blocked(images) if images.shape[1] >= _BLOCK else 0


def _blocked(images: torch.Tensor) -> int:
    """Bytes with as many channels as fill blocks."""
    channels = images.shape[1]
    return images.nbytes * -(-channels // _BLOCK) * _BLOCK // max(1, channels)
