"""Which positions of a loader's stream were used: spans, sorted, neighbours joined."""

import bisect

from elastix.events import Span


class Coverage:
    """Grows by spans, and knows of each what of it there was already."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, start: int, stop: int) -> list[Span]:
        """Positions from `start` to before `stop` are used. Those that were used before."""
        low = bisect.bisect_left(self._spans, start, key=lambda span: span[1])
        high = bisect.bisect_right(self._spans, stop, key=lambda span: span[0])
        touched = self._spans[low:high]
        before = [(max(start, a), min(stop, b)) for a, b in touched]
        if touched:
            start, stop = min(start, touched[0][0]), max(stop, touched[-1][1])
        self._spans[low:high] = [(start, stop)]
        return [(a, b) for a, b in before if a < b]

    @property
    def begin(self) -> int:
        """The first position that was used; 0 if none was."""
        return self._spans[0][0] if self._spans else 0

    @property
    def end(self) -> int:
        """After the last position that was used; 0 if none was."""
        return self._spans[-1][1] if self._spans else 0

    @property
    def count(self) -> int:
        """How many positions were used."""
        return sum(stop - start for start, stop in self._spans)

    def gaps(self) -> tuple[Span, ...]:
        """Positions from 0 on that were not used, below the last one that was."""
        stops = [0, *(stop for _, stop in self._spans)]
        found = zip(stops, (start for start, _ in self._spans), strict=False)
        return tuple((stop, start) for stop, start in found if stop < start)
