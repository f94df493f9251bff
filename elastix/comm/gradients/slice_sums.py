"""What one worker has added up of a bucket, slice by slice, in the order of the tree.

A bucket is filled with the gradients of one slice, and taken here before the next. So autograd adds
up nothing over slices, whose order would be another one with other workers. At the end of the step
the sums are reduced over the tree (network.tree_reduction), and the bucket holds the root.

Invariant: what was taken stays, whatever becomes of the group, until the next step begins.
"""

from collections.abc import Collection, Sequence

import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.network import shared_memory, tree_reduction
from elastix.comm.network.process_group import Group
from elastix.comm.network.tree_reduction import Room, Sharing, TreeReduction
from elastix.comm.slice_tree import Node, PartialSums


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

    def lacks(self, number: int) -> bool:
        """Whether slice `number` was not taken yet."""
        return number not in self._taken

    def take(self, number: int) -> None:
        """The bucket is closed, and holds what slice `number` gave. Only of one that it lacks.

        What is in the bucket then is of no slice: it goes on in other memory if nothing is there
        yet to add this to.
        """
        self._taken.add(number)
        node = self._sums.insert(number, self._bucket.flat)
        if self._sums.sums[node] is self._bucket.flat:
            self._sums.sums[node] = self._bucket.exchange(
                self._spare.pop() if self._spare else None
            )

    @property
    def rows(self) -> Sequence[tuple[Node, torch.Tensor]]:
        """The sums that this worker has, by the slices in them: the same for each bucket."""
        return self._sums.in_order()

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
