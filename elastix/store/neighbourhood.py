"""The models of an index by signature, all or those with some metadata, as the index changes.

Not here: how the nearest of them is found (nearest.py).

Invariant: however the index has changed, `of` gives the models that a new Neighbourhood would read.
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from elastix.store.index import Index
from elastix.store.nearest import Candidate, Neighbours


class Neighbourhood:
    """Models alive with such metadata. After the first question only what is new is read."""

    def __init__(self, where: Mapping[str, Any] | None = None) -> None:
        """`where`: top-level key to text, number or bool; none takes all models."""
        self._where = where or {}
        self._neighbours = Neighbours()
        self._read: tuple[int, int] | None = None  # of which changes of the index it knows

    def __len__(self) -> int:
        return len(self._neighbours)

    def of(self, index: Index) -> Neighbours:
        """Those that there are by now.

        Args:
            index: the same each time.
        """
        rev, pruned = changes = index.changes()
        if self._read is None or pruned != self._read[1]:
            with closing(index.entries_since(0, self._where)) as found:
                self._neighbours = Neighbours(e for e in found if isinstance(e, Candidate))
        elif rev != self._read[0]:
            with closing(index.entries_since(self._read[0], self._where)) as found:
                for entry in found:
                    if isinstance(entry, Candidate):
                        self._neighbours.add(entry)
                    else:
                        self._neighbours.remove(entry)
        self._read = changes
        return self._neighbours
