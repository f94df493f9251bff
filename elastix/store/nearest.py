"""Which of many models shares most with a signature: an inverted index and a bit-parallel scan.

Not here: what sharing means (lineage.shared defines it) or where signatures are kept.

Invariant: `lp` and `lcs` give the length that lineage.shared gives for the best model alive, and
among equals the one with the highest score, then the one that was added first.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int]
_SMALL = 64
_REF_BYTES = 32
_RECENT = 256
_FEW = 8
"""One in so many models: where fewer are allowed, they are looked at one by one."""
_RATIO = 4
"""How many times as large a segment is at least as the next one."""


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


class _Lists:
    """Many lists of 64-bit ids, one behind the other in one array."""

    def __init__(self, flat: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        self.flat = flat
        self.counts = counts
        self.starts = np.r_[0, np.cumsum(counts)]

    @classmethod
    def of(cls, packed: Iterable[bytes]) -> Self:
        """From ids as a Candidate has them."""
        flat, counts = bytearray(), array("q")
        for ids in packed:
            flat += ids
            counts.append(len(ids) // 8)
        return cls(np.frombuffer(flat, dtype="<u8"), np.frombuffer(counts, dtype=np.int64))

    def __getitem__(self, place: int) -> list[int]:
        found: list[int] = self.flat[self.starts[place] : self.starts[place + 1]].tolist()
        return found

    def take(self, places: NDArray[np.int64]) -> "_Lists":
        """The lists at these places, in that order."""
        counts = self.counts[places]
        taken = _Lists(self.flat[:0], counts)
        shift = self.starts[places] - taken.starts[:-1]
        taken.flat = self.flat[np.repeat(shift, counts) + np.arange(taken.starts[-1])]
        return taken

    def followed_by(self, other: "_Lists") -> "_Lists":
        """These and then those."""
        return _Lists(np.r_[self.flat, other.flat], np.r_[self.counts, other.counts])


class _Rows:
    """Candidates in columns: a third of the memory that as many tuples take."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        scores: NDArray[np.float64],
        refs: NDArray[np.uint8],
        paths: _Lists,
        ids: _Lists,
    ) -> None:
        self.keys, self.scores, self.refs = keys, scores, refs
        self.paths, self.ids = paths, ids

    @classmethod
    def of(cls, rows: Iterable[Candidate]) -> Self:
        """From Candidates, of which none is kept."""
        keys, scores, refs = array("q"), array("d"), bytearray()
        flat_paths, flat_ids = bytearray(), bytearray()
        path_counts, id_counts = array("q"), array("q")
        for key, score, paths, ids, ref in rows:  # of all models there are: no loop in this one
            keys.append(key)
            scores.append(np.nan if score is None else score)
            refs += ref.ljust(_REF_BYTES, b"\0")
            flat_paths += paths
            flat_ids += ids
            path_counts.append(len(paths) // 8)
            id_counts.append(len(ids) // 8)
        first, second = (
            _Lists(np.frombuffer(several, dtype="<u8"), np.frombuffer(lengths, dtype=np.int64))
            for several, lengths in ((flat_paths, path_counts), (flat_ids, id_counts))
        )
        return cls(
            np.frombuffer(keys, dtype=np.int64),
            np.frombuffer(scores, dtype=np.float64),
            np.frombuffer(refs, dtype=np.uint8).reshape(-1, _REF_BYTES),
            first,
            second,
        )

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, places: NDArray[np.int64]) -> "_Rows":
        """The rows at these places, in that order."""
        return _Rows(
            self.keys[places],
            self.scores[places],
            self.refs[places],
            self.paths.take(places),
            self.ids.take(places),
        )

    def followed_by(self, other: "_Rows") -> "_Rows":
        """These and then those."""
        return _Rows(
            np.r_[self.keys, other.keys],
            np.r_[self.scores, other.scores],
            np.r_[self.refs, other.refs],
            self.paths.followed_by(other.paths),
            self.ids.followed_by(other.ids),
        )


class Neighbours:
    """Models by signature. Grows and shrinks.

    What was added lately is in a dictionary. When that is full it becomes a segment, together with
    all segments that are not several times as large: so there are few, and a model is sorted anew
    a few times however many come. Source: O'Neil et al., The log-structured merge-tree, 1996.
    """

    def __init__(self, entries: Iterable[Candidate] = ()) -> None:
        self._segments = [_Segment(_Rows.of(entries))]
        self._recent: dict[int, Candidate] = {}
        self._recent_paths: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return sum(segment.living for segment in self._segments) + len(self._recent)

    def add(self, entry: Candidate) -> None:
        """Add a model, or replace the one of the same key."""
        self.remove(entry.key)
        self._recent[entry.key] = entry
        for path in np.frombuffer(entry.paths, dtype="<u8").tolist():
            self._recent_paths.setdefault(path, set()).add(entry.key)
        if len(self._recent) > _RECENT:
            rows = _Rows.of(self._recent.values())
            while self._segments and len(self._segments[-1].rows) < _RATIO * len(rows):
                rows = self._segments.pop().alive().followed_by(rows)
            self._segments.append(_Segment(rows))
            self._recent, self._recent_paths = {}, {}

    def remove(self, key: int) -> None:
        """Forget a model, if it is known."""
        recent = self._recent.pop(key, None)
        if recent is not None:
            for path in np.frombuffer(recent.paths, dtype="<u8").tolist():
                self._recent_paths.get(path, set()).discard(key)
        for segment in self._segments:
            segment.remove(key)

    def lp(self, paths: Ids, allowed: set[int] | None = None) -> NearestModel | None:
        """The model that has most of these Merkle ids; None if none has any."""
        recent = self._recent if allowed is None else self._recent.keys() & allowed
        counts: dict[int, int] = {}
        for path in paths:
            for key in self._recent_paths.get(path, ()):
                if key in recent:
                    counts[key] = counts.get(key, 0) + 1
        return self._best((segment.lp(paths, allowed) for segment in self._segments), counts)

    def lcs(self, ids: Ids, allowed: set[int] | None = None) -> NearestModel | None:
        """The model with the longest common subsequence of layer ids; None if none has any."""
        recent = [entry for key, entry in self._recent.items() if allowed is None or key in allowed]
        counts = {}
        if recent:
            lengths = _Table(_Lists.of(entry.ids for entry in recent)).lengths(ids)
            counts = {e.key: int(n) for e, n in zip(recent, lengths, strict=True) if n}
        return self._best((segment.lcs(ids, allowed) for segment in self._segments), counts)

    def _best(
        self, found: Iterable[NearestModel | None], recent: Mapping[int, int]
    ) -> NearestModel | None:
        models = [model for model in found if model is not None]
        for key, length in recent.items():
            entry = self._recent[key]
            models.append(NearestModel(key, length, entry.score, entry.ref))
        return max(models, key=lambda m: (m.length, _number(m.score), -m.key), default=None)


class _Segment:
    """Models of which some may have gone, and none comes. In order of preference.

    So the best of any set of rows is its smallest number.

    Attributes:
        rows: all.
        living: how many of them have not gone.
    """

    def __init__(self, rows: _Rows) -> None:
        scores = np.where(np.isnan(rows.scores), -np.inf, rows.scores)
        self.rows = rows = rows.take(np.lexsort((rows.keys, -scores)))
        self.living = len(rows)
        self._by_key = np.argsort(rows.keys)
        self._keys = rows.keys[self._by_key]
        self._alive = np.ones(len(rows), dtype=bool)
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), rows.paths.counts)
        by_path = np.argsort(rows.paths.flat, kind="stable")
        self._posts = owner[by_path]
        ordered = rows.paths.flat[by_path]
        first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
        self._paths = ordered[first]
        self._starts = np.r_[first, len(ordered)]
        self._table: _Table | None = None

    def alive(self) -> _Rows:
        """Those that have not gone."""
        return self.rows.take(np.flatnonzero(self._alive))

    def remove(self, key: int) -> None:
        """It goes, if it is here."""
        if not len(self._keys) or not self._keys[0] <= key <= self._keys[-1]:
            return  # as nearly always: it was put after all of these
        rows = self._places([key])
        if self._alive[rows].any():
            self._alive[rows] = False
            self.living -= 1

    def _places(self, keys: Iterable[int]) -> NDArray[np.int64]:
        """The rows of those of these keys that have one."""
        wanted = np.fromiter(keys, dtype=np.int64)
        at = np.searchsorted(self._keys, wanted)
        there = at < len(self._keys)
        there[there] = self._keys[at[there]] == wanted[there]
        return self._by_key[at[there]]

    def _mask(self, allowed: set[int] | None) -> NDArray[np.bool_]:
        if allowed is None:
            return self._alive
        mask = np.zeros(len(self.rows), dtype=bool)
        mask[self._places(allowed)] = True
        return mask & self._alive

    def _model(self, best: tuple[int, int] | None) -> NearestModel | None:
        if best is None:
            return None
        row, length = best
        score = float(self.rows.scores[row])
        known = None if score != score else score
        return NearestModel(int(self.rows.keys[row]), length, known, self.rows.refs[row].tobytes())

    def lp(self, paths: Ids, allowed: set[int] | None) -> NearestModel | None:
        """See Neighbours."""
        few = self._few(allowed)
        if few is None:
            return self._model(self._lp(paths, self._mask(allowed)))
        theirs = self.rows.paths.take(few)
        shared = np.r_[0, np.cumsum(np.isin(theirs.flat, np.array(paths, dtype=np.uint64)))]
        lengths = shared[theirs.starts[1:]] - shared[theirs.starts[:-1]]
        return self._longest(few, lengths)

    def lcs(self, ids: Ids, allowed: set[int] | None) -> NearestModel | None:
        """See Neighbours."""
        few = self._few(allowed)
        if few is not None:
            return self._longest(few, _Table(self.rows.ids.take(few)).lengths(ids))
        if self._table is None:
            self._table = _Table(self.rows.ids)
        lengths = self._table.lengths(ids)
        lengths[~self._mask(allowed)] = 0
        return self._longest(None, lengths)

    def _few(self, allowed: set[int] | None) -> NDArray[np.int64] | None:
        """Rows of those allowed, if they are so few that the others are better not looked at."""
        if allowed is None or _FEW * len(allowed) > len(self.rows):
            return None
        rows = np.sort(self._places(allowed))
        return rows[self._alive[rows]]

    def _longest(
        self, rows: NDArray[np.int64] | None, lengths: NDArray[np.int64]
    ) -> NearestModel | None:
        """The first of those with the greatest length. `rows`: None stands for all."""
        if not len(lengths):
            return None
        at = int(np.argmax(lengths))
        row = at if rows is None else int(rows[at])
        return self._model((row, int(lengths[at]))) if lengths[at] else None

    def _lp(self, paths: Ids, mine: NDArray[np.bool_]) -> tuple[int, int] | None:
        """(row, length) of the best.

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
        return len(wanted.intersection(self.rows.paths[row]))

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
        counts = np.bincount(rows, minlength=len(self.rows))
        counts[~mine] = 0
        row = int(np.argmax(counts))  # the first of equals, and so the preferred one
        return self._best_of(best, (row, int(counts[row]))) if counts[row] else best

    @staticmethod
    def _best_of(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
        if a is None or b is None:
            return a or b
        return max(a, b, key=lambda found: (found[1], -found[0]))


def _number(score: float | None) -> float:
    return -np.inf if score is None or score != score else score


class _Table:
    """Layer ids of many models as small numbers, position by position."""

    def __init__(self, rows: _Lists) -> None:
        counts, starts = rows.counts, rows.starts
        self._symbols, codes = np.unique(rows.flat, return_inverse=True)
        # Longest first: then the models that have a k-th layer are the first so many.
        self._order = np.argsort(-counts, kind="stable")
        width = int(counts.max(initial=0))
        kind = np.uint16 if len(self._symbols) < 2**16 else np.uint32
        self._columns = []
        for k in range(width):
            longer = self._order[: int((counts > k).sum())]
            self._columns.append(codes[starts[longer] + k].astype(kind))
        self._size = len(counts)

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
