"""Garbage collection: whole packs go, after what is still needed of them was written elsewhere.

Invariants: a pack is removed only after the index that says nobody needs it is on the disk; never
is a file cut, punched or written in place. A put that was under way while its tensors went is
told so by the ledger, and writes them again.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from elastix.errors import Corrupt, Full, NotFound
from elastix.state import Ref
from elastix.store import pack_replay
from elastix.store.index import Index, damaged
from elastix.store.pack_replay import sealed_at
from elastix.store.packs import Packs, Writer, read_record
from elastix.store.records import Kind, scan
from elastix.store.verify import live_bytes, record_bytes

if TYPE_CHECKING:
    from elastix.store.ledger import Ledger

logger = logging.getLogger(__name__)
_POOR = 1.1  # file size over needed bytes, from which on a pack is rewritten
_FORGET_BATCH = 100  # small: it must fit into the reserve on a full disk


@dataclass(frozen=True)
class Collected:
    """What a collection did.

    Attributes:
        freed_bytes: size of removed packs less what was written anew.
        removed: packs that are gone.
        kept: packs that ought to go, and why they did not.
    """

    freed_bytes: int
    removed: tuple[str, ...]
    kept: dict[str, str]


def collect(ledger: "Ledger", writer: Writer) -> Collected:
    """Remove packs that are useless, after moving what is still needed out of poor ones."""
    ledger.adopt()
    with ledger.asking() as index:
        gone = pack_replay.lost_packs(index, ledger.packs)
    if gone:
        raise Corrupt(
            f"the index names pack {gone[0]}, which is not there, {len(gone)} in all: either the "
            "index is damaged, or packs were lost. Nothing was collected. `elastix store verify` "
            "says whose they were; `elastix store rebuild` makes the index anew without them."
        )
    with writer.lock:
        writer.seal()
    before = sum(ledger.packs.sizes().values())
    mover = ledger.packs.writer()
    removed: list[str] = []
    kept: dict[str, str] = {}
    try:
        for prune in (False, True):
            if prune and not (removed and _prune(ledger)):
                break  # a retired model's record goes with its pack, so there is nothing to forget
            _forget_blobs(ledger)
            kept = _sweep(ledger, mover, removed)
            mover.seal()
    finally:
        mover.close()
    ledger.adopt()
    after = sum(ledger.packs.sizes().values())
    return Collected(before - after, tuple(removed), kept)


def _forget_blobs(ledger: "Ledger") -> None:
    """Forget what nobody refers to: a put that relied on it is told to write it again.

    The counts are a cache as all of the index is; the uses themselves have the last word.
    """
    with ledger.asking() as index:
        query = "SELECT id FROM blobs WHERE refs = 0"
        idle = [number for (number,) in index.sql.execute(query)]
        query = "SELECT DISTINCT blob FROM uses WHERE blob IN (SELECT id FROM blobs WHERE refs = 0)"
        used = {number for (number,) in index.sql.execute(query)} if idle else set()
    if used:
        logger.warning("references miscounted blobs=%d: counting anew", len(used))
        with ledger.transaction() as index:
            index.recount(used)
    for start in range(0, len(idle), _FORGET_BATCH):
        with ledger.transaction(durable=True) as index:
            index.sql.executemany(
                "DELETE FROM blobs WHERE id = ? AND refs = 0",
                ((number,) for number in idle[start : start + _FORGET_BATCH]),
            )


def _sweep(ledger: "Ledger", mover: Writer, removed: list[str]) -> dict[str, str]:
    """One pass over the packs; those that give most for least come first."""
    packs = ledger.packs
    sizes = packs.sizes()
    with ledger.asking() as index:
        live = live_bytes(index)
        ends = index.ends()
    kept: dict[str, str] = {}
    for pack in sorted(sizes, key=lambda name: live.get(name, 0)):
        used = live.get(pack, 0)
        if record_bytes(packs, ends, pack, sizes[pack]) <= _POOR * used:
            continue
        seal = sealed_at(packs, pack, sizes[pack])
        if seal is None and packs.alive(pack):
            kept[pack] = "its writer is at work"
            continue
        if ends.get(pack, 0) < (sizes[pack] if seal is None else seal):
            kept[pack] = "the index has not read it to its end"
            continue
        try:
            if used:
                _move(ledger, mover, pack)
            with ledger.transaction(durable=True) as index:
                useless = index.give_up(pack)
            if not useless:
                kept[pack] = "it came to be needed meanwhile"
            elif packs.remove(pack):
                removed.append(pack)
            else:
                kept[pack] = "a reader holds it"
        except (Corrupt, NotFound, Full) as error:
            kept[pack] = str(error)
            mover.cut()
    return kept


def _move(ledger: "Ledger", mover: Writer, pack: str) -> None:
    """Write everything needed of `pack` into another, and let the index say so, durably.

    Raises:
        Corrupt: something needed cannot be read; the pack stays as it is.
        Full: there is no room.
    """
    with ledger.asking() as index:
        number, needed = index.records(pack)
    moved = []
    for table, kind, place, digest in needed:
        header, payload = read_record(ledger.packs, place, kind)
        if digest not in (None, header.digest):
            raise damaged(f"another tensor stands at byte {place.offset} of {pack} than it says")
        moved.append((table, place, mover.append(header, payload)))
    mover.sync()
    with ledger.transaction(durable=True) as index:
        for table, place, new in moved:
            index.sql.execute(
                f"UPDATE {table} SET pack = ?, offset = ? WHERE pack = ? AND offset = ?",
                (index.pack_id(new.pack), new.offset, number, place.offset),
            )
            index.extend_pack(new.pack, new.end)


def _prune(ledger: "Ledger") -> bool:
    """Forget retired models that no living one derives from and whose records are gone."""
    with ledger.asking() as index:
        retired = _unneeded(index)
    if not retired:
        return False
    try:
        there = _recorded(ledger.packs)
    except NotFound:  # another process collects, and may have moved a record where we did not look
        return False
    gone = {number for number, ref in retired.items() if ref not in there}
    if not gone:
        return False
    with ledger.transaction() as index:
        useless = gone & _unneeded(index).keys()  # one may have been put again, or got a child
        index.prune(useless)
    return bool(useless)


def _unneeded(index: Index) -> dict[int, Ref]:
    """Retired models that no living one derives from, by their number in the index."""
    sql = index.sql
    needed: set[int] = set()
    level = [row[0] for row in sql.execute("SELECT id FROM models WHERE status != 1")]
    ids = dict(sql.execute("SELECT ref, id FROM models"))
    edges: dict[int, list[int]] = {}
    for child, parent in sql.execute("SELECT child, parent FROM parents"):
        if parent in ids:
            edges.setdefault(child, []).append(ids[parent])
    while level:
        needed.update(level)
        level = [p for n in level for p in edges.get(n, ()) if p not in needed]
    return {
        number: Ref(ref.hex())
        for number, ref in sql.execute("SELECT id, ref FROM models WHERE status = 1")
        if number not in needed
    }


def _recorded(packs: Packs) -> set[Ref]:
    """Every model that has a record in some pack, needed or not.

    Raises:
        NotFound: a pack was collected meanwhile.
    """
    found = set()
    for pack, size in packs.sizes().items():
        records = scan(lambda o, n, pack=pack: packs.read(pack, o, n), pack, 0, size)  # type: ignore[misc]
        for place, header in records:
            if header.kind == Kind.MODEL:
                manifest = packs.read(pack, place.offset, place.length).split(b"\n", 1)[0]
                found.add(Ref(blake3(manifest).hexdigest()))
    return found
