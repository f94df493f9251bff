"""The index: one SQLite file that says what the packs hold. A cache; packs alone rebuild it.

Not here: locks, packs and when to commit (ledger.py). Every method runs inside the caller's
transaction.

Invariant: `blobs.refs` is the number of rows of `uses` for that blob, and every model that is
alive has a row of `uses` for each of its digests.
"""

import json
import math
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from elastix.errors import Conflict, NotFound, StoreDamaged, TooNew
from elastix.sharding import tensors_of
from elastix.state import Ref
from elastix.store.lineage import Signature
from elastix.store.nearest import Candidate, pack_ids
from elastix.store.records import LAST_SEQ, Kind, Model, Place

SCHEMA = 1
_DIGITS = frozenset("0123456789abcdef")
_DIGESTS = 500  # SQLite takes at least 999 parameters
_TABLES = """
CREATE TABLE packs(id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL,
    end INTEGER NOT NULL DEFAULT 0, torn INTEGER,
    gone INTEGER NOT NULL DEFAULT 0);
CREATE TABLE blobs(id INTEGER PRIMARY KEY, digest BLOB UNIQUE NOT NULL, pack INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL,
    refs INTEGER NOT NULL DEFAULT 0 CHECK(refs >= 0));
CREATE INDEX blobs_by_place ON blobs(pack, offset);
CREATE TABLE models(id INTEGER PRIMARY KEY, ref BLOB UNIQUE NOT NULL, seq INTEGER NOT NULL,
    rev INTEGER NOT NULL, status INTEGER NOT NULL, pack INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL, score REAL, time_s REAL, tensors INTEGER,
    nbytes INTEGER, meta TEXT, paths BLOB, ids BLOB);
CREATE INDEX models_by_rev ON models(rev);
CREATE TABLE uses(model INTEGER NOT NULL, blob INTEGER NOT NULL,
    PRIMARY KEY(model, blob)) WITHOUT ROWID;
CREATE TABLE parents(child INTEGER NOT NULL, place INTEGER NOT NULL, parent BLOB NOT NULL,
    PRIMARY KEY(child, place)) WITHOUT ROWID;
CREATE INDEX children ON parents(parent);
CREATE INDEX models_by_place ON models(pack, offset);
CREATE TABLE tags(name TEXT PRIMARY KEY, ref BLOB, seq INTEGER NOT NULL, pack INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE clock(one INTEGER PRIMARY KEY CHECK(one = 1), seq INTEGER NOT NULL,
    rev INTEGER NOT NULL, pruned INTEGER NOT NULL);
INSERT INTO clock VALUES(1, 0, 0, 0);
"""


class Status(IntEnum):
    """What became of a model."""

    ALIVE = 0
    RETIRED = 1
    BROKEN = 2  # its record names tensors that no pack holds


_STATUSES = frozenset(Status)
_NUMBER = (float, int, type(None))
NONSENSE = (TypeError, ValueError, AttributeError, LookupError, OverflowError)
"""What rows lead to that nobody wrote: SQLite hands out whatever a damaged file has, of any type.
Text that is no UTF-8 is a ValueError."""


@dataclass(frozen=True)
class Row:
    """What the index knows of one model."""

    id: int
    ref: Ref
    seq: int
    status: Status
    place: Place
    score: float | None
    time_s: float
    tensors: int
    nbytes: int


class Missing(NamedTuple):
    """A model cannot be entered: no pack holds these digests (any more)."""

    digests: tuple[bytes, ...]


_ROW = (
    "SELECT m.id, m.ref, m.seq, m.status, p.name, m.offset, m.length, m.score, m.time_s, "
    "m.tensors, m.nbytes FROM models m JOIN packs p ON p.id = m.pack "
)
# Where a page is damaged, SQLite finds rows of other keys, or takes a key from its index and the
# rest from another row. So a row that was looked for by its key is read by its number, key
# included, and the key is compared.
_ROW_OF = _ROW.replace("FROM models m", "FROM models k JOIN models m ON m.id = k.id")
_NUMBER_OF = "SELECT m.ref, m.id, m.status, m.seq FROM models k JOIN models m ON m.id = k.id "
_BLOB = "FROM blobs k JOIN blobs b ON b.id = k.id "


