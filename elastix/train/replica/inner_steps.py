"""When workers that take steps by themselves take one together (ExchangeConfig.every_steps). Pure.

All must come to the same answer, whatever their own batches made them do: a GradScaler may leave
out an optimizer's step on one worker alone. So what counts is what all do alike, the batches that
they draw and their uses of `ctx.accumulate`.

A train function may draw from several loaders for one step. The one that was drawn from first since
the last outer step leads: when it is asked for its next batch, the others' batches are used. Its
epochs end with an outer step, and so does the last one of any loader: nobody draws from that again,
and what a lost worker had of it would be used by nobody.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class InnerSteps:
    """One worker's count.

    Args:
        every: so many inner steps make an outer one due.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._leads: int | None = None
        self._fresh: set[int] = set()  # loaders whose last batch is not counted
        self._taken: dict[int, int] = {}  # by loader, since the leading one was drawn from
        self._adding = False  # the last pass was one of several that make a step
        self._within = 0

    def asked(self, loader: int) -> bool:
        """A loader is asked for a batch: whether the outer step comes first."""
        if loader in self._fresh:
            self._fresh.discard(loader)
            if not self._adding:
                self._taken[loader] = self._taken.get(loader, 0) + 1
        return not self._adding and self._taken.get(loader, 0) >= self._every

    def drawn(self, loader: int) -> None:
        """It has given one."""
        if self._leads is None:
            self._leads = loader
        if loader == self._leads:
            self._taken = {loader: self._taken.get(loader, 0)}
        self._fresh.add(loader)
        self._adding = self._within > 0

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Within it, passes are some of several that make a step."""
        self._within, self._adding = self._within + 1, True
        try:
            yield
        finally:
            self._within -= 1

    def ends(self, loader: int, *, for_good: bool) -> bool:
        """An epoch of that loader is over: whether the outer step is taken there.

        Args:
            loader: its number.
            for_good: batches of it are in hand, and it has no further epoch.
        """
        return (loader == self._leads or for_good) and not self._adding

    @property
    def none(self) -> bool:
        """Whether each batch since the last outer step was said to be one of several of a step."""
        return self._leads is not None and self._adding and not any(self._taken.values())

    def over(self) -> None:
        """The outer step was taken, or a State has come."""
        self._leads, self._fresh, self._taken = None, set(), {}
        self._adding = self._within > 0
