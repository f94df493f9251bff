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

    Args:
        given: images and weights; backward, the gradient of the result before these.
        out: the result; backward, the gradients of images and weights.
    """
    if isinstance(out, torch.Tensor):
        images, weights = given[:2]
        copies = _blocked(out) + max(0, _read(images) - out.nbytes)
    else:
        result, images, weights = given[:3]
        below = 0 if out[0] is None else _blocked(out[0]) - out[0].nbytes
        copies = _blocked(result) + max(_read(images), below)
    return copies + int(weights.nbytes)


def _read(images: torch.Tensor) -> int:
    """Bytes of a copy of what a convolution reads."""
    return _blocked(images) if images.shape[1] >= _BLOCK else 0


def _blocked(images: torch.Tensor) -> int:
    """Bytes with as many channels as fill blocks."""
    channels = images.shape[1]
    return images.nbytes * -(-channels // _BLOCK) * _BLOCK // max(1, channels)
