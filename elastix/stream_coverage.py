"""Which positions of a loader's stream were used, and by which steps."""

import bisect
from dataclasses import dataclass

from elastix.events import Span


class Coverage:
    """Spans, sorted, neighbours joined. Of each that is added it knows what there was already."""

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


@dataclass
class _Stretch:
    """Steps at equal distances, each of which used the positions right after the one before.

    Attributes:
        first, steps: the first of them, and how many there are.
        apart: the number of each less that of the one before.
        start, each: the first position of the first step, and how many each step used.
        workers: of the group.
    """

    first: int
    start: int
    each: int
    workers: int
    steps: int = 1
    apart: int = 1

    @property
    def span(self) -> Span:
        return self.start, self.start + self.steps * self.each

    def takes(self, step: int, span: Span, workers: int) -> bool:
        """Whether a step is the next of them, and if so, it is one of them."""
        if self.steps == 1 and step > self.first:
            self.apart = step - self.first
        end = self.start + self.steps * self.each
        if (step, *span) != (self.first + self.steps * self.apart, end, end + self.each):
            return False
        if workers != self.workers:
            return False
        self.steps += 1
        return True

    def go_back(self, step: int) -> None:
        self.steps = min(self.steps, (step - self.first) // self.apart + 1)


class Stretches:
    """Spans that steps used, in the order in which they were committed.

    Of ten million steps there are as many stretches as there were epochs and changes of members.
    """

    def __init__(self) -> None:
        self._kept: list[_Stretch] = []

    def add(self, step: int, span: Span, workers: int = 0) -> None:
        """A step of so many workers used these positions."""
        if not self._kept or not self._kept[-1].takes(step, span, workers):
            self._kept.append(_Stretch(step, span[0], span[1] - span[0], workers))

    def go_back(self, step: int) -> None:
        """Steps after this one do not stand."""
        for stretch in self._kept:
            stretch.go_back(step)
        self._kept = [stretch for stretch in self._kept if stretch.steps > 0]

    @property
    def spans(self) -> list[Span]:
        """Those of steps that stand."""
        return [stretch.span for stretch in self._kept]

    @property
    def end(self) -> int:
        """After the last position of the last step; 0 if there is none."""
        return self._kept[-1].span[1] if self._kept else 0

    @property
    def most_workers(self) -> int:
        """In any step that stands."""
        return max((stretch.workers for stretch in self._kept), default=0)

    @property
    def last_workers(self) -> int:
        """In the last of them."""
        return self._kept[-1].workers if self._kept else 0
