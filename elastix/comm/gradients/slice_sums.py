"""What one worker has added up of a bucket, slice by slice, in the order of the tree.

Autograd adds up nothing over slices, whose order would be another one with other workers. What a
slice gives is added here before the next one begins: gradient after gradient while they come
(`collect`), or the whole bucket, which is filled first. At the end of the step the sums are reduced
over the tree (network.tree_reduction), and the bucket holds the root.

Sums that this worker is going to end with lie from the start where the others read them, if they
share memory, so nothing is copied in the end. Who is handed slices of a lost worker ends with other
sums, and copies. A gradient that one of the next slice is going to be added to is not copied at
all: it stays as autograd has left it until then.

Invariant: what was taken stays, whatever becomes of the group, until the next step begins.
"""

from collections.abc import Collection, Sequence

import torch

from elastix.comm.gradients.bucket import Bucket, fresh_memory
from elastix.comm.gradients.slice_rows import Combine, FlatRow, KeptGradients, Row, add_up
from elastix.comm.network import tree_reduction
from elastix.comm.network.process_group import Group
from elastix.comm.network.tree_reduction import Root, Sharing, TreeReduction
from elastix.comm.slice_tree import Node, PartialSums


class SliceSums:
    """See the module.

    Attributes:
        scale: what the values of the root are multiplied by.
    """

    keeps = ("cpu",)
    """On these devices gradients stay. A GPU's memory is freed for the stream it was taken on."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._combine: Combine = tree_reduction.combining(bucket.reduce)
        self._sums: PartialSums[Row] = PartialSums((), 1, self._merge)
        self._present: Collection[int] = ()
        self._taken: set[int] = set()
        self._spare: list[FlatRow] = []  # memory of sums that are not needed any more
        self._beside: list[FlatRow] = []  # what the bucket has for sums
        self._places: dict[int, int] = {}  # which of it is for the sum that begins with a slice
        self._single: set[int] = set()  # slices that are such a sum by themselves
        self.scale = 1.0
        self._collecting: int | None = None  # the slice whose gradients come one by one
        self._path: list[tuple[Row, bool]] = []  # what it is added to; is that the left operand?
        self._first: Row | None = None  # where it goes if there is nothing
        self._value: Row | None = None  # the sum that it has come to

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
        self._present, self._taken, self.scale = present, set(), scale
        self.begin_slice()
        self._bucket.provide(len(nodes))
        within = [[number for number in node.slices if number in present] for node in nodes]
        self._places = {numbers[0]: place for place, numbers in enumerate(within)}
        self._single = {numbers[0] for numbers in within if len(numbers) == 1}

    def begin_slice(self) -> None:
        """Nothing was collected, or it was a placeholder's."""
        self._collecting = None

    def lacks(self, number: int) -> bool:
        """Whether slice `number` was not taken yet."""
        return number not in self._taken

    def collect(self, number: int) -> None:
        """Gradients of that slice, which is lacking, come one by one: see `add`."""
        met = self._meet(number)
        for node in met:
            row = self._sums.sums[node]
            if isinstance(row, KeptGradients):
                row.into = self._memory(self._first_in(node))
        if not met:
            keeps = self._bucket.flat.device.type in self.keeps and number not in self._single
            self._first = KeptGradients(self._bucket) if keeps else self._memory(number)
        self._path = self._rows_of(met, number)
        self._collecting = number

    def add(self, place: int, gradient: torch.Tensor | None) -> None:
        """One of them, each once; None for zeros.

        Raises:
            ConfigError: somebody has changed that of an earlier slice since.
        """
        if self._first is not None:
            self._first.put(place, gradient)
        if self._path:
            add_up(self._path, place, gradient, self._combine)

    def own(self) -> None:
        """The slice in hand is over: what was kept of it is nobody else's."""
        for row in self._sums.sums.values():
            if isinstance(row, KeptGradients):
                row.own()

    def take(self, number: int) -> None:
        """The bucket is closed, and holds what slice `number` gave, but for what was collected.

        Only of one that is lacking.

        Raises:
            ConfigError: see `add`.
        """
        if self._collecting != number:
            self._collecting = None
            met = self._meet(number)
            for node in met:
                self._settled(node, self._sums.sums[node])
            self._first = None if met else self._memory(number)
        self._value = FlatRow(self._bucket, self._bucket.flat, beside=True)
        if self._first is not None:
            self._lacking(self._first).copy_(self._lacking(self._value))
            self._value = self._first
        self._taken.add(number)
        self._sums.insert(number, self._value)
        self._collecting = self._first = self._value = None

    @property
    def rows(self) -> Sequence[tuple[Node, torch.Tensor]]:
        """The sums that this worker has, by the slices in them: the same for each bucket."""
        return [(node, self._settled(node, row).flat) for node, row in self._sums.in_order()]

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

    def _meet(self, number: int) -> list[Node]:
        """Nothing of that slice was added yet. Returns what it is added to."""
        if self._first is not None:
            self._keep([self._first])
            self._first = None
        return self._sums.path(number)[1]

    def _rows_of(self, met: Sequence[Node], number: int) -> list[tuple[Row, bool]]:
        return [(self._sums.sums[node], node.slices.start < number) for node in met]

    def _merge(self, left: Row, right: Row) -> Row:
        """What was not collected, into the memory of what the slice meets."""
        value = self._value
        met = right if left is value else left
        into = met.into
        self._combine(self._lacking(left), self._lacking(right), out=self._lacking(into))
        if value is not None:
            self._keep([value])
        self._value = into
        return into

    def _lacking(self, row: Row) -> torch.Tensor:
        """What of it was not collected."""
        return row.flat if self._collecting is None and isinstance(row, FlatRow) else row.tail

    def _settled(self, node: Node, row: Row) -> FlatRow:
        """That sum, in flat memory."""
        if isinstance(row, FlatRow):
            return row
        settled = self._memory(self._first_in(node))
        row.copy_into(settled)
        self._sums.sums[node] = settled
        return settled

    def _first_in(self, node: Node) -> int:
        return next(number for number in node.slices if number in self._present)

    def _memory(self, number: int) -> FlatRow:
        """For a sum that begins with that slice."""
        rows = self._bucket.rows
        if not _same([row.flat for row in self._beside], rows):
            self._beside = [FlatRow(self._bucket, flat, beside=True) for flat in rows]
        place = self._places.get(number)
        if place is not None and place < len(rows):
            return self._beside[place]
        if self._spare:
            return self._spare.pop()
        like = self._bucket.flat
        return FlatRow(self._bucket, fresh_memory(len(like), like.dtype, like.device))

    def _keep(self, rows: Collection[Row]) -> None:
        """What is in these is not needed any more."""
        self._spare += [row for row in rows if isinstance(row, FlatRow) and not row.beside]


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.Tensor.is_set_to, some, others))
