"""Everything read and compared, everything counted. Changes nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from blake3 import blake3

from elastix.errors import Corrupt, NotFound
from elastix.state import Ref
from elastix.store.index import Index, Status
from elastix.store.packs import Packs, View, read_record
from elastix.store.records import ALIGNMENT, Header, Kind, Model, Place, padded, parse_header, scan

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was written.

    Attributes:
        model: whose it is; None if nobody's.
        tensor: its name; None if it is not a tensor.
        pack: where. offset: first byte of the payload there.
        what: in words.
    """

    model: Ref | None
    tensor: str | None
    pack: str
    offset: int
    what: str


Asking = Callable[[], AbstractContextManager[Index]]


def verify(asking: Asking, packs: Packs) -> tuple[list[Damage], set[bytes]]:
    """Read every byte of every pack and compare; then compare the index with what was read.

    The index is asked in between and not held, so others go on meanwhile: a pack is kept from gc
    while it is read, and only what the index still says afterwards is compared.

    Args:
        asking: lends the index for a moment.
        packs: where the records are.

    Returns:
        What is damaged, and the digests and refs of it that can be put again.
    """
    with asking() as index:
        damage = _integrity(index)
        rows = []
        for row in index.sql.execute("SELECT id, name, end, torn FROM packs WHERE gone = 0"):
            if type(row[1]) is str and type(row[2]) is int and type(row[3]) in (int, NoneType):
                rows.append(row)
            else:
                damage.append(_nonsense("", f"it has a pack {row[1:]}"))
    doubted: set[bytes] = set()
    for number, pack, end, torn in rows:
        good: dict[int, tuple[int, bytes]] = {}
        bad: list[tuple[Place, str]] = []
        try:
            view = packs.view(pack)
        except (Corrupt, NotFound) as error:
            size = 0
            lost = str(error)
        else:
            size, lost = min(packs.sizes().get(pack, 0), end), ""
            for place, what, digest in _read_pack(view, pack, size):
                if what is None:
                    good[place.offset] = place.length, digest
                elif torn is None or place.offset < torn:
                    bad.append((place, what))
        with asking() as index:
            if lost and (index.is_gone(pack) or pack not in index.ends()):
                continue  # collected meanwhile
            for place, what in bad:
                damage += _blame(index, packs, number, place, what, doubted)
            damage += _unread(index, packs, number, pack, end, good, doubted)
    with asking() as index:
        index.sql.execute("BEGIN")  # one moment for both
        try:
            damage += _broken(index, packs) + _miscounted(index)
        finally:
            index.sql.execute("ROLLBACK")
    return list(dict.fromkeys(damage)), doubted


def _integrity(index: Index) -> list[Damage]:
    """What SQLite finds by itself, of which the first few say enough."""
    rows = index.sql.execute("PRAGMA integrity_check(3)").fetchall()
    return [
        Damage(None, None, "", 0, f"the index is damaged: {what}. Rebuild it.")
        for (what,) in rows
        if what != "ok"
    ]


def _nonsense(pack: str, what: str) -> Damage:
    return Damage(None, None, pack, 0, f"the index is damaged: {what}. Rebuild it.")


def _read_pack(view: View, pack: str, size: int) -> Iterator[tuple[Place, str | None, bytes]]:
    """Every record with what is wrong about it (None: nothing) and its digest."""
    read = _Window(view, size)
    at = 0
    while at + ALIGNMENT <= size:
        try:
            header = parse_header(read(at, ALIGNMENT), pack, at)
        except Corrupt as error:
            yield Place(pack, at + ALIGNMENT, 0), str(error), b""
            at = _next_header(read, pack, at + ALIGNMENT, size)
            continue
        place = Place(pack, at + ALIGNMENT, header.length)
        if place.offset + place.length > size:
            yield place, f"{pack} ends within the record at byte {at}.", b""
            return
        yield place, _wrong(read, place, header), header.digest
        at = place.end


