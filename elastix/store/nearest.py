"""Which of many models shares most with a signature: an inverted index and a bit-parallel scan.

Not here: what sharing means (lineage.shared defines it) or where signatures are kept.

Invariant: `lp` and `lcs` give the length that lineage.shared gives for the best model alive, and
among equals the one with the highest score, then the one that was added first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int]
_SMALL = 64


class Candidate(NamedTuple):
    """One model: its key, score, 64-bit ids (little-endian bytes, 8 each), and its ref."""

    key: int
    score: float | None
    paths: bytes
    ids: bytes
    ref: bytes = b""


class NearestModel(NamedTuple):
    """The best model and how many layers it shares."""

    key: int
    length: int
    score: float | None = None
    ref: bytes = b""


def pack_ids(ids: Ids) -> bytes:
    """64-bit ids as an Entry has them."""
    return np.array(ids, dtype="<u8").tobytes()


class Neighbours:
    """Models by signature. Grows and shrinks; sorts itself anew when much has changed."""

    def __init__(self, entries: Iterable[Candidate] = ()) -> None:
        self._rows = list(entries)
        self._rebuild()

    def __len__(self) -> int:
        return self._living

    def _rebuild(self) -> None:
        # Rows in order of preference: then the best of any set of rows is its smallest number.
        rows = self._rows
        scores = np.array([_number(row.score) for row in rows])
        keys = np.array([row.key for row in rows], dtype=np.int64)
        order = np.lexsort((keys, -scores))
        self._rows = rows = [rows[i] for i in order]
        self._row_of = {row.key: i for i, row in enumerate(rows)}
        self._alive = np.ones(len(rows), dtype=bool)
        self._living = len(rows)
        self._recent: dict[int, Candidate] = {}
        paths = np.frombuffer(b"".join(row.paths for row in rows), dtype="<u8")
        counts = np.array([len(row.paths) // 8 for row in rows], dtype=np.int64)
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        by_path = np.argsort(paths, kind="stable")
        self._posts = owner[by_path]
        ordered = paths[by_path]
        first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
        self._paths = ordered[first]
        self._starts = np.r_[first, len(ordered)]
        self._table: _Table | None = None
        self._recent_paths: dict[int, set[int]] = {}

    def add(self, entry: Candidate) -> None:
        """Add a model, or replace the one of the same key."""
        self.remove(entry.key)
        self._recent[entry.key] = entry
        self._living += 1
        for path in np.frombuffer(entry.paths, dtype="<u8").tolist():
            self._recent_paths.setdefault(path, set()).add(entry.key)
        if len(self._recent) > 256 + len(self._rows) // 8:
            alive = [row for row, living in zip(self._rows, self._alive, strict=True) if living]
            self._rows = [*alive, *self._recent.values()]
            self._rebuild()

    def remove(self, key: int) -> None:
        """Forget a model, if it is known."""
        recent = self._recent.pop(key, None)
        if recent is not None:
            self._living -= 1
            for path in np.frombuffer(recent.paths, dtype="<u8").tolist():
                self._recent_paths.get(path, set()).discard(key)
        row = self._row_of.get(key)
        if row is not None and self._alive[row]:
            self._alive[row] = False
            self._living -= 1

    # -------------------------------------------------------------------------- longest prefix

    def lp(self, paths: Ids, allowed: set[int] | None = None) -> NearestModel | None:
        """The model that has most of these Merkle ids; None if none has any."""
        mine = self._mask(allowed)
        best = self._lp_sorted(paths, mine)
        recent = self._recent if allowed is None else self._recent.keys() & allowed
        counts: dict[int, int] = {}
        for path in paths:
            for key in self._recent_paths.get(path, ()):
                if key in recent:
                    counts[key] = counts.get(key, 0) + 1
        return self._better(best, counts)

    def _lp_sorted(self, paths: Ids, mine: NDArray[np.bool_]) -> tuple[int, int] | None:
        """(row, length) among the sorted rows.

        The rarest id first: its holders can have all of the present ones, those without it one
        fewer, and so on; rows stand in order of preference, so the first that reaches the bound
        is the answer. Source: the threshold algorithm of Fagin et al., on sets.
        """
        if not len(self._paths):
            return None
        wanted = np.array(paths, dtype=np.uint64)
        at = np.searchsorted(self._paths, wanted)
        at[at == len(self._paths)] = 0
        at = at[self._paths[at] == wanted]
        spans = sorted(
            zip(self._starts[at].tolist(), self._starts[at + 1].tolist(), strict=True),
            key=lambda span: span[1] - span[0],
        )
        have = set(self._paths[at].tolist())
        best: tuple[int, int] | None = None
        for i, (start, stop) in enumerate(spans):
            bound = len(spans) - i
            if best is not None and best[1] > bound:
                break
            if stop - start > _SMALL:
                return self._lp_counted(spans[i:], mine, best, have)
            for row in self._posts[start:stop].tolist():
                if not mine[row]:
                    continue
                length = self._length(row, have)
                if best is None or (length, -row) > (best[1], -best[0]):
                    best = (row, length)
                if length == bound:
                    break
        return best

    def _length(self, row: int, wanted: set[int]) -> int:
        return len(wanted.intersection(np.frombuffer(self._rows[row].paths, dtype="<u8").tolist()))

    def _lp_counted(
        self,
        spans: Sequence[tuple[int, int]],
        mine: NDArray[np.bool_],
        best: tuple[int, int] | None,
        have: set[int],
    ) -> tuple[int, int] | None:
        """Exact counts over long postings, unless a preferred row has all of them."""
        start, _ = spans[0]
        for row in self._posts[start : start + _SMALL].tolist():
            if mine[row]:
                if self._length(row, have) == len(spans):
                    return self._best_of(best, (row, len(spans)))
                break
        rows = np.concatenate([self._posts[start:stop] for start, stop in spans])
        counts = np.bincount(rows, minlength=len(self._rows))
        counts[~mine] = 0
        row = int(np.argmax(counts))  # the first of equals, and so the preferred one
        return self._best_of(best, (row, int(counts[row]))) if counts[row] else best

    @staticmethod
    def _best_of(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
        if a is None or b is None:
            return a or b
        return max(a, b, key=lambda found: (found[1], -found[0]))

    # ---------------------------------------------------------------- longest common subsequence

    def lcs(self, ids: Ids, allowed: set[int] | None = None) -> NearestModel | None:
        """The model with the longest common subsequence of layer ids; None if none has any."""
        if self._table is None:
            self._table = _Table([row.ids for row in self._rows])
        lengths = self._table.lengths(ids)
        lengths[~self._mask(allowed)] = 0
        row = int(np.argmax(lengths)) if len(lengths) else 0
        best = (row, int(lengths[row])) if len(lengths) and lengths[row] else None
        recent = [entry for key, entry in self._recent.items() if allowed is None or key in allowed]
        counts = {}
        if recent:
            found = _Table([entry.ids for entry in recent]).lengths(ids)
            counts = {e.key: int(n) for e, n in zip(recent, found, strict=True) if n}
        return self._better(best, counts)

    # ----------------------------------------------------------------------------------- both

    def _mask(self, allowed: set[int] | None) -> NDArray[np.bool_]:
        if allowed is None:
            return self._alive
        mask = np.zeros(len(self._rows), dtype=bool)
        mask[[self._row_of[key] for key in allowed if key in self._row_of]] = True
        return mask & self._alive

    def _better(
        self, best: tuple[int, int] | None, recent: Mapping[int, int]
    ) -> NearestModel | None:
        entries = [(length, self._recent[key]) for key, length in recent.items()]
        if best is not None:
            entries.append((best[1], self._rows[best[0]]))
        if not entries:
            return None
        length, entry = max(entries, key=lambda e: (e[0], _number(e[1].score), -e[1].key))
        return NearestModel(entry.key, length, entry.score, entry.ref)


def _number(score: float | None) -> float:
    return -np.inf if score is None or score != score else score


class _Table:
    """Layer ids of many models as small numbers, position by position."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        counts = np.array([len(row) // 8 for row in rows], dtype=np.int64)
        flat = np.frombuffer(b"".join(rows), dtype="<u8")
        self._symbols, codes = np.unique(flat, return_inverse=True)
        # Longest first: then the models that have a k-th layer are the first so many.
        self._order = np.argsort(-counts, kind="stable")
        width = int(counts.max(initial=0))
        kind = np.uint16 if len(self._symbols) < 2**16 else np.uint32
        starts = np.r_[0, np.cumsum(counts)][:-1]
        self._columns = []
        for k in range(width):
            longer = self._order[: int((counts > k).sum())]
            self._columns.append(codes[starts[longer] + k].astype(kind))
        self._size = len(rows)

    def lengths(self, ids: Ids) -> NDArray[np.int64]:
        """Length of the longest common subsequence with every model.

        One bit per layer asked for, 64 to a word, all models at once.
        Source: Hyyrö, Bit-parallel LCS-length computation revisited, AWOCA'04.
        """
        bits = next((b for b in (8, 16, 32, 64) if len(ids) <= b), 64)
        words = max(1, -(-len(ids) // bits))
        kind = np.dtype(f"u{bits // 8}")
        masks = np.zeros((words, len(self._symbols)), dtype=kind)
        wanted = np.array(ids, dtype=np.uint64)
        at = np.searchsorted(self._symbols, wanted)
        for place, (code, symbol) in enumerate(zip(at.tolist(), wanted.tolist(), strict=True)):
            if code < len(self._symbols) and int(self._symbols[code]) == symbol:
                masks[place // bits, code] |= kind.type(1 << (place % bits))
        ones = np.full((words, self._size), np.iinfo(kind).max, dtype=kind)
        for column in self._columns:
            carry: NDArray[np.bool_] | None = None
            for word in range(words):
                v = ones[word, : len(column)]
                u = v & masks[word].take(column)
                total = v + u
                overflow = total < v if word + 1 < words else None
                if carry is not None:
                    total += carry
                    if overflow is not None:
                        overflow |= carry & (total == 0)
                np.subtract(v, u, out=v)  # v and not u: u has no bit that v lacks
                np.bitwise_or(v, total, out=v)
                carry = overflow
        lengths = np.empty(self._size, dtype=np.int64)
        found = sum(np.bitwise_count(~ones[word]).astype(np.int64) for word in range(words))
        lengths[self._order] = found
        return lengths