def readable(value: Any) -> bool:  # noqa: ANN401 - any JSON, and what Python takes for it
    """Whether SQLite's JSON has a word for it: it has none for NaN and infinity."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def damaged(what: str) -> StoreDamaged:
    """The error for what the index cannot have been told."""
    return StoreDamaged(
        f"the store's index is damaged: {what}. The packs are not touched. `elastix store rebuild` "
        "makes it anew from them."
    )


def _another_model(ref: Ref) -> StoreDamaged:
    return damaged(f"it has another model in the place of {ref[:12]}")


def _ref(value: Any) -> Ref:  # noqa: ANN401 - whatever a damaged row holds
    if type(value) is not bytes or len(value) != 32:
        raise damaged(f"it names {value!r} as a model")
    return Ref(value.hex())


def _place(pack: Any, offset: Any, length: Any) -> Place:  # noqa: ANN401 - as above
    if type(pack) is not str or type(offset) is not int or type(length) is not int:
        raise damaged(f"a record stands at {offset!r} of {pack!r} and has {length!r} bytes")
    if offset < 0 or length < 0:
        raise damaged(f"a record stands at byte {offset} of {pack} and has {length} bytes")
    return Place(pack, offset, length)


def _row(values: Sequence[Any]) -> Row:
    number, ref, seq, status, pack, offset, length, score, time_s, tensors, nbytes = values
    time_s = time_s or 0.0  # a retired model has none
    sizes = (tensors, nbytes)
    if status != Status.RETIRED and not all(type(n) is int for n in sizes):
        raise damaged(f"a model has {tensors!r} tensors of {nbytes!r} bytes")
    if status not in _STATUSES or type(seq) is not int:
        raise damaged(f"a model has the status {status!r} since {seq!r}")
    if not isinstance(score, _NUMBER) or not isinstance(time_s, float):
        raise damaged(f"a model has the score {score!r} and the time {time_s!r}")
    where = _place(pack, offset, length)
    return Row(number, _ref(ref), seq, Status(status), where, score, time_s, tensors, nbytes)


def _connect(where: str) -> sqlite3.Connection:
    return sqlite3.connect(
        where,
        uri=where.startswith("file:"),
        timeout=60.0,
        isolation_level=None,
        check_same_thread=False,
    )


def _connect_read_only(path: Path) -> tuple[sqlite3.Connection, bool]:
    """A connection, and whether it takes for granted that the file never changes."""
    where = f"{path.absolute().as_uri()}?mode=ro"
    sql = _connect(where)
    try:
        sql.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        sql.close()
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            raise  # who goes on without the log sees nothing of what is in it, now or later
        # Even to read, SQLite needs a file beside the index; a read-only or full disk has no place
        # for it. Without it nothing is seen of the log.
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise Unread(f"{log} cannot be read") from error
        return _connect(f"{where}&immutable=1"), True
    except BaseException:
        sql.close()
        raise
    return sql, False


def _having(where: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Conditions in SQL that the metadata of a model `m` has these values, and what is bound."""
    values: list[Any] = []
    for key, value in where.items():
        values += [f"$.{json.dumps(key)}", json.dumps(value)]
    # One row that is no JSON, as earlier versions wrote NaN, must not fail the whole query.
    return ["CASE WHEN json_valid(m.meta) THEN m.meta -> ? = json(?) END"] * len(where), values


def _entry(number: int, score: float | None, paths: bytes, ids: bytes, ref: bytes) -> Candidate:
    if (len(paths) | len(ids)) % 8:
        raise damaged(f"a signature has {len(paths)} and {len(ids)} bytes")
    if type(ref) is not bytes or len(ref) != 32:  # as _ref, which is asked to say so
        _ref(ref)
    return Candidate(number, score, paths, ids, ref)


class Unfilled(sqlite3.DatabaseError):
    """Nothing is in it: whoever makes it has just begun, or was killed then."""


class Unread(sqlite3.DatabaseError):
    """A part of it is in its log, which a killed writer has left and which cannot be read here."""


