"""Slices to add up over a tree, for the tests of what carries them."""

import random

import torch

from elastix.comm.slice_tree import PartialSums


def slice_values(slices, length, dtype):
    """By slice, rows whose sum depends on its order; the last slice but one is absent."""
    generator = torch.Generator().manual_seed(length)
    present = [number for number in range(slices) if number != slices - 2]
    if not dtype.is_floating_point:
        return {
            n: torch.randint(-99, 99, (length,), generator=generator).to(dtype) for n in present
        }
    shape = (len(present), length)
    exponents = torch.randint(-20, 20, shape, generator=generator)
    values = torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float64), exponents)
    return dict(zip(present, values.to(dtype), strict=True))


def combine(reduce):
    return torch.add if reduce == "sum" else torch.maximum


def tree_total(leaves, reduce, start=0, stop=None):
    """By the definition; in slice order from left to right the sum would be another."""
    stop = max(leaves) + 1 if stop is None else stop
    if stop - start == 1:
        return leaves.get(start)
    middle = (start + stop) // 2
    left = tree_total(leaves, reduce, start, middle)
    right = tree_total(leaves, reduce, middle, stop)
    if left is None or right is None:
        return right if left is None else left
    return combine(reduce)(left, right)


def shared_out(leaves, workers, draws: random.Random, reduce):
    """A random sharing: slices held by rank, and the rows that this gives each of them."""
    owner = {number: draws.randrange(workers) for number in leaves}
    held = tuple(frozenset(n for n in owner if owner[n] == rank) for rank in range(workers))
    rows = []
    for mine in held:
        sums = PartialSums(leaves, 8, combine(reduce))
        for number in draws.sample(sorted(mine), len(mine)):
            sums.insert(number, leaves[number])
        rows.append([row for _, row in sums.in_order()])
    return held, rows


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
