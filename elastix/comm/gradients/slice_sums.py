"""What one worker has added up of a bucket, slice by slice, in the order of the tree.

Autograd adds up nothing over slices, whose order would be another one with other workers. What a
slice gives is added here before the next one begins: gradient after gradient while they come
(`collect`), or the whole bucket, which is filled first. At the end of the step the sums are reduced
over the tree (network.tree_reduction), and the bucket holds the root.

Sums that this worker is going to end with lie from the start where the others read them, if they
share memory, so nothing is copied in the end. Who is handed slices of a lost worker ends with other
sums, and copies.

Invariant: what was taken stays, whatever becomes of the group, until the next step begins.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

import torch

from elastix.comm.gradients.bucket import Bucket, fresh_memory
from elastix.comm.network import tree_reduction
from elastix.comm.network.process_group import Group
from elastix.comm.network.tree_reduction import Root, Sharing, TreeReduction
from elastix.comm.slice_tree import Node, PartialSums


class SliceSums:
    """See the module.

    Attributes:
        scale: what the values of the root are multiplied by.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._combine = tree_reduction.combining(bucket.reduce)
        self._sums: PartialSums[_Row] = PartialSums((), 1, self._merge)
        self._taken: set[int] = set()
        self._spare: list[_Row] = []  # memory of sums that are not needed any more
        self._beside: list[_Row] = []  # what the bucket has for sums
        self._places: dict[int, int] = {}  # which of it is for the sum that begins with a slice
        self.scale = 1.0
        self._collecting: int | None = None  # the slice whose gradients come one by one
        self._path: list[tuple[_Row, bool]] = []  # what it is added to; whether that comes before
        self._first: _Row | None = None  # where it goes if there is nothing
        self._start = 0  # what of it was not collected begins there
        self._value: _Row | None = None  # the sum that it has come to

    def begin(
        self, present: Collection[int], slices: int, nodes: Sequence[Node] = (), scale: float = 1.0
    ) -> None:
        """A step begins.

        Args:
            present: slices with samples.
            slices: leaves of the tree.
            nodes: the sums that this worker is going to end with, as far as is known.
            scale: what the values of the root are multiplied by.
        """
        self._keep(self._sums.sums.values())
        self._sums = PartialSums(present, slices, self._merge)
        self._taken, self.scale = set(), scale
        self.begin_slice()
        self._bucket.provide(len(nodes))
        self._places = {
            min(number for number in node.slices if number in present): place
            for place, node in enumerate(nodes)
        }

    def begin_slice(self) -> None:
        """Nothing was collected, or it was a placeholder's."""
        self._collecting = None

    def lacks(self, number: int) -> bool:
        """Whether slice `number` was not taken yet."""
        return number not in self._taken

    def collect(self, number: int) -> None:
        """Gradients of that slice, which is lacking, come one by one: see `add`."""
        self._meet(number)
        self._collecting = number

    def add(self, place: int, gradient: torch.Tensor | None) -> None:
        """One of them, each once; None for zeros."""
        if self._first is not None:
            into = self._first.views[place]
            into.zero_() if gradient is None else into.copy_(gradient)
        for row, before in self._path:
            mine = row.views[place]
            if gradient is None:
                gradient = mine.add_(0)  # -0.0 becomes 0.0
            else:
                left, right = (mine, gradient) if before else (gradient, mine)
                gradient = self._combine(left, right, out=mine)

    def take(self, number: int) -> None:
        """The bucket is closed, and holds what slice `number` gave, but for what was collected.

        Only of one that is lacking.
        """
        if self._collecting != number:
            self._meet(number)
        self._start = self._bucket.elements if self._collecting == number else 0
        self._value = _Row(self._bucket, self._bucket.flat, beside=True)
        if self._first is not None:
            self._first.flat[self._start :].copy_(self._value.flat[self._start :])
            self._value = self._first
        self._taken.add(number)
        self._sums.insert(number, self._value)
        self._collecting = self._first = self._value = None

    @property
    def rows(self) -> Sequence[tuple[Node, torch.Tensor]]:
        """The sums that this worker has, by the slices in them: the same for each bucket."""
        return [(node, row.flat) for node, row in self._sums.in_order()]

    def launch(self, group: Group, sharing: Sharing) -> TreeReduction:
        """Start the reduction of all sums into the bucket."""
        bucket, rows = self._bucket, [row for _, row in self.rows]
        seen = bucket.room is not None and group.shares_memory and group.size > 1
        if seen and not _same(rows, bucket.rows):
            bucket.provide(len(rows), anew=True)
            for into, row in zip(bucket.rows, rows, strict=True):
                into.copy_(row)
            rows = bucket.rows
        root = Root(bucket.flat, self.scale, bucket.elements)
        room = bucket.room if seen else None
        return tree_reduction.begin(group, rows, sharing, bucket.reduce, root, room)

    def _meet(self, number: int) -> None:
        """Nothing of that slice was added yet."""
        met = self._sums.path(number)[1]
        self._path = [(self._sums.sums[node], node.slices.start < number) for node in met]
        if self._first is not None:
            self._keep([self._first])
        self._first = None if met else self._memory(number)

    def _merge(self, left: "_Row", right: "_Row") -> "_Row":
        """What was not collected, into the memory of what the slice meets."""
        value, start = self._value, self._start
        met = right if left is value else left
        self._combine(left.flat[start:], right.flat[start:], out=met.flat[start:])
        if value is not None:
            self._keep([value])
        self._value = met
        return met

    def _memory(self, number: int) -> "_Row":
        rows = self._bucket.rows
        if not _same([row.flat for row in self._beside], rows):
            self._beside = [_Row(self._bucket, flat, beside=True) for flat in rows]
        place = self._places.get(number)
        if place is not None and place < len(rows):
            return self._beside[place]
        if self._spare:
            return self._spare.pop()
        like = self._bucket.flat
        return _Row(self._bucket, fresh_memory(len(like), like.dtype, like.device))

    def _keep(self, rows: Collection["_Row"]) -> None:
        """What is in these is not needed any more."""
        self._spare += [row for row in rows if not row.beside]


class _Row:
    """Memory like that of a bucket.

    Attributes:
        beside: it is the bucket's.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, *, beside: bool = False) -> None:
        self.flat = flat
        self.beside = beside
        self._bucket = bucket

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return self._bucket.views_in(self.flat)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.Tensor.is_set_to, some, others))
