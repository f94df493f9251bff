"""Everything read and compared, everything counted. Changes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from elastix.errors import Corrupt, NotFound
from elastix.state import Ref
from elastix.store.index import Index, Status
from elastix.store.packs import Packs, read_record
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


def verify(index: Index, packs: Packs) -> list[Damage]:
    """Read every byte of every pack and compare; then compare the index with what was read."""
    rows = index.sql.execute("SELECT id, name, end, torn FROM packs WHERE gone = 0").fetchall()
    damage = []
    sizes = packs.sizes()
    for number, pack, end, torn in rows:
        good = {}
        for place, what in _read_pack(packs, pack, min(sizes.get(pack, 0), end)):
            if what is None:
                good[place.offset] = place.length
            elif torn is None or place.offset < torn:
                damage += _blame(index, packs, number, place, what)
        damage += _unread(index, packs, number, pack, good)
    damage += _broken(index, packs)
    damage += _miscounted(index)
    return list(dict.fromkeys(damage))


def _read_pack(packs: Packs, pack: str, size: int) -> Iterator[tuple[Place, str | None]]:
    """Every record with what is wrong about it; None: nothing."""
    at = 0
    while at + ALIGNMENT <= size:
        try:
            header = parse_header(packs.read(pack, at, ALIGNMENT), pack, at)
        except (Corrupt, NotFound) as error:
            yield Place(pack, at + ALIGNMENT, 0), str(error)
            at = _next_header(packs, pack, at + ALIGNMENT, size)
            continue
        place = Place(pack, at + ALIGNMENT, header.length)
        if place.offset + place.length > size:
            yield place, f"{pack} ends within the record at byte {at}."
            return
        yield place, _wrong(packs, place, header)
        at = place.end


def _next_header(packs: Packs, pack: str, at: int, size: int) -> int:
    found = next(scan(lambda o, n: packs.read(pack, o, n), pack, at, size), None)
    return found[0].offset - ALIGNMENT if found else size


def _wrong(packs: Packs, place: Place, header: Header) -> str | None:
    hasher = blake3()
    for start in range(0, place.length, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, place.length - start)
        hasher.update(packs.read(place.pack, place.offset + start, length))
    if hasher.digest() != header.digest:
        return f"the payload at byte {place.offset} of {place.pack} is damaged."
    end = place.offset + place.length
    if any(packs.read(place.pack, end, padded(place.length) - place.length)):
        return f"the padding at byte {end} of {place.pack} is damaged."
    return None


def _blame(index: Index, packs: Packs, number: int, place: Place, what: str) -> list[Damage]:
    """Whose record it is that is damaged; one entry for each tensor of each model."""
    where = (number, place.offset)
    blob = index.sql.execute(
        "SELECT id, digest FROM blobs WHERE pack = ? AND offset = ?", where
    ).fetchone()
    model = index.sql.execute(
        "SELECT ref FROM models WHERE pack = ? AND offset = ?", where
    ).fetchone()
    ref = Ref(model[0].hex()) if model else None
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
    index: Index, packs: Packs, number: int, pack: str, good: dict[int, int]
) -> list[Damage]:
    """Damage for each record that the index refers to and that was not found whole."""
    rows = index.sql.execute(
        "SELECT offset, length FROM blobs WHERE pack = :p AND refs > 0 UNION ALL "
        "SELECT offset, length FROM models WHERE pack = :p UNION ALL "
        "SELECT offset, length FROM tags WHERE pack = :p",
        {"p": number},
    )
    found = []
    for offset, length in rows.fetchall():
        if good.get(offset) != length:
            place = Place(pack, offset, length)
            what = f"{pack} has no such record at byte {offset}: it is damaged, cut off or gone."
            found += _blame(index, packs, number, place, what)
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
    sizes = packs.sizes()
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
        dead_bytes=sum(sizes.values()) - sum(live_bytes(index).values()),
    )


def live_bytes(index: Index) -> dict[str, int]:
    """Bytes of each pack, headers and padding included, that somebody refers to."""
    rows = index.sql.execute(
        "SELECT p.name, sum(? + (r.length + ?) / ? * ?) FROM packs p JOIN ("
        "SELECT pack, length FROM blobs WHERE refs > 0 UNION ALL SELECT pack, length FROM models "
        "UNION ALL SELECT pack, length FROM tags) r ON r.pack = p.id GROUP BY p.id",
        (ALIGNMENT, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT),
    )
    return dict(rows.fetchall())
