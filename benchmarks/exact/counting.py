"""Parts that count what happens in many runs: their counts add up, and they can be gone on with."""

from collections.abc import Callable, Mapping

Counts = dict[str, float]
"""By name. What ends in `_s` is the longest time of any run; all else is added up."""

Case = Callable[[int, int], Counts]
"""`case(seed, amount)` makes one run with so many faults, kills or steps."""


def together(one: Mapping[str, float], other: Mapping[str, float]) -> Counts:
    """The counts of both."""
    names = [*one, *(name for name in other if name not in one)]
    return {
        name: (max if name.endswith("_s") else _plus)(one.get(name, 0), other.get(name, 0))
        for name in names
    }


def counted(
    case: Case,
    amount: int,
    each: int,
    *,
    seed: int = 0,
    so_far: Mapping[str, float] | None = None,
    tell: Callable[[Counts], None] = lambda _: None,
) -> Counts:
    """The counts of `amount` faults, kills or steps, `each` in a run but for the last.

    Args:
        case: makes one run.
        amount: in all.
        each: in one run. The seed of a run is that of the first and the number of its first one.
        seed: of the first run.
        so_far: counts of an earlier call with the same arguments that did not come to its end.
        tell: is told the counts so far after each run.
    """
    counts = dict(so_far or {"done": 0})
    while (done := int(counts["done"])) < amount:
        this = min(each, amount - done)
        counts = together(counts, {"done": this, **case(seed + done, this)})
        tell(counts)
    return counts


def _plus(one: float, other: float) -> float:
    return one + other
