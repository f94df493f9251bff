"""Which samples of several datasets are kept: those of the lowest ranks. Pure.

A sample's rank looks random and is a function of its place. So what is kept is a uniform choice
that depends on no order of reading.

Invariant: what is kept of several datasets is what would be kept of what was kept of each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastix.data.random_numbers import seed_at

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Samples of several datasets: four columns.

    Attributes:
        datasets: number of the dataset that each is of.
        indices: its place there.
        classes: what `labels` says of it.
        ranks: the lower, the sooner it is kept.
    """

    datasets: Indices
    indices: Indices
    classes: Indices
    ranks: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, which: Any) -> "Rows":  # noqa: ANN401 - whatever indexes an array
        columns = (self.datasets, self.indices, self.classes, self.ranks)
        return Rows(*(column[which] for column in columns))

    @property
    def names(self) -> list[tuple[int, int]]:
        """Dataset and place of each."""
        return list(zip(self.datasets.tolist(), self.indices.tolist(), strict=True))


def rows_of(seed: int, dataset: int, indices: Indices, classes: Indices) -> Rows:
    """Samples of one dataset, with ranks that look random and are always the same."""
    mixed = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed_at(seed, "rank", dataset))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # SplitMix64
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return Rows(np.full(len(indices), dataset), indices, classes, mixed)


def union(parts: Iterable[Rows]) -> Rows:
    """All of several."""
    parts = [rows_of(0, 0, np.empty(0, np.int64), np.empty(0, np.int64)), *parts]
    columns = ("datasets", "indices", "classes", "ranks")
    return Rows(*(np.concatenate([getattr(rows, name) for rows in parts]) for name in columns))


def lowest(rows: Rows, capacity: int) -> Rows:
    """The samples that are kept: of each class the lowest ranks, of all classes equally many.

    First the lowest of each class, then the second of each, until there are `capacity`. So a class
    with few samples leaves its room to the others. They stand in the order of datasets and indices.
    """
    by_class = np.lexsort((rows.indices, rows.datasets, rows.ranks, rows.classes))
    sorted_ = rows[by_class]
    first = np.flatnonzero(np.diff(sorted_.classes, prepend=sorted_.classes[:1] - 1))
    sizes = np.diff(first, append=len(rows))
    turn = np.arange(len(rows)) - np.repeat(first, sizes)
    kept = sorted_[np.lexsort((sorted_.ranks, turn))[:capacity]]
    return kept[np.lexsort((kept.indices, kept.datasets))]
