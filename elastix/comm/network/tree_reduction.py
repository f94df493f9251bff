"""A reduction over the tree of slices: the same to the last bit for any sharing of the slices.

Each member has the sums of some subtrees (comm.slice_tree), as rows of equal length, and is given
the root. Each adds up one part of all rows, in the tree's order, and tells the others: through
memory that they share, or by an all-to-all of rows and another one of sums.

Not here: which subtrees a member has (slice_tree), and what is in a row (gradients).

Invariant: nothing is written to `into` by a group that was abandoned, and let go of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from elastix.comm.network import shared_memory
from elastix.comm.network.pending import Pending
from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.slice_tree import Additions, Node, Operand, additions, evaluate, held_nodes


@dataclass(frozen=True)
class Sharing:
    """Who has which slices.

    Attributes:
        held: slices of each member, by rank.
        slices: of the batch, a power of two; those that nobody holds have no samples.
    """

    held: tuple[frozenset[int], ...]
    slices: int

    @cached_property
    def present(self) -> frozenset[int]:
        """Slices with samples."""
        return frozenset().union(*self.held)

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """What each member has a row of, by rank."""
        return tuple(held_nodes(held, self.present, self.slices) for held in self.held)

    @cached_property
    def additions(self) -> Additions:
        """How the root follows; nothing if no slice has samples."""
        return additions(self.nodes, self.present, self.slices) if self.present else ()


class TreeReduction(Protocol):
    """One under way."""

    @property
    def pending(self) -> Pending:
        """Over when this member has what it is to add up."""
        ...

    def go_on(self) -> Pending | None:
        """After `pending`: add up, and tell the others. Over when all sums are here.

        None if that is done already.

        All members must call it in the same order as regards all other operations of the group.
        """
        ...

    def finish(self) -> None:
        """After both: the root is in `into`."""
        ...


@dataclass(frozen=True)
class Root:
    """Where the sum goes, and what becomes of it there.

    Attributes:
        into: as long as a row.
        scale: what its values are multiplied by.
        values: how many these are, from the first element on.
    """

    into: torch.Tensor
    scale: float = 1.0
    values: int = 0

    def complete(self, part: torch.Tensor, start: int) -> None:
        """A part of the sum, from that element on, is all added up."""
        if self.scale != 1.0 and start < self.values:
            part[: self.values - start].mul_(self.scale)


def begin(
    group: Group,
    rows: Sequence[torch.Tensor],
    sharing: Sharing,
    reduce: Reduce,
    root: Root,
    room: shared_memory.SharedBuffer | None = None,
) -> TreeReduction:
    """Start a reduction. Never blocks.

    Args:
        group: all members call this, for the same sharing.
        rows: this member's nodes from left to right, flat tensors of one length.
        sharing: at least one slice has samples.
        reduce: how rows add up.
        root: where the root goes.
        room: for members that share memory, who have `root.into` and then all rows in it; None to
            go through sockets. All have one, or none.
    """
    if group.size == 1:
        return _AtOnce(_here(group, rows, sharing, reduce, root))
    if room is not None:
        return _AtOnce(_through_memory(group, rows, sharing, reduce, root, room))
    return _ThroughSockets(group, rows, sharing, reduce, root)


@dataclass(frozen=True)
class _AtOnce:
    """One that is over when `pending` is, with the root in its place."""

    pending: Pending

    def go_on(self) -> None:
        pass

    def finish(self) -> None:
        pass


def _here(
    group: Group,
    rows: Sequence[torch.Tensor],
    sharing: Sharing,
    reduce: Reduce,
    root: Root,
) -> Pending:
    """In a group of one, which has all rows."""
    _total(sharing.additions, lambda at: rows[at.row], reduce, root.into)
    root.complete(root.into, 0)
    return group.all_reduce(root.into)


def _through_memory(
    group: Group,
    rows: Sequence[torch.Tensor],
    sharing: Sharing,
    reduce: Reduce,
    root: Root,
    room: shared_memory.SharedBuffer,
) -> Pending:
    """In a member's room are the root and its rows, one after the other."""
    length = len(root.into)
    sizes = [(1 + len(nodes)) * root.into.nbytes for nodes in sharing.nodes]

    def add_up(part: slice, rooms: shared_memory.Rooms) -> None:
        def value(at: Operand) -> torch.Tensor:
            if at.rank == group.rank:
                return rows[at.row][part]
            start = (1 + at.row) * length
            return rooms[at.rank][start + part.start : start + part.stop]

        out = root.into[part]
        _total(sharing.additions, value, reduce, out)
        root.complete(out, part.start)

    work = shared_memory.Contribution(root.into, length, add_up)
    return group.through_memory(room, sizes, work)


class _ThroughSockets:
    """Bytes are sent, whatever the type of the rows."""

    def __init__(
        self,
        group: Group,
        rows: Sequence[torch.Tensor],
        sharing: Sharing,
        reduce: Reduce,
        root: Root,
    ) -> None:
        into = root.into
        self._group, self._sharing, self._reduce, self._root = group, sharing, reduce, root
        cuts = [len(into) * n // group.size for n in range(group.size + 1)]
        self._parts = [slice(cuts[n], cuts[n + 1]) for n in range(group.size)]
        lengths = [part.stop - part.start for part in self._parts]
        counts = [len(nodes) for nodes in sharing.nodes]
        own = lengths[group.rank]
        sent = [row[part] for part in self._parts for row in rows]
        self._received = into.new_empty(sum(counts) * own)
        self._lengths, self._counts = lengths, counts
        self.pending = self._send(
            self._received,
            torch.cat(sent) if sent else into.new_empty(0),
            [count * own for count in counts],
            [len(rows) * length for length in lengths],
        )

    def go_on(self) -> Pending:
        own = self._lengths[self._group.rank]
        before = [sum(self._counts[:rank]) for rank in range(self._group.size)]

        def value(at: Operand) -> torch.Tensor:
            start = (before[at.rank] + at.row) * own
            return self._received[start : start + own]

        total = self._received.new_empty(own)
        _total(self._sharing.additions, value, self._reduce, total)
        self._root.complete(total, self._parts[self._group.rank].start)
        size = self._group.size
        self._sums = torch.empty_like(self._root.into)
        return self._send(self._sums, total.repeat(size), self._lengths, [own] * size)

    def finish(self) -> None:
        self._root.into.copy_(self._sums)

    def _send(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> Pending:
        width = self._root.into.element_size()
        return self._group.all_to_all(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [length * width for length in received_lengths],
            [length * width for length in sent_lengths],
        )


def combining(reduce: Reduce) -> Callable[..., torch.Tensor]:
    """The operator that puts two rows together."""
    return torch.add if reduce == "sum" else torch.maximum


def _total(
    steps: Additions, value: Callable[[Operand], torch.Tensor], reduce: Reduce, into: torch.Tensor
) -> None:
    """Operands stay as they are."""
    combine, unused = combining(reduce), [into]

    def add(
        left: torch.Tensor, right: torch.Tensor, left_free: bool, right_free: bool
    ) -> torch.Tensor:
        if left_free or right_free:
            return combine(left, right, out=left if left_free else right)
        return combine(left, right, out=unused.pop() if unused else None)

    total = evaluate(steps, value, add)
    if total is not into:
        into.copy_(total)
