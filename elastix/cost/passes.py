"""A step of several passes: of micro-batches, or of slices, whose sums an exact run keeps. Pure."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from elastix.cost.trace import Cost


def several(cost: Cost, passes: int, held: int = 1, sent: int = 0) -> Cost:
    """The cost of a step of more than the one forward and backward pass that was traced.

    Args:
        cost: of a step with one.
        passes: how many it has.
        held: of so many activations are held at once.
        sent: bytes that each sends on beside what was traced.
    """
    more = passes - 1
    operators = Counter(cost.operators)
    for operator, often in cost.pass_operators.items():
        operators[operator] += more * often
    flops = sum(flops * often for (flops, _), often in cost.pass_operators.items())
    return replace(
        cost,
        forward_flops=cost.forward_flops * passes,
        step_flops=cost.step_flops + more * flops,
        batch_bytes=cost.batch_bytes * held,
        peak_bytes=cost.peak_bytes + (held - 1) * (cost.activations_bytes + cost.batch_bytes),
        operators=operators,
        sent_bytes=(cost.sent_bytes + sent) * passes,
    )


def exact(cost: Cost, slices: int, workers: int) -> Cost:
    """The cost with the sums that a worker of an exact run keeps, if all have equally many slices.

    Sums are over aligned halves of halves of the batch, so the slices that a worker has computed
    are a few of these: never more than twice the logarithm of `slices`.

    Args:
        cost: of a step.
        slices: of the batch, a power of two.
        workers: in the group.
    """
    cuts = [slices * worker // workers for worker in range(workers + 1)]
    sums = max(
        _blocks(start, done) for start, stop in pairwise(cuts) for done in range(start, stop + 1)
    )
    more = (sums - cost.sums) * cost.gradients_bytes
    return replace(cost, sums=sums, peak_bytes=cost.peak_bytes + more)


def _blocks(start: int, stop: int) -> int:
    """The fewest that make up a range, each aligned and as long as a power of two."""
    found = 0
    while start < stop:
        longest = 1 << (stop - start).bit_length() - 1
        start += min(longest, start & -start or longest)
        found += 1
    return found