class Index:
    """The rows, and what changes them. Not thread safe."""

    def __init__(self, path: Path | None, read_only: bool = False, copied: bool = False) -> None:
        """Open or create: a file that is there, and no index yet, is not made one.

        Args:
            path: the file; None keeps it in memory.
            read_only: never write to it.
            copied: work on a copy in memory, which may be written to.

        Raises:
            sqlite3.DatabaseError: it is no index, or one of another schema.
            Unfilled: it is no index yet. Unread: `read_only`, and its log cannot be read.
            TooNew: a later elastix made it.
        """
        fresh = path is None or not path.exists()
        self.immutable = False
        if path is None:
            self.sql = _connect(":memory:")
        elif read_only:
            self.sql, self.immutable = _connect_read_only(path)
            if copied:
                self._copy()
        else:
            self.sql = _connect(str(path))
        self._pack_ids: dict[str, int] = {}
        try:
            self._prepare(fresh, write=path is None or not read_only)
        except BaseException:
            self.sql.close()
            raise

    def _copy(self) -> None:
        file, self.sql = self.sql, _connect(":memory:")
        try:
            file.backup(self.sql)
        finally:
            file.close()

    def _prepare(self, fresh: bool, write: bool) -> None:
        if write:
            self.sql.execute("PRAGMA journal_mode=WAL")
            # A commit lost with the power is found again in the packs, which are synced first.
            self.sql.execute("PRAGMA synchronous=NORMAL")
        self.sql.execute("PRAGMA cell_size_check=ON")  # a damaged page is noticed when it is read
        self.sql.execute("PRAGMA trusted_schema=OFF")
        version = self.sql.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and fresh:
            self.sql.executescript(f"BEGIN;{_TABLES}PRAGMA user_version={SCHEMA};COMMIT;")
        elif version > SCHEMA:
            raise TooNew(
                f"the store's index is of version {version}; this elastix knows up to {SCHEMA}. "
                "Nothing was changed. Use a later elastix, or remove the index (index.sqlite*) "
                "while nobody uses the store: it is made anew from the packs."
            )
        elif version != SCHEMA:
            made = self.sql.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
            kind = sqlite3.DatabaseError if version or made else Unfilled
            raise kind(f"schema {version}, not {SCHEMA}")

    def forget_cached(self) -> None:
        """After a rollback: ids handed out in it are void."""
        self._pack_ids.clear()

    # ------------------------------------------------------------------------------ changes

    def next_seq(self, now: int) -> int:
        """A number larger than any before, and `now` if that is.

        Raises:
            StoreDamaged: a record says that it was written when the clock ends.
        """
        found = self.sql.execute("SELECT seq FROM clock").fetchone()
        if found is None or type(found[0]) is not int:
            raise damaged("it has no clock")
        seq = max(now, found[0] + 1)
        if seq >= LAST_SEQ:
            raise StoreDamaged(
                f"a record of this store has the clock at {found[0]}, its end, so that nothing "
                "can be written after it. Nothing was changed; what is stored can be read. Copy "
                "it to another store."
            )
        return seq

    def advance(self, seq: int) -> int:
        """Let the clock be at `seq` or later; returns `seq`."""
        self.sql.execute("UPDATE clock SET seq = max(seq, ?)", (seq,))
        return seq

    def next_rev(self) -> int:
        """A number for the models changed by this transaction."""
        return int(self.sql.execute("UPDATE clock SET rev = rev + 1 RETURNING rev").fetchone()[0])

    def pack_id(self, pack: str) -> int:
        """The row of a pack; made if there is none."""
        found = self._pack_ids.get(pack)
        if found is None:
            self.sql.execute("INSERT OR IGNORE INTO packs(name) VALUES(?)", (pack,))
            row = self.sql.execute("SELECT id FROM packs WHERE name = ?", (pack,)).fetchone()
            found = self._pack_ids[pack] = int(row[0])
        return found

    def extend_pack(self, pack: str, end: int, torn: int | None = None) -> None:
        """All records of `pack` up to byte `end` are known; from `torn` on there are none."""
        self.sql.execute(
            "UPDATE packs SET end = max(end, ?), torn = ifnull(?, torn) WHERE id = ?",
            (end, torn, self.pack_id(pack)),
        )

    def ends(self) -> dict[str, int]:
        """Up to which byte each pack is known."""
        return dict(self.sql.execute("SELECT name, end FROM packs").fetchall())

    def is_gone(self, pack: str) -> bool:
        """Whether gc has given this pack up: nothing may be entered as standing there."""
        row = self.sql.execute("SELECT gone FROM packs WHERE name = ?", (pack,)).fetchone()
        return row is not None and bool(row[0])

    def give_up(self, pack: str) -> bool:
        """Bar a pack that nothing refers to; False if something does."""
        number = self.pack_id(pack)
        for table in ("blobs", "models", "tags"):
            query = f"SELECT 1 FROM {table} WHERE pack = ? LIMIT 1"
            if self.sql.execute(query, (number,)).fetchone():
                return False
        self.sql.execute("UPDATE packs SET gone = 1 WHERE id = ?", (number,))
        return True

    def add_blobs(self, blobs: Iterable[tuple[bytes, Place]]) -> int:
        """Tensor payloads by digest; one that is there already stays where it is.

        Returns:
            How many were not there.
        """
        return self.sql.executemany(
            "INSERT OR IGNORE INTO blobs(digest, pack, offset, length) VALUES(?, ?, ?, ?)",
            ((digest, self.pack_id(p.pack), p.offset, p.length) for digest, p in blobs),
        ).rowcount

    def replace_blobs(self, blobs: Iterable[tuple[bytes, Place]]) -> None:
        """Tensor payloads that stand elsewhere from now on: where they stood, they are damaged."""
        moved = dict(blobs)
        known = self.blobs(moved)
        self.sql.executemany(
            "UPDATE blobs SET pack = ?, offset = ?, length = ? WHERE id = ?",
            (
                (self.pack_id(p.pack), p.offset, p.length, known[digest][0])
                for digest, p in moved.items()
                if digest in known
            ),
        )

    def replace_model(self, name: Ref, place: Place) -> None:
        """A model alive whose record stands elsewhere from now on."""
        known = self._known(name)
        self.sql.execute(
            "UPDATE models SET pack = ?, offset = ?, length = ? WHERE id = ? AND status = 0",
            (self.pack_id(place.pack), place.offset, place.length, known and known[0]),
        )

    def add_model(
        self, name: Ref, model: Model, seq: int, place: Place, rev: int, keep_broken: bool = False
    ) -> Missing | None:
        """Enter a model, unless it is there already or was retired after `seq`.

        Args:
            name: its ref.
            model: what the record says.
            seq: the record's.
            place: the record's.
            rev: of this transaction.
            keep_broken: enter it as BROKEN if tensors are missing.

        Returns:
            None, or what is missing: no digest at all if the record is older than a retirement.
        """
        ref = bytes.fromhex(name)
        signature = Signature.from_json(model.signature) if model.signature else None
        row = self._known(name)
        if row and row[1] == Status.ALIVE:
            return None
        if row and row[1] == Status.RETIRED and row[2] >= seq:
            return Missing(())
        digests = {bytes.fromhex(info.digest): info for info in model.manifest.tensors.values()}
        blobs = self.blobs(digests)
        missing = tuple(digest for digest in digests if digest not in blobs)
        if missing and not keep_broken:
            return Missing(missing)
        if row:
            self.sql.execute("DELETE FROM models WHERE id = ?", (row[0],))
            self.sql.execute("DELETE FROM parents WHERE child = ?", (row[0],))
        status = Status.BROKEN if missing else Status.ALIVE
        number = self._insert_model(
            row and row[0], model, signature, (ref, seq, rev, status), place, blobs
        )
        if not missing:
            uses = sorted((number, blob) for blob, _ in blobs.values())
            self.sql.executemany("INSERT INTO uses VALUES(?, ?)", uses)
            self._count(number, 1)
        return None

    def _insert_model(
        self,
        number: int | None,
        model: Model,
        signature: Signature | None,
        head: tuple[bytes, int, int, Status],
        place: Place,
        blobs: Mapping[bytes, tuple[int, int]],
    ) -> int:
        manifest = model.manifest
        lengths = {digest.hex(): length for digest, (_, length) in blobs.items()}
        plain = {key: value for key, value in manifest.meta.items() if readable(value)}
        cursor = self.sql.execute(
            "INSERT INTO models(id, ref, seq, rev, status, pack, offset, length, score, time_s, "
            "tensors, nbytes, meta, paths, ids) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                *head,
                self.pack_id(place.pack),
                place.offset,
                place.length,
                None if model.score is None else float(model.score),
                float(model.time_s),
                len(tensors_of(manifest.tensors)),
                sum(lengths.get(info.digest, 0) for info in manifest.tensors.values()),
                json.dumps(plain),
                pack_ids(signature.paths) if signature else None,
                pack_ids(signature.ids) if signature else None,
            ),
        )
        number = int(cursor.lastrowid or 0)
        self.sql.executemany(
            "INSERT INTO parents VALUES(?, ?, ?)",
            ((number, i, bytes.fromhex(p)) for i, p in enumerate(manifest.parents)),
        )
        return number

    def retire(self, ref: Ref, parents: Sequence[Ref], seq: int, place: Place, rev: int) -> None:
        """Drop a model's hold on its tensors; its edges stay, for the sake of its children."""
        row = self._known(ref)
        where = (self.pack_id(place.pack), place.offset, place.length)
        if row is None:
            cursor = self.sql.execute(
                "INSERT INTO models(ref, seq, rev, status, pack, offset, length) "
                "VALUES(?, ?, ?, ?, ?, ?, ?)",
                (bytes.fromhex(ref), seq, rev, Status.RETIRED, *where),
            )
            self.sql.executemany(
                "INSERT INTO parents VALUES(?, ?, ?)",
                ((cursor.lastrowid, i, bytes.fromhex(p)) for i, p in enumerate(parents)),
            )
            return
        if row[2] > seq:
            return
        self._count(row[0], -1)
        self.sql.execute("DELETE FROM uses WHERE model = ?", (row[0],))
        self.sql.execute(
            "UPDATE models SET status = ?, seq = ?, rev = ?, pack = ?, offset = ?, length = ?, "
            "score = NULL, meta = NULL, paths = NULL, ids = NULL WHERE id = ?",
            (Status.RETIRED, seq, rev, *where, row[0]),
        )

    def _count(self, model: int, change: int) -> None:
        self.sql.execute(
            "UPDATE blobs SET refs = refs + ? WHERE id IN (SELECT blob FROM uses WHERE model = ?)",
            (change, model),
        )

    def recount(self, blobs: Iterable[int]) -> None:
        """Count the uses of these rows of `blobs` anew."""
        self.sql.executemany(
            "UPDATE blobs SET refs = (SELECT count(*) FROM uses WHERE blob = blobs.id) "
            "WHERE id = ?",
            ((number,) for number in blobs),
        )

    def set_tag(self, name: str, ref: Ref | None, seq: int, place: Place) -> None:
        """Let `name` mean `ref`, unless a later record said otherwise."""
        self.sql.execute(
            "INSERT INTO tags VALUES(?, ?, ?, ?, ?, ?) ON CONFLICT(name) DO UPDATE SET "
            "ref = excluded.ref, seq = excluded.seq, pack = excluded.pack, "
            "offset = excluded.offset, length = excluded.length WHERE excluded.seq >= tags.seq",
            (
                name,
                bytes.fromhex(ref) if ref else None,
                seq,
                self.pack_id(place.pack),
                place.offset,
                place.length,
            ),
        )

    # ------------------------------------------------------------------------------ questions

    def knows_nothing(self) -> bool:
        """Whether no pack was ever entered."""
        return self.sql.execute("SELECT 1 FROM packs LIMIT 1").fetchone() is None

    def records(self, pack: str) -> tuple[int, list[tuple[str, Kind, Place, bytes | None]]]:
        """The pack's row, and every record in it that is needed.

        Each with the table that says so, and the digest of a tensor.
        """
        number = self.pack_id(pack)
        found = self.sql.execute(
            "SELECT 'blobs', :tensor, offset, length, digest FROM blobs WHERE pack = :p UNION ALL "
            "SELECT 'models', iif(status = 1, :retired, :model), offset, length, NULL FROM models "
            "WHERE pack = :p UNION ALL SELECT 'tags', :tag, offset, length, NULL FROM tags "
            "WHERE pack = :p",
            {
                "p": number,
                "tensor": Kind.TENSOR,
                "model": Kind.MODEL,
                "retired": Kind.RETIRED,
                "tag": Kind.TAG,
            },
        )
        return number, [
            (table, Kind(kind), _place(pack, o, n), d) for table, kind, o, n, d in found
        ]

    def blobs(self, digests: Iterable[bytes]) -> dict[bytes, tuple[int, int]]:
        """Row and length of each digest that some pack holds."""
        query = f"SELECT b.digest, b.id, b.length {_BLOB} WHERE k.digest IN "
        found = self._by_digest(query, digests)
        return {digest: (number, length) for digest, number, length in found}

    def places(self, digests: Iterable[bytes]) -> dict[bytes, Place]:
        """Where each digest stands that some pack holds."""
        found = self._by_digest(
            f"SELECT b.digest, p.name, b.offset, b.length {_BLOB} "
            "JOIN packs p ON p.id = b.pack WHERE k.digest IN ",
            digests,
        )
        return {digest: _place(*place) for digest, *place in found}

    def _by_digest(self, query: str, digests: Iterable[bytes]) -> Iterator[Any]:
        wanted = list(digests)
        for start in range(0, len(wanted), _DIGESTS):
            some = wanted[start : start + _DIGESTS]
            found = self.sql.execute(f"{query}({','.join('?' * len(some))})", some).fetchall()
            if not {row[0] for row in found} <= set(some):
                raise damaged("it has other tensors in the place of some")
            yield from found

    def row(self, ref: Ref) -> Row | None:
        """The model of that name, whatever its status."""
        found = self.sql.execute(_ROW_OF + "WHERE k.ref = ?", (bytes.fromhex(ref),)).fetchone()
        row = _row(found) if found else None
        if row is not None and row.ref != ref:
            raise _another_model(ref)
        return row

    def _known(self, name: Ref) -> tuple[int, int, int] | None:
        """Row, status and seq of a model, whatever its status."""
        ref = bytes.fromhex(name)
        found = self.sql.execute(_NUMBER_OF + "WHERE k.ref = ?", (ref,)).fetchone()
        if found is not None and found[0] != ref:
            raise _another_model(name)
        return found and tuple(found[1:])

    def row_by_id(self, number: int) -> Row | None:
        """The model in that row."""
        found = self.sql.execute(_ROW + "WHERE m.id = ?", (number,)).fetchone()
        return _row(found) if found else None

    def meta(self, row: Row) -> dict[str, Any]:
        """The top-level metadata of a model that are text, finite numbers or bools."""
        found = self.sql.execute("SELECT meta FROM models WHERE id = ?", (row.id,)).fetchone()
        try:
            return dict(json.loads(found[0])) if found and found[0] else {}
        except (ValueError, TypeError) as error:
            raise damaged(f"the metadata of {row.ref[:12]} are {found[0]!r}") from error

    def rows(
        self,
        status: Status = Status.ALIVE,
        limit: int | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> Iterator[Row]:
        """Models, the latest first; with such metadata, see `matching`."""
        having, values = _having(where or {})
        chosen = " AND ".join(("m.status = ?", *having))
        found = self.sql.execute(
            f"{_ROW}WHERE {chosen} ORDER BY m.seq DESC LIMIT ?",
            (status, *values, -1 if limit is None else limit),
        )
        return map(_row, found)

    def resolve(self, name: str) -> Ref:
        """A tag, a ref, or the unique beginning of one (at least 4 digits), as a ref.

        Raises:
            NotFound: it means nothing here.
            Conflict: it is the beginning of several.
        """
        if len(name) == 64 and set(name) <= _DIGITS:
            return Ref(name)  # whoever looks it up finds out whether it is there
        row = self.sql.execute("SELECT name, ref FROM tags WHERE name = ?", (name,)).fetchone()
        if row and row[0] != name:
            raise damaged(f"it has another tag in the place of {name!r}")
        if row and row[1] is not None:
            return _ref(row[1])
        if 4 <= len(name) <= 64 and set(name) <= _DIGITS:
            low, high = bytes.fromhex(name.ljust(64, "0")), bytes.fromhex(name.ljust(64, "f"))
            refs = self.sql.execute(
                "SELECT ref FROM models WHERE ref BETWEEN ? AND ? LIMIT 2", (low, high)
            ).fetchall()
            if len(refs) == 1:
                return _ref(refs[0][0])
            if refs:
                raise Conflict(f"several models begin with {name!r}. Give more of its digits.")
        raise NotFound(
            f"there is no tag or model {name!r} in this store. `elastix store log` lists them."
        )

    def tags(self) -> dict[str, Ref]:
        """Every tag and what it means."""
        found = self.sql.execute("SELECT name, ref FROM tags WHERE ref NOT NULL ORDER BY name")
        return {name: _ref(ref) for name, ref in found}

    def tag_seqs(self) -> dict[str, int]:
        """When each tag was set or removed last, by the clock."""
        return dict(self.sql.execute("SELECT name, seq FROM tags").fetchall())

    def tagged_since(self) -> dict[Ref, int]:
        """Models that have a tag, and when they got the last one, by the clock."""
        query = "SELECT ref, max(seq) FROM tags WHERE ref NOT NULL GROUP BY ref"
        return {_ref(ref): seq for ref, seq in self.sql.execute(query)}

    def tag_records(self, name: str | None = None) -> list[tuple[str, Ref, Place]]:
        """Every tag, or that one, what it means and where that is written."""
        found = self.sql.execute(
            "SELECT t.name, t.ref, p.name, t.offset, t.length FROM tags t "
            "JOIN packs p ON p.id = t.pack WHERE t.ref NOT NULL AND t.name = ifnull(?, t.name)",
            (name,),
        )
        return [(tag, _ref(ref), _place(*place)) for tag, ref, *place in found]

    def parents(self, ref: Ref) -> list[Ref]:
        """Direct parents, in order; known for retired models too."""
        known = self._known(ref)
        if known is None:
            return []
        found = self.sql.execute(
            "SELECT child, parent FROM parents WHERE child = ? ORDER BY place", (known[0],)
        ).fetchall()
        if any(child != known[0] for child, _ in found):
            raise _another_model(ref)
        return [_ref(parent) for _, parent in found]

    def children(self, ref: Ref) -> list[Ref]:
        """Direct children, the first stored first; retired ones too."""
        found = self.sql.execute(
            "SELECT DISTINCT p.parent, m.ref FROM parents p JOIN models m ON m.id = p.child "
            "WHERE p.parent = ? ORDER BY m.id",
            (bytes.fromhex(ref),),
        ).fetchall()
        if any(_ref(parent) != ref for parent, _ in found):
            raise _another_model(ref)
        return [_ref(child) for _, child in found]

    def matching(
        self,
        where: Mapping[str, Any],
        tagged: str | None,
        but: Sequence[str],
        until_s: float | None = None,
    ) -> set[int]:
        """Rows of the models alive whose metadata has these values and that have such a tag.

        Args:
            where: top-level key to text, number or bool; no key has a quotation mark.
            tagged: glob pattern of a tag's name; None takes all.
            but: refs to leave out.
            until_s: by when they were stored, in seconds since 1970; None: at any time.
        """
        having, values = _having(where)
        clauses = ["m.status = 0", *having]
        if tagged is not None:
            clauses.append("m.ref IN (SELECT ref FROM tags WHERE name GLOB ?)")
            values.append(tagged)
        if but:
            clauses.append(f"m.ref NOT IN ({', '.join('?' * len(but))})")
            values += map(bytes.fromhex, but)
        if until_s is not None:
            clauses.append("m.time_s <= ?")
            values.append(float(until_s))
        query = f"SELECT m.id FROM models m WHERE {' AND '.join(clauses)}"
        return {number for (number,) in self.sql.execute(query, values)}

    def entries_since(
        self, rev: int, where: Mapping[str, Any]
    ) -> Generator[Candidate | int, None, None]:
        """What to add, or the key to remove, of models changed after `rev`; to be closed.

        Args:
            rev: 0 for all there are.
            where: only of those with such metadata, see `matching`; keys of others may be among
                those to remove.
        """
        having, values = _having(where)
        wanted = f"(m.status != 0 OR ({' AND '.join(having)}))" if having else "TRUE"
        found = self.sql.execute(
            "SELECT m.id, m.status, m.score, m.paths, m.ids, m.ref FROM models m WHERE m.rev > ? "
            f"AND (m.paths NOT NULL OR m.status = 1) AND {wanted}",
            (rev, *values),
        )
        alive = int(Status.ALIVE)
        try:
            with closing(found):  # a traceback would keep it open, and the index with it
                for number, status, score, paths, ids, ref in found:
                    yield _entry(number, score, paths, ids, ref) if status == alive else number
        except TypeError as error:
            raise damaged(f"a signature is not one: {error}") from error

    def changes(self) -> tuple[int, int]:
        """The latest `rev`; and how often rows of models were removed, of which that says nothing.

        Asked before the rows, for another process may add some in between.
        """
        rev, pruned = self.sql.execute("SELECT rev, pruned FROM clock").fetchone()
        return int(rev), int(pruned)

    def prune(self, numbers: Iterable[int]) -> None:
        """Remove rows of retired models."""
        for number in numbers:
            self.sql.execute("DELETE FROM models WHERE id = ? AND status = 1", (number,))
            self.sql.execute("DELETE FROM parents WHERE child = ?", (number,))
        self.sql.execute("UPDATE clock SET pruned = pruned + 1")
