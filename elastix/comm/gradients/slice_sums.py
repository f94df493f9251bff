"""What one worker has added up of a bucket, slice by slice, in the order of the tree.

A bucket is filled with the gradients of one slice, and taken here before the next. So autograd adds
up nothing over slices, whose order would be another one with other workers. At the end of the step
the sums are reduced over the tree (network.tree_reduction), and the bucket holds the root.

Invariant: what was taken stays, whatever becomes of the group, until the next step begins.
"""

from collections.abc import Collection

import torch

from elastix.comm.gradients.buckets import Bucket
from elastix.comm.network import shared_memory, tree_reduction
from elastix.comm.network.process_group import Group
from elastix.comm.network.tree_reduction import Room, Sharing, TreeReduction
from elastix.comm.slice_tree import PartialSums


class SliceSums:
    """See the module."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._sums: PartialSums[torch.Tensor] = PartialSums((), 1, self._add)
        self._taken: set[int] = set()
        self._spare: list[torch.Tensor] = []  # memory of sums that are not needed any more
        self._room: Room | None = None

    def begin(self, present: Collection[int], slices: int) -> None:
        """A step begins; `present` are the slices with samples."""
        self._spare += self._sums.sums.values()
        self._sums = PartialSums(present, slices, self._add)
        self._taken = set()

    def take(self, number: int, samples: int) -> None:
        """The bucket is filled with what slice `number` gave; once for each slice."""
        if number in self._taken:
            return
        self._taken.add(number)
        self._bucket.close(samples)
        flat = self._bucket.flat
        node = self._sums.insert(number, flat)
        if self._sums.sums[node] is flat:  # nothing to add it to yet
            kept = self._spare.pop() if self._spare else torch.empty_like(flat)
            self._sums.sums[node] = kept.copy_(flat)

    def launch(self, group: Group, sharing: Sharing) -> TreeReduction:
        """Start the reduction of all sums into the bucket."""
        rows = [row for _, row in self._sums.in_order()]
        into = self._bucket.flat
        room = self._room_for(len(rows), group)
        return tree_reduction.begin(group, rows, sharing, self._bucket.reduce, into, room)

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Into memory of this object's; the bucket's stays as it is."""
        combine = tree_reduction.combining(self._bucket.reduce)
        out, other = (right, left) if left is self._bucket.flat else (left, right)
        combine(left, right, out=out)
        if other is not self._bucket.flat:
            self._spare.append(other)
        return out

    def _room_for(self, rows: int, group: Group) -> Room | None:
        """The same as in the step before, unless another number of rows has to go there."""
        like = self._bucket.flat
        small = like.nbytes < shared_memory.FROM_BYTES  # of a row: so it is the same for all
        if small or not self._bucket.shared or not group.shares_memory or like.device.type != "cpu":
            return None
        if self._room is None or not self._room.fits(rows, like):
            self._room = Room(rows, like)
        return self._room
