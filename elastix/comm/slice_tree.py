"""The order in which the slices of a batch are added up: a binary tree, whoever holds them. Pure.

Floating-point sums depend on their order. Here it is that of a fixed tree: its leaves are the
slices, and a node is its left child plus its right. So the root is the same to the last bit for
any assignment of slices to workers. A slice without samples is absent, and so is a node without
slices; a node with one child present is that child.

A worker adds up what it holds as far as that goes without the others: the largest subtrees all of
whose slices are its own (PartialSums). Which these are follows from the assignment (`held_nodes`),
so nobody has to be told, and neither how to put those of all workers together (`additions`).

Source: the binary counter of Bentley and Saxe (1980); pairwise summation, Higham, SIAM J. Sci.
Comput. 14 (1993).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A subtree: the slices from `place << level` on, `1 << level` of them."""

    level: int
    place: int

    @property
    def slices(self) -> range:
        """Its leaves."""
        return range(self.place << self.level, (self.place + 1) << self.level)

    @property
    def parent(self) -> "Node":
        """The node that this one is added to."""
        return Node(self.level + 1, self.place >> 1)

    @property
    def children(self) -> tuple["Node", "Node"]:
        """Left and right."""
        return Node(self.level - 1, 2 * self.place), Node(self.level - 1, 2 * self.place + 1)


class Operand(NamedTuple):
    """Where a value lies: the `row`-th node of the worker of this rank."""

    rank: int
    row: int


Additions = tuple[Operand | None, ...]
"""A sum in postfix order: push an operand; or, for None, replace the last two by their sum."""


def is_power_of_two(number: int) -> bool:
    """Whether a tree with so many leaves is full."""
    return number > 0 and number & (number - 1) == 0


@lru_cache(maxsize=1024)
def held_nodes(held: frozenset[int], present: frozenset[int], slices: int) -> tuple[Node, ...]:
    """The largest subtrees whose present slices are all among `held`, from left to right.

    Args:
        held: slices of one worker.
        present: slices that have samples.
        slices: leaves of the tree, a power of two.
    """

    def below(node: Node) -> Iterator[Node]:
        wanted = present.intersection(node.slices)
        mine = wanted & held
        if not mine:
            return
        if mine == wanted:
            yield node
            return
        for child in node.children:
            yield from below(child)

    return tuple(below(Node(slices.bit_length() - 1, 0)))


@lru_cache(maxsize=1024)
def additions(
    by_rank: tuple[tuple[Node, ...], ...], present: frozenset[int], slices: int
) -> Additions:
    """How the root follows from the nodes of all workers.

    Args:
        by_rank: what each worker holds; together every present slice, once.
        present: slices that have samples; at least one.
        slices: leaves of the tree.

    Raises:
        ValueError: a slice is in no node.
    """
    where = {
        node: Operand(rank, row) for rank, ns in enumerate(by_rank) for row, node in enumerate(ns)
    }

    def below(node: Node) -> Iterator[Operand | None]:
        if node in where:
            yield where[node]
            return
        if not node.level:
            raise ValueError(f"nobody holds slice {node.place}")
        there = [child for child in node.children if not present.isdisjoint(child.slices)]
        for child in there:
            yield from below(child)
        yield from [None] * (len(there) - 1)

    return tuple(below(Node(slices.bit_length() - 1, 0)))


def evaluate(
    steps: Additions, value: Callable[[Operand], T], add: Callable[[T, T, bool, bool], T]
) -> T:
    """Carry additions out.

    Args:
        steps: see `additions`.
        value: reads an operand.
        add: the sum of two, in this order; told of each whether it is a sum itself, and not
            somebody's operand, so that its memory may be used.
    """
    stack: list[tuple[T, bool]] = []
    for operand in steps:
        if operand is not None:
            stack.append((value(operand), False))
        else:
            (left, free), (right, also_free) = stack[-2:]
            stack[-2:] = [(add(left, right, free, also_free), True)]
    ((total, _),) = stack
    return total


class PartialSums(Generic[T]):
    """What one worker has added up, node by node: carries of a binary counter.

    Attributes:
        sums: by node; always the nodes that `held_nodes` says.
    """

    def __init__(self, present: Collection[int], slices: int, add: Callable[[T, T], T]) -> None:
        """`add` may use the memory of both of its arguments."""
        self.sums: dict[Node, T] = {}
        self._present = frozenset(present)
        self._root = Node(slices.bit_length() - 1, 0)
        self._add = add

    def path(self, number: int) -> tuple[Node, list[Node]]:
        """Where a slice goes that comes next.

        Returns:
            The node that it is part of then; and those that it is added to on the way, in order.
        """
        node, met = Node(0, number), []
        while node != self._root:
            left, right = node.parent.children
            other = right if node == left else left
            if not self._present.isdisjoint(other.slices):
                if other not in self.sums:
                    break
                met.append(other)
            node = node.parent
        return node, met

    def insert(self, number: int, value: T) -> Node:
        """A slice that has been computed; the node that it is part of now."""
        node, met = self.path(number)
        for other in met:
            theirs = self.sums.pop(other)
            before = other.slices.start < number
            value = self._add(theirs, value) if before else self._add(value, theirs)
        self.sums[node] = value
        return node

    def in_order(self) -> Sequence[tuple[Node, T]]:
        """From left to right."""
        return sorted(self.sums.items(), key=lambda item: item[0].slices.start)
