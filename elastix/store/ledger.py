"""The one that owns the index: commits in groups, answers questions, recovers after a crash.

Without Ray every process has a Ledger, and a file lock lets one write at a time; with Ray one
actor has it (server.py) and the others ask. Not here: tensors' bytes, which never pass through.

Invariant: an answer of `submit` is given only after the records it rests on were synced to a
pack and the index was committed, in that order.
"""

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from elastix.errors import ConfigError, Conflict, Corrupt, Full, NotFound, ReadOnly, StoreError
from elastix.state import Ref
from elastix.store import gc, lineage, pack_replay, verify
from elastix.store.gc import Collected
from elastix.store.index import NONSENSE, Index, Missing, Row, Status, Unfilled, Unread, damaged
from elastix.store.nearest import NearestModel
from elastix.store.neighbourhood import Neighbourhood
from elastix.store.owner import Owner, crowded, held_elsewhere, refuse_links
from elastix.store.packs import Claims, Packs, Writer, read_record, storage_errors
from elastix.store.records import Header, Kind, Place, parse_tag, retired_bytes, tag_bytes
from elastix.store.requests import (
    ANY,
    NO_SHARED,
    Put,
    PutPlan,
    Reply,
    Request,
    Retire,
    Tag,
    index_errors,
)
from elastix.store.verify import Damage, Stats

logger = logging.getLogger(__name__)
_RESERVE_BYTES = 1 << 20
_SHARED_BYTES = 1 << 16
_FOUND_KEPT = 4096
_FILTERS_KEPT, _MODELS_KEPT = 16, 1_000_000
_UNREADABLE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "")
"""What a damaged file makes SQLite say; "" is another schema, or what no index can contain."""


def _is_damage(error: BaseException, path: Path | None) -> bool:
    """Whether the index could not be opened for what is in it."""
    name: str = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_READONLY" and path is not None:  # if no file system says so, its header does
        return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return name in _UNREADABLE or name.startswith("SQLITE_CONSTRAINT")


def _stamp(path: Path | None) -> tuple[object, ...]:
    """Which file the index is; then, other than before whenever it was changed, its state."""
    found: list[object] = []
    if path is None:
        return ()
    for end in ("", "-wal"):
        with suppress(OSError):
            info = path.with_name(path.name + end).stat()
            found += [info.st_ino, (end, info.st_size, info.st_mtime_ns)]
    return tuple(found)


def _makes_room(request: Request) -> bool:
    """Whether gc may remove more after it: a model that has a tag cannot be retired."""
    return isinstance(request, Retire) or (isinstance(request, Tag) and request.ref is None)


def _unknown(error: BaseException) -> BaseException:
    """The same error, if it is one of the store's, without a promise that nothing happened."""
    try:
        with index_errors():
            raise error
    except StoreError as ours:
        room = " Make room, or retire models and run gc." if isinstance(ours, Full) else ""
        return type(ours)(
            f"{str(ours).partition('. ')[0]}. The request was written, and whether it takes effect "
            "is unknown until the next change, or until the store is next opened. Repeating it is "
            f"harmless.{room}"
        )
    except BaseException as other:  # noqa: BLE001 - Ctrl-C among them; the caller raises it
        return other


