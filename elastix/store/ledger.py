"""The one that owns the index: commits in groups, answers questions, recovers after a crash.

Without Ray every process has a Ledger, and a file lock lets one write at a time; with Ray one
actor has it (server.py) and the others ask. Not here: tensors' bytes, which never pass through.

Invariant: an answer of `submit` is given only after the records it rests on were synced to a
pack and the index was committed, in that order.
"""

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from elastix.errors import Conflict, Corrupt, Full, NotFound, ReadOnly
from elastix.state import Ref
from elastix.store import gc, lineage, replay, verify
from elastix.store.gc import Collected
from elastix.store.index import Index, Missing, Row, Status
from elastix.store.nearest import Best, Entry, Neighbours
from elastix.store.packs import Packs, Writer, storage_errors
from elastix.store.records import (
    Header,
    Kind,
    Place,
    retired_bytes,
    tag_bytes,
)
from elastix.store.requests import ANY, Outlook, Put, Reply, Request, Retire, Tag, index_errors
from elastix.store.verify import Damage, Stats

logger = logging.getLogger(__name__)
_RESERVE_BYTES = 1 << 20
_FOUND_KEPT = 4096
_UNREADABLE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "")  # "": another schema


class Ledger:
    """Owner of an index. Thread safe; other processes may have a Ledger on the same file."""

    def __init__(
        self, path: Path | None, packs: Packs, writer: Writer | None, read_only: bool = False
    ) -> None:
        """Open, rebuild what is unreadable, and adopt what crashed writers left.

        Args:
            path: of the index; None keeps it in memory (and rebuilds it now).
            packs: the records.
            writer: where tags and retirements are written; None if `read_only`.
            read_only: change nothing.

        Raises:
            StoreError: it cannot be opened.
        """
        self.packs = packs
        self._path = path
        self._writer = writer
        self._read_only = read_only
        self._mutex = threading.RLock()
        self._lock = -1
        self._neighbours: Neighbours | None = None
        self._seen: tuple[int, int] = (-1, 0)
        self._found: dict[str, Row] = {}  # by name, while the index is as it was
        self._found_at: tuple[int, int] = (-1, 0)
        self._rev = self._pruned = 0
        if path is not None and not read_only:
            with storage_errors(f"opening {path.parent}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = path.with_name("index.lock")
                self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._open()
            if not read_only:
                self._reserve()
        except BaseException:
            self.close()
            raise

    # --------------------------------------------------------------------------------- opening

    def _open(self) -> None:
        with self._mutex, self._exclusive(), index_errors():
            fresh = self._path is None or not self._path.exists()
            if self._read_only and fresh:
                self._path = None  # in memory, from the packs
            try:
                self.index = Index(self._path, self._read_only)
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorname", "") not in _UNREADABLE:
                    raise  # no fault of the file
                logger.warning("index unreadable path=%s error=%s: rebuilding", self._path, error)
                self._path = self._set_aside()
                self.index = Index(self._path, False)
                fresh = True
            if self._read_only and not fresh and self.index.knows_nothing() and self.packs.sizes():
                fresh = True  # made and never filled: the process that did it was killed
                self.index.sql.close()
                self.index = Index(None)
            if fresh:
                if not self._read_only:
                    replay.check_alone(self.packs)
                self._replay(replay.everything(self.packs))
            elif not self._read_only:
                self._adopt()

    def _set_aside(self) -> Path | None:
        if self._read_only or self._path is None:
            return None
        with storage_errors(f"setting {self._path} aside"):
            for suffix in ("", "-wal", "-shm"):
                old = self._path.with_name(self._path.name + suffix)
                if old.exists():
                    old.replace(old.with_name(f"{old.name}.unreadable"))
        return self._path

    def _replay(self, spans: list[replay.Span]) -> None:
        sql = self.index.sql
        try:
            sql.execute("BEGIN IMMEDIATE")
            replay.replay(self.index, self.packs, spans)
            sql.execute("COMMIT")
        except BaseException:
            self._rollback()
            raise

    def _adopt(self) -> None:
        spans = replay.tails(self.index, self.packs)
        if spans:
            logger.info("adopting records of writers that are gone packs=%d", len(spans))
            self._replay(spans)

    def adopt(self) -> None:
        """Enter what writers that are gone had written and not committed."""
        with self._owned(), index_errors():
            self._adopt()

    def rebuild(self) -> None:
        """Make the index anew from the packs.

        Raises:
            Conflict: a writer is at work in another process.
        """
        self._check_writable()
        with self._owned(), index_errors():
            if self._writer is not None:
                self._writer.close()
            replay.check_alone(self.packs)
            self.index.sql.close()
            with storage_errors("removing the index"):
                if self._path is not None:
                    for suffix in ("", "-wal", "-shm"):
                        self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._neighbours = None
            self._seen = self._found_at = (-1, 0)
            self.index = Index(self._path)
            self._replay(replay.everything(self.packs))

    def close(self) -> None:
        """Close the file. The writer is its owner's to close."""
        with self._mutex:
            if hasattr(self, "index"):
                if not self._read_only:
                    with suppress(sqlite3.Error):
                        self.index.sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self.index.sql.close()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    # ------------------------------------------------------------------------------- changing

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnly("this store was opened with read_only=True. Nothing was changed.")

    @contextmanager
    def _owned(self) -> Iterator[None]:
        lock = self._writer.lock if self._writer else nullcontext()
        with lock, self._mutex, self._exclusive():
            yield

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._lock < 0:
            yield
            return
        try:
            with storage_errors("locking the index"):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _rollback(self) -> None:
        self.index.forget_cached()
        with suppress(sqlite3.Error):
            if self.index.sql.in_transaction:
                self.index.sql.execute("ROLLBACK")

    @contextmanager
    def transaction(self, durable: bool = False) -> Iterator[Index]:
        """All or nothing, one at a time over all processes.

        Args:
            durable: on the disk when it returns. Otherwise a power cut may take it back; what
                it says stands in the packs, and is found again there.
        """
        self._check_writable()
        with self._owned(), index_errors():
            sql = self.index.sql
            try:
                if durable:
                    sql.execute("PRAGMA synchronous=FULL")
                sql.execute("BEGIN IMMEDIATE")
                yield self.index
                if self._writer is not None:
                    self._writer.sync()
                sql.execute("COMMIT")
            except BaseException:
                self._rollback()
                if self._writer is not None:
                    self._writer.cut()
                raise
            finally:
                if durable:
                    with suppress(sqlite3.Error):
                        sql.execute("PRAGMA synchronous=NORMAL")

    def submit(self, requests: Sequence[Request]) -> list[Reply]:
        """Carry out requests in one commit. One that fails leaves the others as they are.

        Returns:
            One reply for each: None for done, or Missing, or the error.

        Raises:
            StoreError: nothing was done at all.
        """
        try:
            return self._submit(requests)
        except Full:
            if not any(isinstance(request, Retire) for request in requests):
                raise
            self.spend_reserve()  # retiring must work on a full disk, or nobody could make room
            return self._submit(requests)

    def _submit(self, requests: Sequence[Request]) -> list[Reply]:
        with self.transaction() as index:
            rev = index.next_rev()
            return [self._apply(request, rev) for request in requests]

    def _apply(self, request: Request, rev: int) -> Reply:
        sql = self.index.sql
        sql.execute("SAVEPOINT one")
        reply: Reply = None
        try:
            if isinstance(request, Put):
                reply = self._put(request, rev)
            elif isinstance(request, Tag):
                self._tag(request)
            else:
                self._retire(request, rev)
        except (Conflict, NotFound, Corrupt) as error:
            sql.execute("ROLLBACK TO one")
            self.index.forget_cached()
            reply = error
        sql.execute("RELEASE one")
        return reply

    def _put(self, put: Put, rev: int) -> Missing | None:
        index = self.index
        if any(map(index.is_gone, {put.place.pack, *(place.pack for _, place in put.blobs)})):
            return Missing(())
        index.add_blobs(put.blobs)
        index.tick(put.seq)
        reply = index.add_model(put.ref, put.model, put.seq, put.place, rev)
        ends = {place.pack: place.end for _, place in sorted(put.blobs, key=lambda b: b[1])}
        for pack, end in {**ends, put.place.pack: put.place.end}.items():
            index.extend_pack(pack, end)
        return reply

    def _journal(self, kind: Kind, payload: bytes) -> tuple[int, Place]:
        if self._writer is None:
            raise ReadOnly("this store has no writer. Nothing was changed.")
        seq = self.index.tick(time.time_ns())
        header = Header(kind, len(payload), blake3(payload).digest(), seq)
        place = self._writer.append(header, payload)
        self.index.extend_pack(place.pack, place.end)
        return seq, place

    def _tag(self, tag: Tag) -> None:
        if tag.ref is not None:
            self._alive(tag.ref)
        now = self.index.tags().get(tag.name)
        if now == tag.ref:  # a retry, or somebody had the same wish
            return
        if tag.expected not in (ANY, now):
            raise Conflict(
                f"tag {tag.name!r} means {now or 'nothing'}, not {tag.expected or 'nothing'} as "
                "expected: somebody moved it. It was left as it is. Look at it and decide again."
            )
        seq, place = self._journal(Kind.TAG, tag_bytes(tag.name, tag.ref))
        self.index.set_tag(tag.name, tag.ref, seq, place)

    def _retire(self, request: Retire, rev: int) -> None:
        row = self.index.row(request.ref)
        if row is None:
            raise NotFound(f"there is no model {request.ref!r} in this store. Nothing was retired.")
        if row.status == Status.RETIRED:
            return
        names = [name for name, ref in self.index.tags().items() if ref == request.ref]
        if names:
            raise Conflict(
                f"model {request.ref[:12]} is tagged {', '.join(names)}. It was not retired. "
                "Untag it first."
            )
        parents = tuple(self.index.parents(request.ref))
        seq, place = self._journal(Kind.RETIRED, retired_bytes(request.ref, parents))
        self.index.retire(request.ref, parents, seq, place, rev)

    # --------------------------------------------------------------------------------- asking

    @contextmanager
    def asking(self) -> Iterator[Index]:
        """The index, for reading."""
        with self._mutex, index_errors():
            yield self.index

    def _alive(self, ref: Ref) -> Row:
        row = self.index.row(ref)
        if row is None:
            raise NotFound(f"there is no model {ref!r} in this store.")
        if row.status == Status.RETIRED:
            raise NotFound(f"model {ref[:12]} was retired; its tensors are gone or going.")
        return row

    def outlook(self, ref: Ref, digests: Sequence[bytes]) -> Outlook:
        """What putting a model of these digests would have to write."""
        with self.asking() as index:
            row = index.row(ref)
            known = index.blobs(digests)
            clock = index.sql.execute("SELECT seq FROM clock").fetchone()[0]
            return Outlook(
                stored=row is not None and row.status == Status.ALIVE,
                seq=max(time.time_ns(), int(clock) + 1),
                missing=tuple(digest for digest in digests if digest not in known),
            )

    def find(self, name: str) -> Row:
        """The model that a tag, a ref or the beginning of one means.

        Raises:
            NotFound: none, or it was retired. Conflict: several.
        """
        with self._mutex, index_errors():
            version = self._version()
            if version != self._found_at or len(self._found) >= _FOUND_KEPT:
                self._found, self._found_at = {}, version
            row = self._found.get(name)
            if row is None:
                row = self._found[name] = self._alive(self.index.resolve(name))
            return row

    def _version(self) -> tuple[int, int]:
        """Changes whenever anybody changed the index."""
        sql = self.index.sql
        return sql.execute("PRAGMA data_version").fetchone()[0], sql.total_changes

    def places(self, digests: Sequence[bytes]) -> dict[bytes, Place]:
        """Where these digests stand."""
        with self.asking() as index:
            return index.places(digests)

    def tags(self) -> dict[str, Ref]:
        """Every tag and what it means."""
        with self.asking() as index:
            return index.tags()

    def rows(self, limit: int = -1) -> list[tuple[Row, list[Ref], dict[str, Any]]]:
        """Living models with parents and plain metadata, the latest first."""
        with self.asking() as index:
            return [
                (row, index.parents(row.ref), index.meta(row)) for row in index.rows(limit=limit)
            ]

    def relatives(self, question: str, *refs: Ref) -> list[Ref]:
        """`parents`, `children`, `ancestors`, `descendants` or `common_ancestor` of `refs`."""
        with self.asking() as index:
            if question == "parents":
                return index.parents(refs[0])
            if question == "children":
                return index.children(refs[0])
            if question == "ancestors":
                return lineage.ancestors(refs[0], index.parents)
            if question == "descendants":
                return lineage.ancestors(refs[0], index.children)
            found = lineage.common_ancestor(refs[0], refs[1], index.parents)
            return [found] if found else []

    def nearest(
        self,
        ids: Sequence[int],
        mode: lineage.Mode,
        where: dict[str, Any] | None = None,
        tagged: str | None = None,
        but: str | None = None,
    ) -> Best | None:
        """The model that shares most with these ids."""
        with self.asking() as index:
            allowed = None
            if where or tagged is not None or but is not None:
                allowed = index.matching(where or {}, tagged, but)
            neighbours = self._refreshed()
            return (neighbours.lp if mode == "lp" else neighbours.lcs)(ids, allowed)

    def _refreshed(self) -> Neighbours:
        version = self._version()
        if self._neighbours is not None and version == self._seen:
            return self._neighbours
        pruned = self.index.prunings()
        if self._neighbours is None or pruned != self._pruned:
            found = self.index.entries_since(0)
            self._rev = 0
            self._neighbours = Neighbours(e for _, e in found if isinstance(e, Entry))
        else:
            found = self.index.entries_since(self._rev)
            for _, entry in found:
                if isinstance(entry, Entry):
                    self._neighbours.add(entry)
                else:
                    self._neighbours.remove(entry)
        self._seen, self._pruned = version, pruned
        self._rev = max((rev for rev, _ in found), default=self._rev)
        return self._neighbours

    # --------------------------------------------------------------------------------- upkeep

    def verify(self) -> list[Damage]:
        """Read everything and say what is not as it was written."""
        with self.asking() as index:
            return verify.verify(index, self.packs)

    def stats(self) -> Stats:
        """How many, how large."""
        with self.asking() as index:
            return verify.stats(index, self.packs, self._path)

    def gc(self) -> Collected:
        """Give back the bytes of what nobody refers to."""
        self._check_writable()
        if self._writer is None:
            raise ReadOnly("this store has no writer. Nothing was collected.")
        self.spend_reserve()
        try:
            return gc.collect(self, self._writer)
        finally:
            self._reserve()

    @property
    def reserve_path(self) -> Path | None:
        """A file whose only purpose is to be removed when the disk is full."""
        return self._path.with_name("reserve") if self._path is not None else None

    def spend_reserve(self) -> None:
        """Free the reserve."""
        path = self.reserve_path
        if path is not None:
            with storage_errors(f"removing {path}"):
                path.unlink(missing_ok=True)
            with self._mutex, suppress(sqlite3.Error):
                self.index.sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _reserve(self) -> None:
        path = self.reserve_path
        if path is None or path.exists():
            return
        draft = path.with_name("reserve.draft")
        try:
            with draft.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            draft.replace(path)
        except OSError:  # no room for it now; gc tries again
            with suppress(OSError):
                draft.unlink(missing_ok=True)
