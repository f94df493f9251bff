"""Which samples come next, and which were used. Pure arithmetic on positions.

The samples of all epochs form one stream of positions. A global batch is drawn, split over the
workers, and committed with its step; shares that were lost with a worker are given back and stand
first in the next batch.

Invariant: every position below `position` was drawn or is left out, and what was drawn is either
committed, in a batch that is not committed yet, or owed.

Not here: which sample stands at a position (sample_order).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from elastix.events import Span


def count(spans: Iterable[Span]) -> int:
    """How many positions the spans hold."""
    return sum(stop - start for start, stop in spans)


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions, sorted, neighbours joined. Overlaps are kept as they are."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)


def union(spans: Sequence[Span], more: Iterable[Span]) -> tuple[Span, ...]:
    """The positions of `spans` (sorted, disjoint) and of `more`, each once."""
    return merge((*spans, *subtract(more, spans)))


def take(spans: Iterable[Span], amount: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The first `amount` positions, and the rest."""
    taken: list[Span] = []
    rest: list[Span] = []
    for start, stop in spans:
        cut = min(stop, start + amount)
        if cut > start:
            taken.append((start, cut))
        if stop > cut:
            rest.append((cut, stop))
        amount -= cut - start
    return tuple(taken), tuple(rest)


def subtract(spans: Iterable[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """The positions of `spans`, in their order, that are not in `others` (sorted, disjoint)."""
    left: list[Span] = []
    for start, stop in spans:
        for other_start, other_stop in others:
            if other_stop <= start or other_start >= stop:
                continue
            if other_start > start:
                left.append((start, other_start))
            start = other_stop
        if start < stop:
            left.append((start, stop))
    return tuple(left)


def split(
    spans: Sequence[Span], workers: int, batch_size: int, unit: int = 1
) -> tuple[tuple[Span, ...], ...]:
    """Divide a batch into `workers` consecutive shares, as even as can be.

    The last batch of an epoch may be small. Then no share has a single sample if that can be
    avoided without a share larger than usual, since batch normalisation refuses one; the last
    workers may get an empty share.

    Args:
        spans: the batch.
        workers: how many.
        batch_size: as it usually is.
        unit: shares are multiples of so many samples; what is less than that is one worker's.
    """
    total = count(spans)
    if unit > 1:
        each, more = divmod(total // unit, workers)
        sizes = [unit * (each + (i < more)) for i in range(workers)]
        sizes[0] += total % unit
        return _cut(spans, sizes)
    usual = -(-batch_size // workers)
    used = min(workers, max(total // 2, -(-total // usual), 1))
    sizes = [total // used + (i < total % used) for i in range(used)] + [0] * (workers - used)
    return _cut(spans, sizes)


def split_like(
    spans: Sequence[Span], ratio: Sequence[int], batch_size: int
) -> tuple[tuple[Span, ...], ...] | None:
    """Divide a batch into consecutive shares that are to each other as `ratio`.

    Returns:
        None if they would not be whole numbers, or one of them a single sample, which batch
        normalisation refuses, where `split` has none.
    """
    total, whole = count(spans), sum(ratio)
    if not whole or any(total * part % whole for part in ratio):
        return None
    sizes = [total * part // whole for part in ratio]
    if 1 in sizes and all(count(share) != 1 for share in split(spans, len(ratio), batch_size)):
        return None
    return _cut(spans, sizes)


def ratio_for(sizes: Sequence[int], workers: int) -> tuple[int, ...]:
    """The ratio over the workers in which batches of these sizes cost the least together.

    What `split_like` cannot divide is done whole by every worker. Tried are the ratios that `split`
    has for each of the sizes, and an even one of their greatest common divisor: it fits them all.
    """
    whole = [((0, size),) for size in sizes]
    ratios = [tuple(map(count, split(spans, workers, count(spans)))) for spans in whole]
    each, more = divmod(gcd(*sizes), workers)
    ratios.append(tuple(each + (worker < more) for worker in range(workers)))

    def cost(ratio: tuple[int, ...]) -> int:
        shares = (split_like(spans, ratio, count(spans)) for spans in whole)
        return sum(
            size if parts is None else max(map(count, parts))
            for size, parts in zip(sizes, shares, strict=True)
        )

    return min(ratios, key=cost)


def _cut(spans: Sequence[Span], sizes: Iterable[int]) -> tuple[tuple[Span, ...], ...]:
    shares = []
    rest: tuple[Span, ...] = tuple(spans)
    for size in sizes:
        share, rest = take(rest, size)
        shares.append(share)
    return tuple(shares)


@dataclass(frozen=True)
class Cursor:
    """How far the stream is drawn, and what is owed.

    Attributes:
        length: samples in an epoch.
        position: the first position never drawn.
        owed: positions drawn and given back, in order.
        left_out: positions that are never drawn (any more).
    """

    length: int
    position: int = 0
    owed: tuple[Span, ...] = ()
    left_out: tuple[Span, ...] = ()

    def draw(
        self, batch_size: int, epoch: int, units: Sequence[int] = ()
    ) -> tuple[tuple[Span, ...], "Cursor"]:
        """The next global batch of `epoch`, owed samples first, and the cursor after it.

        The batch is smaller at the end of the epoch, and empty when nothing of it is left. It is
        one smaller where a single sample would remain, since batch normalisation refuses one.

        Args:
            batch_size: how many samples it usually has.
            epoch: from 0.
            units: it has a multiple of the first of these that it has room for; a batch with less
                than the last of them is the epoch's last.
        """
        owed, fresh = self._left(epoch)
        available = count(owed) + count(fresh)
        size = min(batch_size, available)
        if units:
            size -= size % next((unit for unit in units if unit <= size), 1)
        elif available - size == 1 and size > 2:
            size -= 1
        batch, owed = take(owed, size)
        drawn, fresh = take(fresh, size - count(batch))
        stop = max(self.position, (epoch + 1) * self.length)
        if fresh:  # not all of the epoch is drawn
            stop = drawn[-1][1] if drawn else self.position
        return (*batch, *drawn), Cursor(self.length, stop, owed, self.left_out)

    def left(self, epoch: int) -> int:
        """How many positions can still be drawn in `epoch`."""
        return sum(map(count, self._left(epoch)))

    def _left(self, epoch: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """What is owed, and what was never drawn."""
        end = (epoch + 1) * self.length
        fresh = ((self.position, end),) if end > self.position else ()
        return subtract(self.owed, self.left_out), subtract(fresh, self.left_out)

    def leave_out(self, spans: Iterable[Span]) -> "Cursor":
        """Never draw these positions, in case they are not drawn yet."""
        return Cursor(self.length, self.position, self.owed, union(self.left_out, spans))

    def give_back(self, spans: Iterable[Span]) -> "Cursor":
        """Owe positions that were drawn and not committed."""
        return Cursor(self.length, self.position, merge((*self.owed, *spans)), self.left_out)