class _Window:
    """Reads ahead: what is far away is fetched a chunk at a time."""

    def __init__(self, view: View, size: int) -> None:
        self._view = view
        self._size = size
        self._at = 0
        self._bytes = b""

    def __call__(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self._size - offset))
        start = offset - self._at
        if not 0 <= start <= start + length <= len(self._bytes):
            self._at, start = offset, 0
            ahead = min(max(length, _CHUNK_BYTES), self._size - offset)
            self._bytes = bytes(self._view.bytes_at(offset, ahead))
        return self._bytes[start : start + length]


def _next_header(read: _Window, pack: str, at: int, size: int) -> int:
    found = next(scan(read, pack, at, size), None)
    return found[0].offset - ALIGNMENT if found else size


def _wrong(read: _Window, place: Place, header: Header) -> str | None:
    hasher = blake3()
    for start in range(0, place.length, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, place.length - start)
        hasher.update(read(place.offset + start, length))
    if hasher.digest() != header.digest:
        return f"the payload at byte {place.offset} of {place.pack} is damaged."
    end = place.offset + place.length
    if any(read(end, padded(place.length) - place.length)):
        return f"the padding at byte {end} of {place.pack} is damaged."
    return None


def _blame(
    index: Index,
    packs: Packs,
    number: int,
    place: Place,
    what: str,
    doubted: set[bytes],
    digest: bytes | None = None,
) -> list[Damage]:
    """Whose record it is that is damaged; one entry for each tensor of each model."""
    where = (number, place.offset)
    blob = index.sql.execute(
        "SELECT id, digest FROM blobs WHERE pack = ? AND offset = ? AND digest = ifnull(?, digest)",
        (*where, digest),
    ).fetchone()
    model = index.sql.execute(
        "SELECT ref FROM models WHERE pack = ? AND offset = ?", where
    ).fetchone()
    ref = Ref(model[0].hex()) if model else None
    doubted.update(key for key in (blob and blob[1], model and model[0]) if key)
    if blob is None:
        return [Damage(ref, None, place.pack, place.offset, what)]
    users = index.sql.execute("SELECT model FROM uses WHERE blob = ?", (blob[0],)).fetchall()
    found = []
    for (user,) in users:
        row = index.row_by_id(user)
        if row is not None:
            names = _names(packs, row.place, blob[1].hex()) or [None]
            found += [Damage(row.ref, name, place.pack, place.offset, what) for name in names]
    return found or [Damage(None, None, place.pack, place.offset, what)]


def _names(packs: Packs, place: Place, digest: str) -> list[str | None]:
    try:
        model = Model.from_bytes(read_record(packs, place, Kind.MODEL)[1])
    except (Corrupt, NotFound):
        return []
    return [name for name, info in model.manifest.tensors.items() if info.digest == digest]


def _unread(
    index: Index,
    packs: Packs,
    number: int,
    pack: str,
    end: int,
    good: Mapping[int, tuple[int, bytes]],
    doubted: set[bytes],
) -> list[Damage]:
    """Damage for each record that the index refers to and that was not found whole."""
    rows = index.sql.execute(
        "SELECT offset, length, digest FROM blobs WHERE pack = :p AND refs > 0 UNION ALL "
        "SELECT offset, length, NULL FROM models WHERE pack = :p UNION ALL "
        "SELECT offset, length, NULL FROM tags WHERE pack = :p",
        {"p": number},
    )
    found = []
    for offset, length, digest in rows.fetchall():
        if type(offset) is not int or type(length) is not int:
            found.append(_nonsense(pack, f"a record of {length!r} bytes stands at {offset!r}"))
            continue
        if offset >= end:  # written while the pack was read
            continue
        there, known = good.get(offset, (None, b""))
        what = None
        if there != length:
            what = f"{pack} has no such record at byte {offset}: it is damaged, cut off or gone."
        elif digest not in (None, known):
            what = f"the index is damaged: byte {offset} of {pack} is another tensor. Rebuild it."
        if what is not None:
            place = Place(pack, offset, length)
            found += _blame(index, packs, number, place, what, doubted, digest)
    return found


