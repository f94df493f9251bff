"""Packs into an index: all of them, or the tails that crashed writers left.

Invariant: no model becomes visible that lacks a tensor, and no tensor whose bytes were not synced.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from elastix.errors import Conflict, Corrupt, NotFound, StoreError
from elastix.state import Ref
from elastix.store.index import Index, Status
from elastix.store.packs import Packs, View, read_record
from elastix.store.records import (
    ALIGNMENT,
    Header,
    Kind,
    Model,
    Place,
    parse_header,
    parse_retired,
    parse_tag,
    scan,
)

logger = logging.getLogger(__name__)
_BATCH = 10_000


class Span(NamedTuple):
    """Bytes of a pack that an index does not know yet."""

    pack: str
    start: int
    size: int


def everything(packs: Packs) -> list[Span]:
    """Every pack from its first byte."""
    return [Span(pack, 0, size) for pack, size in sorted(packs.sizes().items())]


def tails(index: Index, packs: Packs) -> list[Span]:
    """What writers that are gone left behind the last byte that the index knows."""
    rows = index.sql.execute("SELECT name, iif(gone, ?, end) FROM packs", (1 << 62,))
    known = dict(rows.fetchall())
    if packs.folder is None:  # what is visible there is whole
        known = {pack: 1 << 62 if end else 0 for pack, end in known.items()}
    longer = [pack for pack, size in packs.sizes().items() if size > known.get(pack, 0)]
    dead = [pack for pack in longer if not packs.alive(pack)]
    sizes = packs.sizes() if dead else {}  # again: what it wrote before it went
    return [Span(pack, known.get(pack, 0), sizes[pack]) for pack in sorted(dead) if pack in sizes]


def unknown(index: Index, packs: Packs) -> bool:
    """Whether writers that are gone left records that the index does not know; seals are none."""
    return any(
        span.start < (sealed_at(packs, span.pack, span.size) or span.size)
        for span in tails(index, packs)
    )


def lost(index: Index, packs: Packs) -> set[bytes]:
    """Digests and refs that the index, an old one perhaps, knows in packs that are not there."""
    found: set[bytes] = set()
    for pack in lost_packs(index, packs):
        logger.warning("a pack is gone pack=%s", pack)
        for query in ("b.digest FROM blobs b", "b.ref FROM models b"):
            rows = index.sql.execute(
                f"SELECT {query} JOIN packs p ON p.id = b.pack WHERE p.name = ?", (pack,)
            )
            found.update(key for (key,) in rows)
    return found


def lost_packs(index: Index, packs: Packs) -> list[str]:
    """Packs that the index knows, that gc did not remove, and that are not there."""
    rows = index.sql.execute("SELECT name FROM packs WHERE gone = 0 AND end > 0").fetchall()
    there = packs.sizes()  # after it was asked: what is newer is in no row
    absent = [pack for (pack,) in rows if pack not in there]
    return [pack for pack in absent if not index.is_gone(pack)]  # gc bars one before it removes it


def check_alone(packs: Packs) -> None:
    """Refuse to go on while a writer is at work.

    Raises:
        Conflict: names the writer.
    """
    for pack in packs.sizes():
        if packs.alive(pack):
            raise Conflict(
                f"the index must be rebuilt, and writer {pack[:16]} is at work. Nothing was "
                "changed. Close the other processes that use this store first."
            )


def replay(index: Index, packs: Packs, spans: list[Span], doubted: set[bytes]) -> None:
    """Enter the records of `spans`: tensors first, then the rest in the order of its clock.

    Args:
        index: to enter them into.
        packs: where they are.
        spans: the parts to read.
        doubted: digests and refs of which another record than the known one is wanted.
    """
    small: list[tuple[int, Kind, Place, bytes | None]] = []
    for span, view in zip(spans, packs.tails([span.pack for span in spans]), strict=True):
        if view is not None and span.size > 0:
            with suppress(NotFound):
                small += _replay_blobs(index, packs, span, view, doubted)
    others = _Others(index, packs, index.next_rev(), doubted)
    for seq, kind, place, payload in sorted(small):
        index.advance(seq)
        try:
            if payload is None:
                _, payload = read_record(packs, place, kind)
            others.enter(seq, kind, place, payload)
        except (Corrupt, NotFound) as error:
            logger.warning("record skipped pack=%s byte=%d: %s", place.pack, place.offset, error)


def _replay_blobs(
    index: Index, packs: Packs, span: Span, view: View, doubted: set[bytes]
) -> list[tuple[int, Kind, Place, bytes | None]]:
    """Enter the tensors of a span. Returns its other records: clock, kind, place and payload.

    Payloads only where a request for each would take long; on a disk they are read in their turn.
    """
    # A seal says that all before it was synced; without one, bytes may be missing anywhere.
    seal = _seal(view, span)
    trusted = span.start == 0 and seal is not None
    small: list[tuple[int, Kind, Place, bytes | None]] = []
    blobs: list[tuple[bytes, Place]] = []
    end = span.start
    for place, header in _records(view, span, seal):
        end = place.end
        if header.kind == Kind.TENSOR:
            if trusted or _sound(view, place, header):
                blobs.append((header.digest, place))
        elif header.kind != Kind.SEAL and packs.folder is not None:
            small.append((header.seq, header.kind, place, None))
        elif header.kind != Kind.SEAL and _sound(view, place, header):
            payload = bytes(view.bytes_at(place.offset, place.length))
            small.append((header.seq, header.kind, place, payload))
        if len(blobs) == _BATCH:
            _enter(index, packs, blobs, doubted)
            blobs.clear()
    _enter(index, packs, blobs, doubted)
    if seal is not None and seal.seq == end:
        index.extend_pack(span.pack, end)
    else:
        index.extend_pack(span.pack, span.size, torn=end if end < span.size else None)
    return small


def _sound(view: View, place: Place, header: Header) -> bool:
    return blake3(view.bytes_at(place.offset, place.length)).digest() == header.digest


def _records(view: View, span: Span, seal: Header | None) -> Iterator[tuple[Place, Header]]:
    """Every record of the span: from the contents before the seal, or one after the other."""
    if seal is not None and seal.seq:
        with suppress(Corrupt):
            yield from _contents(view, span, seal.seq)
            return

    def read(offset: int, length: int) -> bytes:
        return bytes(view.bytes_at(offset, length))

    yield from scan(read, span.pack, span.start, span.size)


def _contents(view: View, span: Span, at: int) -> list[tuple[Place, Header]]:
    """The records that a sealed pack says it has.

    Raises:
        Corrupt: it does not say so.
    """
    if at % ALIGNMENT or at > span.size - 2 * ALIGNMENT:
        raise Corrupt(f"the contents of {span.pack} are not at byte {at}.")
    size = parse_header(bytes(view.bytes_at(at, ALIGNMENT)), span.pack, at).length
    if size > span.size - at - ALIGNMENT:
        raise Corrupt(f"the contents of {span.pack} have {size} bytes.")
    headers = bytes(view.bytes_at(at + ALIGNMENT, size))
    found, place_at = [], 0
    for start in range(0, size, ALIGNMENT):
        header = parse_header(headers[start : start + ALIGNMENT], span.pack, place_at)
        place = Place(span.pack, place_at + ALIGNMENT, header.length)
        if place.offset >= span.start:
            found.append((place, header))
        place_at = place.end
    if place_at != at:
        raise Corrupt(f"the contents of {span.pack} end at byte {place_at}, not {at}.")
    return found


def _enter(
    index: Index, packs: Packs, blobs: list[tuple[bytes, Place]], doubted: set[bytes]
) -> None:
    """Tensors by digest; of two records of one the first counts that is as it was written."""
    new = index.add_blobs(blobs)
    if new == len(blobs):
        return
    known = index.places([digest for digest, _ in blobs])
    better = []
    for digest, place in blobs:
        if digest not in known or known[digest] == place:
            continue
        try:
            if digest not in doubted:
                read_record(packs, known[digest], Kind.TENSOR)
                continue
        except (Corrupt, NotFound):
            pass
        better.append((digest, place))
        doubted.discard(digest)
    index.replace_blobs(better)


class _Others:
    """Enters what is no tensor, in the order of its clock.

    A retirement whose commit failed has left a record all the same. If another process has tagged
    the model after it, which nobody can do with one that is retired, then it never took effect.
    """

    def __init__(self, index: Index, packs: Packs, rev: int, doubted: set[bytes]) -> None:
        self._index = index
        self._packs = packs
        self._rev = rev
        self._doubted = doubted
        self._tagged = index.tagged_since()
        self._retired: dict[Ref, Place] = {}  # by what is entered here: where their records are

    def enter(self, seq: int, kind: Kind, place: Place, payload: bytes) -> None:
        """One record."""
        if kind == Kind.MODEL:
            self._enter_model(Model.from_bytes(payload, place.pack), seq, place)
        elif kind == Kind.TAG:
            name, ref = parse_tag(payload, place.pack)
            self._index.set_tag(name, ref, seq, place)
            if ref is not None:
                self._bring_back(ref, seq)
        else:
            ref, parents = parse_retired(payload, place.pack)
            if self._tagged.get(ref, -1) > seq:
                return
            row = self._index.row(ref)
            self._index.retire(ref, parents, seq, place, self._rev)
            if row is not None and row.status != Status.RETIRED and row.seq <= seq:
                self._retired[ref] = row.place

    def _enter_model(self, model: Model, seq: int, place: Place) -> None:
        ref = model.manifest.ref
        self._index.add_model(ref, model, seq, place, self._rev, keep_broken=True)
        self._retired.pop(ref, None)
        if bytes.fromhex(ref) in self._doubted:
            self._index.replace_model(ref, place)
            self._doubted.discard(bytes.fromhex(ref))

    def _bring_back(self, ref: Ref, seq: int) -> None:
        place = self._retired.get(ref)
        if place is not None:
            logger.warning("a retirement before a tag did not take effect model=%s", ref[:12])
            _, payload = read_record(self._packs, place, Kind.MODEL)
            self._enter_model(Model.from_bytes(payload, place.pack), seq, place)


def sealed_at(packs: Packs, pack: str, size: int) -> int | None:
    """Where the records of a sealed pack end and its seal begins; None: it has none."""
    try:
        seal = _seal_of(packs.read(pack, max(0, size - ALIGNMENT), ALIGNMENT), pack, size)
    except StoreError:
        return None
    return None if seal is None else seal.seq or size - ALIGNMENT


def _seal(view: View, span: Span) -> Header | None:
    if span.size < ALIGNMENT:
        return None
    return _seal_of(bytes(view.bytes_at(span.size - ALIGNMENT, ALIGNMENT)), span.pack, span.size)


def _seal_of(raw: bytes, pack: str, size: int) -> Header | None:
    try:
        header = parse_header(raw, pack, size - ALIGNMENT)
    except StoreError:
        return None
    return header if header.kind == Kind.SEAL else None
