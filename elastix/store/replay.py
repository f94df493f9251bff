"""Packs into an index: all of them, or the tails that crashed writers left.

Invariant: no model becomes visible that lacks a tensor, and no tensor whose bytes were not synced.
"""

import logging
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from elastix.errors import Conflict, Corrupt, NotFound, StoreError
from elastix.store.index import Index
from elastix.store.packs import Packs, read_record
from elastix.store.records import ALIGNMENT, Kind, Model, Place, parse_header, parse_small, scan

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
    longer = [pack for pack, size in packs.sizes().items() if size > known.get(pack, 0)]
    dead = [pack for pack in longer if not packs.alive(pack)]
    sizes = packs.sizes() if dead else {}  # again: what it wrote before it went
    return [Span(pack, known.get(pack, 0), sizes[pack]) for pack in sorted(dead) if pack in sizes]


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


def replay(index: Index, packs: Packs, spans: list[Span]) -> None:
    """Enter the records of `spans`: tensors first, then the rest in the order of its clock."""
    small: list[tuple[int, Kind, Place]] = []
    for span in spans:
        with suppress(NotFound):
            small += _replay_blobs(index, packs, span)
    rev = index.next_rev()
    for seq, kind, place in sorted(small):
        index.tick(seq)
        try:
            _, payload = read_record(packs, place, kind)
            _replay_small(index, seq, kind, place, payload, rev)
        except (Corrupt, NotFound) as error:
            logger.warning("record skipped pack=%s byte=%d: %s", place.pack, place.offset, error)


def _replay_blobs(index: Index, packs: Packs, span: Span) -> list[tuple[int, Kind, Place]]:
    if span.size == 0:
        return []
    view = packs.view(span.pack)

    def read(offset: int, length: int) -> bytes:
        return bytes(view.bytes_at(offset, length))

    # A seal says that all before it was synced; without one, bytes may be missing anywhere.
    trusted = span.start == 0 and is_sealed(packs, span.pack, span.size)
    small: list[tuple[int, Kind, Place]] = []
    blobs: list[tuple[bytes, Place]] = []
    end = span.start
    for place, header in scan(read, span.pack, span.start, span.size):
        end = place.end
        if header.kind not in (Kind.TENSOR, Kind.SEAL):
            small.append((header.seq, header.kind, place))
        elif header.kind == Kind.TENSOR and (
            trusted or blake3(view.bytes_at(place.offset, place.length)).digest() == header.digest
        ):
            blobs.append((header.digest, place))
        if len(blobs) == _BATCH:
            index.add_blobs(blobs)
            blobs.clear()
    index.add_blobs(blobs)
    index.extend_pack(span.pack, span.size, torn=end if end < span.size else None)
    return small


def _replay_small(
    index: Index, seq: int, kind: Kind, place: Place, payload: bytes, rev: int
) -> None:
    if kind == Kind.MODEL:
        model = Model.from_bytes(payload, place.pack)
        index.add_model(model.manifest.ref, model, seq, place, rev, keep_broken=True)
        return
    body = parse_small(payload, place.pack)
    if kind == Kind.TAG:
        index.set_tag(body["tag"], body["ref"], seq, place)
    else:
        index.retire(body["ref"], body["parents"], seq, place, rev)


def is_sealed(packs: Packs, pack: str, size: int) -> bool:
    """Whether the last record of a pack is its seal."""
    at = size - ALIGNMENT
    if at < 0:
        return False
    try:
        return parse_header(packs.read(pack, at, ALIGNMENT), pack, at).kind == Kind.SEAL
    except StoreError:
        return False
