"""Which samples a backward pass is about, and so how much a worker's gradient of it counts. Pure.

A pass is about the batches that were drawn since the pass before it, or, if there are none, about
the same as that one: a critic's pass and a generator's, the epochs of PPO, the closures of LBFGS.
It may be about any of these batches, so they are all split in one ratio over the workers. Batches
with a pass between them may have different ratios: of 15 and of 4 samples, in `ctx.accumulate`.

The ratio is chosen when the first batch is drawn, so it is guessed which others will be: those that
were, when a batch of this loader was the first the last time. A wrong guess costs repeated work.

One window for all loaders; it is part of the State, since a worker may join between two steps on
one batch. It holds ratios, not samples, which are the loaders' affair.
"""

from collections.abc import Collection, Mapping, Sequence
from math import gcd
from typing import Any

from elastix.data.cursor import ratio_for

Ratio = Mapping[int, int]
"""By worker, in lowest terms, without zeros. Empty if nothing was drawn: all count alike."""


def lowest(shares: Mapping[int, int]) -> Ratio:
    """The ratio of these numbers of samples."""
    common = gcd(*shares.values())
    return {worker: share // common for worker, share in shares.items() if share}


class Window:
    """See the module.

    Attributes:
        ratios: those of the step in hand, each once, in the order in which they came up.
        now: the one by which the next pass is weighed: its place among them.
        several: the last step had more than one.
        added_up: there were passes since the last step.
    """

    def __init__(self) -> None:
        self.ratios: list[Ratio] = []
        self.now = 0
        self.several = self.added_up = False
        self._last: Ratio = {}  # of the last step's last pass
        self._had: frozenset[int] = frozenset()  # workers that counted when it was first passed
        self._passed = True
        self._first = 0  # the loader of the first batch since then
        self._together: dict[int, tuple[int, ...]] = {}  # sizes drawn with its batch, by loader

    @property
    def ratio(self) -> Ratio:
        """Of the batches that the next pass is about."""
        return self.ratios[self.now] if self.ratios else self._last

    def shares(self, worker: int, members: Sequence[int]) -> list[tuple[int, int]]:
        """By ratio of the step in hand, what a worker has of it and what these members have."""
        return [
            (ratio.get(worker, 0), sum(ratio.get(member, 0) for member in members))
            if ratio
            else (1, len(members))
            for ratio in self.ratios or [self.ratio]
        ]

    @property
    def fresh(self) -> bool:
        """Whether the next batch drawn is the first that the next pass is about."""
        return self._passed

    def binding(self, loader: int, members: Sequence[int]) -> Ratio | None:
        """The ratio in which the next batch must be split; None for as evenly as can be."""
        if not self._passed:
            return self.ratio
        sizes = self._together.get(loader, ())
        if len(set(sizes)) < 2:
            return None
        return lowest(dict(zip(members, ratio_for(sizes, len(members)), strict=True)))

    def drawn(self, loader: int, size: int, ratio: Ratio) -> None:
        """A batch was drawn.

        Args:
            loader: whose.
            size: as this loader's batches usually have it.
            ratio: in which it was split, or would have been.
        """
        if self._passed:
            self._turn(ratio)
            self._passed, self._first, self._together[loader] = False, loader, ()
        self._together[self._first] += (size,)

    def passed(self) -> None:
        """There was a backward pass, or there might have been one: all workers say so alike."""
        if not self.ratios:
            self._turn(self._last)
        self._passed = self.added_up = True

    def close(self, contributors: Collection[int], *, drew: bool) -> list[int]:
        """The step counts: passes of the next one that draws nothing are weighed like its last.

        Args:
            contributors: workers whose gradients are in it.
            drew: it was about new batches.

        Returns:
            Workers that earlier passes on these batches had, and this one and later ones lack.
        """
        self._last, self.several = self.ratio, len(self.ratios) > 1
        missed = [] if drew else sorted(self._had.difference(contributors))
        self._had = frozenset(contributors) if drew else self._had.intersection(contributors)
        self.void()
        return [worker for worker in missed if self._last.get(worker)]

    def void(self) -> None:
        """The step does not count."""
        self.ratios, self.now, self._passed, self.added_up = [], 0, True, False

    def forget(self) -> None:
        """The workers that drew are not those of now."""
        self._last, self.several, self._together = {}, False, {}
        self._had = frozenset()
        self.void()

    def state_dict(self) -> dict[str, Any]:
        """As it is between two steps."""
        return {
            "ratio": {str(worker): share for worker, share in self._last.items()},
            "together": {str(loader): list(sizes) for loader, sizes in self._together.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As it was; older States have only samples by worker."""
        self.forget()
        last = state_dict.get("ratio", state_dict)
        self._last = lowest({int(worker): share for worker, share in last.items()})
        together = state_dict.get("together", {})
        self._together = {int(loader): tuple(sizes) for loader, sizes in together.items()}

    def _turn(self, ratio: Ratio) -> None:
        if ratio not in self.ratios:
            self.ratios.append(ratio)
        self.now = self.ratios.index(ratio)