def _broken(index: Index, packs: Packs) -> list[Damage]:
    found = []
    for row in index.rows(Status.BROKEN):
        try:
            model = Model.from_bytes(read_record(packs, row.place, Kind.MODEL)[1])
        except (Corrupt, NotFound):
            continue
        digests = {name: bytes.fromhex(i.digest) for name, i in model.manifest.tensors.items()}
        there = index.blobs(digests.values())
        found += [
            Damage(
                row.ref,
                name,
                row.place.pack,
                row.place.offset,
                f"no pack holds the tensor's bytes {digest.hex()[:12]}: a pack is missing or "
                "damaged, or the model was never acknowledged.",
            )
            for name, digest in digests.items()
            if digest not in there
        ]
    return found


def _miscounted(index: Index) -> list[Damage]:
    rows = index.sql.execute(
        "SELECT p.name, b.offset, b.refs, ifnull(u.n, 0) FROM blobs b "
        "JOIN packs p ON p.id = b.pack "
        "LEFT JOIN (SELECT blob, count(*) AS n FROM uses GROUP BY blob) u ON u.blob = b.id "
        "WHERE b.refs != ifnull(u.n, 0)"
    )
    return [
        Damage(None, None, pack, offset, f"counted {refs} references; there are {there}.")
        for pack, offset, refs, there in rows
    ]


@dataclass(frozen=True)
class Stats:
    """How many, how large.

    Attributes:
        models: alive. retired: kept as names for their descendants. broken: lack tensors.
        blobs: contents that a model refers to.
        logical_bytes: of all tensors of all models, as if nothing were shared.
        unique_bytes: of the blobs.
        physical_bytes: of all packs and the index.
        dead_bytes: in packs, referred to by nobody; gc gives them back.
    """

    models: int
    retired: int
    broken: int
    tags: int
    packs: int
    blobs: int
    logical_bytes: int
    unique_bytes: int
    physical_bytes: int
    dead_bytes: int

    @property
    def dedup_ratio(self) -> float:
        """Logical over unique bytes; 1 for an empty store."""
        return self.logical_bytes / self.unique_bytes if self.unique_bytes else 1.0


def stats(index: Index, packs: Packs, path: Path | None) -> Stats:
    """Count."""
    sql = index.sql
    counts = dict(sql.execute("SELECT status, count(*) FROM models GROUP BY status").fetchall())
    blobs = sql.execute("SELECT count(*), ifnull(sum(length), 0) FROM blobs WHERE refs > 0")
    number, unique = blobs.fetchone()
    logical = sql.execute("SELECT ifnull(sum(nbytes), 0) FROM models WHERE status = 0")
    sizes, ends = packs.sizes(), index.ends()
    files = [path.with_name(path.name + s) for s in ("", "-wal", "-shm")] if path else []
    return Stats(
        models=counts.get(Status.ALIVE, 0),
        retired=counts.get(Status.RETIRED, 0),
        broken=counts.get(Status.BROKEN, 0),
        tags=len(index.tags()),
        packs=len(sizes),
        blobs=number,
        logical_bytes=logical.fetchone()[0],
        unique_bytes=unique,
        physical_bytes=sum(sizes.values()) + sum(f.stat().st_size for f in files if f.exists()),
        dead_bytes=sum(record_bytes(packs, ends, *pack) for pack in sizes.items())
        - sum(live_bytes(index).values()),
    )


def record_bytes(packs: Packs, ends: Mapping[str, int], pack: str, size: int) -> int:
    """Bytes of a pack's records; the contents that stand behind them far away are none."""
    return size if packs.folder is not None else ends.get(pack, 0) or size


def live_bytes(index: Index) -> dict[str, int]:
    """Bytes of each pack, headers and padding included, that somebody refers to."""
    rows = index.sql.execute(
        "SELECT p.name, sum(? + (r.length + ?) / ? * ?) FROM packs p JOIN ("
        "SELECT pack, length FROM blobs WHERE refs > 0 UNION ALL SELECT pack, length FROM models "
        "UNION ALL SELECT pack, length FROM tags) r ON r.pack = p.id GROUP BY p.id",
        (ALIGNMENT, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT),
    )
    return dict(rows.fetchall())
