"""Digests of what slices give: of their gradients, and of what they change in buffers.

Of a slice that is computed again, or that somebody else computes too (train.replica.recomputation).
Taken of buckets when they are filled, so what is compared is what would be added up.
"""

from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.state import raw_bytes


class SliceDigest:
    """Of one computation of a slice. Buckets come in order."""

    def __init__(self) -> None:
        self._gradients = blake3()
        self._buffers = blake3()

    def add(self, bucket: Bucket) -> None:
        """A bucket that is filled, and closed."""
        found = self._gradients if isinstance(bucket, GradientBucket) else self._buffers
        found.update(raw_bytes(bucket.flat).numpy().data)

    @property
    def result(self) -> tuple[int, int]:
        """Gradients, buffers."""
        return number(self._gradients), number(self._buffers)


@dataclass(frozen=True)
class Sum:
    """What a worker has added up of some slices.

    Attributes:
        norm: of its gradients.
        digest: of all of it.
    """

    norm: float
    digest: bytes


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Of its shape, type and elements."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    found = blake3(repr((tuple(dense.shape), str(dense.dtype))).encode())
    return found.update(raw_bytes(dense).numpy().data).digest()


def number(digest: Any) -> int:  # noqa: ANN401 - blake3 has no types
    """As one that fits an int64 with either sign."""
    return int.from_bytes(digest.digest(8)) >> 2