class Ledger:
    """Owner of an index. Thread safe; other processes may have a Ledger on the same file."""

    def __init__(
        self,
        path: Path | None,
        packs: Packs,
        writer: Writer | None,
        read_only: bool = False,
        alone: bool = False,
    ) -> None:
        """Open, rebuild what is unreadable, and adopt what crashed writers left.

        Args:
            path: of the index; None keeps it in memory (and rebuilds it now).
            packs: the records.
            writer: where tags and retirements are written; None if `read_only`.
            read_only: change nothing.
            alone: let no other process write, as long as this one does.

        Raises:
            Taken: another process owns the store.
            Conflict: the index must be made anew, and another process has the store open.
            StoreError: it cannot be opened.
        """
        self.packs = packs
        self._path = self._file = path  # there is no path to an index that is made in memory
        self._copied = False
        self._writer = writer
        self._read_only = read_only
        self._mutex = threading.RLock()
        self._owner: Owner | None = None
        self._claims: Claims | None = None
        # Written, it is unknown how far, each with the clock by then; carried out first.
        self._unsettled: list[tuple[Request, int]] = []
        self._written_at = 0  # the clock in the last record of this ledger
        self._doubted: set[bytes] = set()  # digests and refs whose bytes were found damaged
        self._all = Neighbourhood()
        self._kept: dict[str, Neighbourhood] = {}  # by metadata; what was asked for last at the end
        self._found: dict[str, Row] = {}  # by name, while the index is as it was
        self._found_at: tuple[int, int] = (-1, 0)
        self._sound_tags: set[tuple[str, Ref, Place]] = set()
        try:
            if read_only:
                self._open_read_only()
            else:
                self._open(alone)
                self._reserve()
        except BaseException:
            self.close()
            raise

    # --------------------------------------------------------------------------------- opening

    def _open(self, alone: bool) -> None:
        path, packs = self._path, self.packs
        if path is not None:
            refuse_links(packs.folder, path.parent)
            self._owner = Owner(packs.folder or path.parent, path.parent)
            self._claims = packs.claims(path.parent)
        with self._mutex, self._exclusive(), index_errors():
            first = self._owner is None or self._owner.join(alone)
            if self._claims is not None:
                self._claims.enter(first)
            fresh = path is None or not path.exists()
            if not fresh:
                try:
                    self.index = self._opened(path)
                    self._adopt()
                except (sqlite3.DatabaseError, Corrupt, *NONSENSE) as error:
                    if not _is_damage(error, path):
                        raise
                    logger.warning("index unreadable path=%s error=%s: rebuilding", path, error)
                    fresh = True
            if fresh:
                if not first:
                    raise crowded("be made anew")
                pack_replay.check_alone(packs)
                self._set_aside(".unreadable")
                self.index = Index(path)
                self._replay(pack_replay.everything(packs))
            if self._owner is not None:
                self._owner.settle()

    def _opened(self, path: Path | None) -> Index:
        """The index, also on a full disk: SQLite keeps a file beside it as long as it is open."""
        try:
            return Index(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != NO_SHARED or not self._cut_reserve():
                raise
            return Index(path)

    def _open_read_only(self) -> None:
        path, packs = self._file, self.packs
        if path is not None:
            refuse_links(packs.folder, path.parent)
        with self._mutex, index_errors():
            self._stamp = _stamp(path)
            there = path is not None and path.exists()
            if packs.folder is not None and held_elsewhere(packs.folder):
                there = False  # SQLite's log of what is not in the file yet is on that machine
            if there:
                try:
                    self.index = Index(path, read_only=True, copied=packs.folder is None)
                except (Unfilled, Unread):
                    there = False
                except (sqlite3.DatabaseError, *NONSENSE) as error:
                    if not _is_damage(error, path):
                        raise
                    logger.warning("index unreadable path=%s error=%s: not used", path, error)
                    there = False
            if there and self._is_useless():
                there = False
                self.index.sql.close()
            self._path = path if there else None
            # An immutable one is like a copy: what others write to it damages what SQLite has read.
            self._copied = not there or packs.folder is None or self.index.immutable
            if not there:
                self.index = Index(None)
                self._replay(pack_replay.everything(packs))
            elif packs.folder is None:
                self._adopt()
            elif pack_replay.unknown(self.index, packs):  # and this file must not be written to
                self.index.sql.close()
                self.index = Index(path, read_only=True, copied=True)
                self._copied = True
                self._adopt()

    def _is_useless(self) -> bool:
        """Made and never filled, for who did it was killed; or older than a collection."""
        if pack_replay.lost_packs(self.index, self.packs):
            return True
        return self.index.knows_nothing() and bool(self.packs.sizes())

    def refresh(self) -> None:
        """See what others have stored since, if this reads a copy, or a file that was replaced."""
        if not self._read_only:
            return
        if self.packs.folder is None:
            with self._mutex, index_errors():
                self._adopt()
        elif self._is_behind():
            with self._mutex:
                before = self.index
                self._forget_read()
                try:
                    self._open_read_only()
                except BaseException:
                    self.index, self._stamp = before, ()  # the next question asks again
                    raise
                before.sql.close()

    def _look(self) -> None:
        """Before any question: an index that was taken for immutable may have changed."""
        if self._read_only and self.index.immutable:
            self.refresh()

    def _is_behind(self) -> bool:
        """Whether the index was changed, of which this has a copy, or made anew."""
        now = _stamp(self._file)
        return now != self._stamp if self._copied else now[:1] != self._stamp[:1]

    def _forget_read(self) -> None:
        """What was remembered of an index that another takes the place of."""
        self._all = Neighbourhood()
        self._kept.clear()
        self._found_at = (-1, 0)

    def _set_aside(self, suffix: str = "") -> None:
        """Move the files of the index away, or remove them."""
        if hasattr(self, "index"):
            self.index.sql.close()
        self._forget_read()
        if self._path is None:
            return
        with storage_errors(f"removing {self._path}"):
            for end in ("", "-wal", "-shm"):
                old = self._path.with_name(self._path.name + end)
                if suffix and old.exists():
                    old.replace(old.with_name(f"{old.name}{suffix}"))
                else:
                    old.unlink(missing_ok=True)

    def _replay(self, spans: list[pack_replay.Span]) -> None:
        sql = self.index.sql
        try:
            sql.execute("BEGIN IMMEDIATE")
            pack_replay.replay(self.index, self.packs, spans, self._doubted)
            sql.execute("COMMIT")
        except BaseException:
            self._rollback()
            raise

    def _adopt(self) -> None:
        self._doubted |= pack_replay.lost(self.index, self.packs)
        spans = pack_replay.tails(self.index, self.packs)
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
        only = nullcontext() if self._owner is None else self._owner.only()
        with self._owned(), only, index_errors():
            if self._writer is not None:
                self._writer.close()
            pack_replay.check_alone(self.packs)
            self._set_aside()
            self.index = Index(self._path)
            self._doubted.clear()
            self._replay(pack_replay.everything(self.packs))

    def close(self) -> None:
        """Close the file. The writer is its owner's to close."""
        with self._mutex:
            if hasattr(self, "index"):
                if not self._read_only:
                    with suppress(sqlite3.Error):
                        self.index.sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self.index.sql.close()
            if self._owner is not None:
                if self._claims is not None:  # one note for all who use this index
                    with suppress(StoreError), self._owner.exclusive():
                        if self._owner.is_last():
                            self._claims.leave()
                        self._owner.close()
                self._owner.close()
                self._owner = None

    # ------------------------------------------------------------------------------- changing

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnly("this store was opened with read_only=True. Nothing was changed.")

    @contextmanager
    def _owned(self) -> Iterator[None]:
        lock = self._writer.lock if self._writer else nullcontext()
        with lock, self._mutex, self._exclusive():
            yield

    def _exclusive(self) -> AbstractContextManager[None]:
        return nullcontext() if self._owner is None else self._owner.exclusive()

    def _rollback(self) -> None:
        self.index.forget_cached()
        with suppress(sqlite3.Error):
            if self.index.sql.in_transaction:
                self.index.sql.execute("ROLLBACK")

    @contextmanager
    def transaction(
        self, durable: bool = False, requests: Sequence[Request] = ()
    ) -> Iterator[Index]:
        """All or nothing, one at a time over all processes.

        Args:
            requests: what is carried out in it.
            durable: on the disk when it returns. Otherwise a power cut may take it back; what
                it says stands in the packs, and is found again there.
        """
        self._check_writable()
        with self._owned(), index_errors():
            sql = self.index.sql
            written = False
            try:
                if durable:
                    sql.execute("PRAGMA synchronous=FULL")
                sql.execute("BEGIN IMMEDIATE")
                yield self.index
                if self._writer is not None:
                    written = True
                    self._writer.sync()
                sql.execute("COMMIT")
            except BaseException as error:
                self._rollback()
                if self._writer is not None:
                    self._writer.cut()
                if not written or not requests:
                    raise
                # The records may be on the disk for good: whoever makes the index anew carries
                # them out, so this ledger must, before anything that comes later.
                again = [request for request, _ in self._unsettled]
                again += [request for request in requests if not isinstance(request, Put)]
                self._unsettled = [(request, self._written_at) for request in again]
                raise _unknown(error) from error
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
            if not any(map(_makes_room, requests)):
                raise
            self.spend_reserve()  # these must work on a full disk, or nobody could make room
            return self._submit(requests)

    def _submit(self, requests: Sequence[Request]) -> list[Reply]:
        with self.transaction(requests=requests) as index:
            rev = index.next_rev()
            self._settle(index, rev)
            replies = [self._apply(request, rev) for request in requests]
        self._unsettled.clear()
        return replies

    def _settle(self, index: Index, rev: int) -> None:
        """Carry out what a failed commit has left, unless others have decided otherwise since.

        A model that has a tag by now stays, as `_retire` says; see also pack_replay.
        """
        moved = index.tag_seqs() if self._unsettled else {}
        for request, seq in self._unsettled:
            if not isinstance(request, Tag) or moved.get(request.name, -1) < seq:
                self._apply(request, rev)

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
        if index.is_gone(put.place.pack):
            return Missing(())
        packs = {place.pack for _, place in put.blobs}
        gone = {pack for pack in packs if index.is_gone(pack) or self.packs.lacks(pack)}
        if gone:  # what stood there others may have put again, elsewhere
            lost = [digest for digest, place in put.blobs if place.pack in gone]
            if missing := self.missing(lost):
                return Missing(missing)
            put = replace(put, blobs=tuple(blob for blob in put.blobs if blob[1].pack not in gone))
        index.add_blobs(put.blobs)
        index.advance(put.seq)
        reply = index.add_model(put.ref, put.model, put.seq, put.place, rev)
        if self._doubted and reply is None:
            self._heal(put)
        ends = {place.pack: place.end for _, place in sorted(put.blobs, key=lambda b: b[1])}
        for pack, end in {**ends, put.place.pack: put.place.end}.items():
            index.extend_pack(pack, end)
        return reply

    def _heal(self, put: Put) -> None:
        """What was damaged where it stood counts from now on where it was written again."""
        blobs = [(digest, place) for digest, place in put.blobs if digest in self._doubted]
        self.index.replace_blobs(blobs)
        ref = bytes.fromhex(put.ref)
        if ref in self._doubted:
            self.index.replace_model(put.ref, put.place)
        self._doubted -= {ref, *(digest for digest, _ in blobs)}

    def doubt(self, what: bytes) -> None:
        """A tensor (by digest) or a model (by ref) is damaged: the next put writes it again."""
        with self._mutex:
            self._doubted.add(what)

    def _journal(self, kind: Kind, payload: bytes) -> tuple[int, Place]:
        if self._writer is None:
            raise ReadOnly("this store has no writer. Nothing was changed.")
        seq = self.index.advance(self.index.next_seq(time.time_ns()))
        header = Header(kind, len(payload), blake3(payload).digest(), seq)
        place = self._writer.append(header, payload)
        self._written_at = seq
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
                "Untag it first: `elastix store tag NAME --delete`."
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
            raise NotFound(
                f"there is no model {ref!r} in this store. `elastix store log` lists what there is."
            )
        if row.status == Status.RETIRED:
            raise NotFound(f"model {ref[:12]} was retired; its tensors are gone or going.")
        return row

    def outlook(self, ref: Ref, digests: Sequence[bytes]) -> PutPlan:
        """What putting a model of these digests would have to write."""
        if self._unsettled:
            self._submit(())
        with self.asking() as index:
            row = index.row(ref)
            alive = row is not None and row.status == Status.ALIVE
            if row is not None and alive and self.packs.lacks(row.place.pack):
                self._doubted |= pack_replay.lost(index, self.packs)  # its manifest among them
            missing = self.missing(digests)
            stored = alive and not missing and bytes.fromhex(ref) not in self._doubted
            return PutPlan(stored, index.next_seq(time.time_ns()), time.time(), missing)

    def missing(self, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Which of these no pack holds, or holds damaged: whoever puts them writes them."""
        with self.asking() as index:
            known = index.places(digests)
            if any(map(self.packs.lacks, {place.pack for place in known.values()})):
                self._doubted |= pack_replay.lost(index, self.packs)  # removed by somebody else
            return tuple(d for d in digests if d not in known or d in self._doubted)

    def find(self, name: str) -> Row:
        """The model that a tag, a ref or the beginning of one means.

        Raises:
            NotFound: none, or it was retired. Conflict: several. ConfigError: no text.
        """
        self._look()
        try:
            return self._find(name)
        except NotFound:
            if not self._read_only:
                raise
        self.refresh()
        return self._find(name)

    def _find(self, name: str) -> Row:
        with self._mutex, index_errors():
            version = self._version()
            if version != self._found_at:
                self._found, self._found_at = {}, version
            row = self._found.get(name) if isinstance(name, str) else None
            return self._look_up(name) if row is None else row

    def _look_up(self, name: str) -> Row:
        try:
            name.encode()
        except (AttributeError, UnicodeEncodeError) as error:  # no text, or none that can be kept
            raise ConfigError(
                f"a model is named by a tag, a ref or the beginning of one, not by {name!r}. "
                "Nothing was done."
            ) from error
        ref = self.index.resolve(name)
        if not ref.startswith(name):
            records = self.index.tag_records(name)
            if {(tag, to) for tag, to, _ in records} != {(name, ref)}:
                raise damaged(f"{name!r} means several models, {ref[:12]} among them")
            self._check_tags(records)
        if len(self._found) >= _FOUND_KEPT:
            self._found = {}
        row = self._found[name] = self._alive(ref)
        return row

    def _check_tags(self, records: Sequence[tuple[str, Ref, Place]]) -> None:
        """Compare tags with their records, once each: one bit makes another name of a name.

        Raises:
            Corrupt: the index says something else.
        """
        for tag, ref, place in records:
            if (tag, ref, place) in self._sound_tags:
                continue
            try:
                _, payload = read_record(self.packs, place, Kind.TAG)
                said = parse_tag(payload, place.pack)
            except (Corrupt, NotFound):  # damaged, or moved just now: the index alone knows
                continue
            if said != (tag, ref):
                raise damaged(f"{tag!r} means {ref[:12]} to it, and its record says {said}")
            self._sound_tags.add((tag, ref, place))

    def _version(self) -> tuple[int, int]:
        """Changes whenever anybody changed the index."""
        sql = self.index.sql
        return sql.execute("PRAGMA data_version").fetchone()[0], sql.total_changes

    def places(self, digests: Sequence[bytes]) -> dict[bytes, Place]:
        """Where these digests stand."""
        self._look()
        with self.asking() as index:
            return index.places(digests)

    def tags(self) -> dict[str, Ref]:
        """Every tag and what it means."""
        self.refresh()
        with self.asking() as index:
            tags, records = index.tags(), index.tag_records()
        self._check_tags(records)
        return tags

    def rows(
        self,
        limit: int | None = None,
        only: Sequence[Ref] | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> list[tuple[Row, list[Ref], dict[str, Any]]]:
        """Living models with parents and plain metadata, the latest first.

        Args:
            limit: how many at most; None for all.
            only: these, each named once; None for any.
            where: with such metadata, see `Index.matching`; None for any.
        """
        self.refresh()
        with self.asking() as index:
            if only is None:
                found = list(index.rows(limit=limit, where=where))
            else:
                having = index.matching(where, None, ()) if where else None
                known = [row for ref in only if (row := index.row(ref)) is not None]
                alive = [row for row in known if row.status == Status.ALIVE]
                found = [row for row in alive if having is None or row.id in having]
                found = sorted(found, key=lambda row: row.seq, reverse=True)[:limit]
            return [(row, index.parents(row.ref), index.meta(row)) for row in found]

    def relatives(self, question: str, *refs: Ref) -> list[Ref]:
        """`parents`, `children`, `ancestors`, `descendants` or `common_ancestor` of `refs`."""
        self._look()
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
        but: Sequence[str] = (),
        until_s: float | None = None,
    ) -> NearestModel | None:
        """The model that shares most with these ids."""
        self._look()
        with self.asking() as index:
            asked, among = where or {}, self._all
            if asked and tagged is None and not but:
                among, asked = self._having(asked), {}  # all of these have it
            chosen = tagged is not None or bool(but) or until_s is not None
            allowed = index.matching(asked, tagged, but, until_s) if chosen else None
            neighbours = among.of(index)
            return (neighbours.lp if mode == "lp" else neighbours.lcs)(ids, allowed)

    def _having(self, where: dict[str, Any]) -> Neighbourhood:
        """Models with such metadata, for several questions: a campaign asks for each trial."""
        key, kept = json.dumps(where, sort_keys=True), self._kept
        kept[key] = kept.pop(key) if key in kept else Neighbourhood(where)
        models = sum(map(len, kept.values()))
        while len(kept) > _FILTERS_KEPT or (len(kept) > 1 and models > _MODELS_KEPT):
            models -= len(kept.pop(next(iter(kept))))
        return kept[key]

    # --------------------------------------------------------------------------------- upkeep

    def verify(self) -> list[Damage]:
        """Read everything and say what is not as it was written.

        A copy of the index is not told of what gc removes. So what is found by one counts if it
        is found again, by a newer one.
        """
        self._look()
        damage, doubted = verify.verify(self.asking, self.packs)
        if damage and self._read_only and self._copied:
            self.refresh()
            again, doubted = verify.verify(self.asking, self.packs)
            damage = [found for found in again if found in damage]
        with self._mutex:
            self._doubted |= doubted
        return damage

    def stats(self) -> Stats:
        """How many, how large."""
        self._look()
        with self.asking() as index:
            return verify.stats(index, self.packs, self._path)

    def gc(self) -> Collected:
        """Give back the bytes of what nobody refers to."""
        self._check_writable()
        if self._writer is None:
            raise ReadOnly("this store has no writer. Nothing was collected.")
        self.spend_reserve()
        try:
            with self._claims.collecting() if self._claims is not None else nullcontext():
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

    def _cut_reserve(self) -> bool:
        """Free a part of it; whether there was as much."""
        path = self.reserve_path
        if path is None:
            return False
        with suppress(OSError):
            left = path.stat().st_size - _SHARED_BYTES
            if left >= 0:
                os.truncate(path, left)
                return True
        return False

    def _reserve(self) -> None:
        path = self.reserve_path
        if path is None:
            return
        with suppress(OSError):  # there is none; gc of another process may just have spent it
            if path.stat().st_size >= _RESERVE_BYTES:
                return
        draft = path.with_name("reserve.draft")
        try:
            draft.unlink(missing_ok=True)  # of a process that was killed, or a link
            with draft.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            draft.replace(path)
        except OSError:  # no room for it now; gc tries again
            with suppress(OSError):
                draft.unlink(missing_ok=True)
