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
from elastix.comm.network.process_group import Group, Pending, Reduce
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


def begin(
    group: Group,
    rows: Sequence[torch.Tensor],
    sharing: Sharing,
    reduce: Reduce,
    into: torch.Tensor,
    room: "Room | None" = None,
) -> TreeReduction:
    """Start a reduction. Never blocks.

    Args:
        group: all members call this, for the same sharing.
        rows: this member's nodes from left to right, flat tensors of one length.
        sharing: at least one slice has samples.
        reduce: how rows add up.
        into: where the root goes: as long as a row.
        room: for members that share memory; None to go through sockets. All have one, or none.
    """
    if group.size == 1:
        return _AtOnce(_here(group, rows, sharing, reduce, into))
    if room is not None:
        return _AtOnce(_through_memory(group, rows, sharing, reduce, into, room))
    return _ThroughSockets(group, rows, sharing, reduce, into)


class Room:
    """Memory for the rows of one member, that the others see; used for one reduction at a time."""

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        """For so many rows, each like that tensor."""
        self.buffer = shared_memory.SharedBuffer(_room_bytes(rows, like))
        self.flat = self.buffer.tensor(like.dtype)

    def fits(self, rows: int, like: torch.Tensor) -> bool:
        """Whether it is as large as all expect it to be."""
        return self.buffer.size == _room_bytes(rows, like)


def _room_bytes(rows: int, like: torch.Tensor) -> int:
    """Who has no rows needs place for its part of the result."""
    return max(1, rows) * like.nbytes


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
    into: torch.Tensor,
) -> Pending:
    """In a group of one, which has all rows."""
    into.copy_(_total(sharing.additions, lambda at: rows[at.row], reduce))
    return group.all_reduce(into)


def _through_memory(
    group: Group,
    rows: Sequence[torch.Tensor],
    sharing: Sharing,
    reduce: Reduce,
    into: torch.Tensor,
    room: Room,
) -> Pending:
    """The rows of a member lie in its room, one after the other."""
    own, length = room.flat, len(into)
    for number, row in enumerate(rows):
        own[number * length : (number + 1) * length].copy_(row)
    sizes = [_room_bytes(len(nodes), into) for nodes in sharing.nodes]

    def add_up(part: slice, rooms: shared_memory.Rooms) -> None:
        def value(at: Operand) -> torch.Tensor:
            there = own if at.rank == group.rank else rooms[at.rank]
            return there[at.row * length + part.start : at.row * length + part.stop]

        # Others read this part of the first row only when it is the sum.
        own[part].copy_(_total(sharing.additions, value, reduce))
        into[part].copy_(own[part])

    work = shared_memory.Contribution(into, length, add_up)
    return group.through_memory(room.buffer, sizes, work)


class _ThroughSockets:
    """Bytes are sent, whatever the type of the rows."""

    def __init__(
        self,
        group: Group,
        rows: Sequence[torch.Tensor],
        sharing: Sharing,
        reduce: Reduce,
        into: torch.Tensor,
    ) -> None:
        self._group, self._sharing, self._reduce, self._into = group, sharing, reduce, into
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

        total = _total(self._sharing.additions, value, self._reduce)
        size = self._group.size
        self._sums = torch.empty_like(self._into)
        return self._send(self._sums, total.repeat(size), self._lengths, [own] * size)

    def finish(self) -> None:
        self._into.copy_(self._sums)

    def _send(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> Pending:
        width = self._into.element_size()
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
    steps: Additions, value: Callable[[Operand], torch.Tensor], reduce: Reduce
) -> torch.Tensor:
    combine = combining(reduce)

    def add(
        left: torch.Tensor, right: torch.Tensor, left_free: bool, right_free: bool
    ) -> torch.Tensor:
        out = left if left_free else right if right_free else None
        return combine(left, right, out=out)

    return evaluate(steps, value, add)
