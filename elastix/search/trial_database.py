"""The trial database: all trials of a campaign, in SQLite; one transaction for what is at once.

It stands beside the store's index, not in it, as the index can be rebuilt from packs and trials
cannot. Not here: what trials mean (trial), or which of them run (campaign_loop).

Invariant: a result is in the database whole or not at all, and what `commit` returned from stays,
whatever process is killed when. One process writes; others may read meanwhile. Each row has a
checksum, and what was damaged is Corrupt. So is a database that lacks trials which the campaign's
journal says were over: SQLite takes damage in its log for the log's end, and leaves out the rest.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal, Self
from zlib import crc32

from elastix.errors import Corrupt, Full, NotFound, ReadOnly, StoreError, TooNew
from elastix.events import TrialEnded
from elastix.observe import journal
from elastix.observe.catalogue import JOURNAL
from elastix.observe.journal import is_file
from elastix.observe.run_lock import Lock, holder
from elastix.search.trial import Trial, TrialState
from elastix.state import Ref
from elastix.store.requests import NO_SHARED

FILE = "campaign.sqlite"
Role = Literal["search", "rerank"]
_VERSION = 2
_WITHOUT_SUMS = 1
_BUSY_S = 30.0
_NO_PLACE = ("SQLITE_CANTOPEN", "SQLITE_READONLY", NO_SHARED)
_TABLES = f"""
BEGIN;
CREATE TABLE facts(name TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER) WITHOUT ROWID;
CREATE TABLE trials(
    number INTEGER PRIMARY KEY, state TEXT NOT NULL, role TEXT NOT NULL,
    done INTEGER, body TEXT NOT NULL, sum INTEGER
);
CREATE TABLE superseded(ref TEXT PRIMARY KEY, sum INTEGER) WITHOUT ROWID;
CREATE TABLE passed(place INTEGER PRIMARY KEY, body TEXT NOT NULL, sum INTEGER);
PRAGMA user_version={_VERSION};
COMMIT;
"""
_LATER_TABLES = (  # of the version without checksums; it did not have them from the beginning
    "superseded(ref TEXT PRIMARY KEY) WITHOUT ROWID",
    "passed(place INTEGER PRIMARY KEY, body TEXT NOT NULL)",
)
_COLUMNS = {
    "facts": ("name", "value"),
    "trials": ("number", "state", "role", "done", "body"),
    "superseded": ("ref",),
    "passed": ("place", "body"),
}


def lock_of(directory: Path) -> Path:
    """The file that the process which runs the campaign in this directory has locked."""
    return (directory / FILE).with_suffix(".lock")


def is_at_work(directory: Path) -> bool:
    """Whether a process runs the campaign in this directory; True where that cannot be told."""
    try:
        return holder(lock_of(directory)) is not None
    except StoreError:
        return True


def state_in_words(trial: Trial, at_work: bool) -> str:
    """Of a trial of a campaign that a process runs, or none: then nothing of it is running."""
    gone = trial.state is TrialState.RUNNING and not at_work
    return "interrupted" if gone else trial.state.value


def row_sum(*values: object) -> int:
    """The checksum of a row: of all its columns, in their order, with a zero between them."""
    found = 0
    for place, value in enumerate(values):  # one by one, as some have many megabytes
        found = crc32(str(value).encode(), crc32(b"\0", found) if place else found)
    return found


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial as it stands in the database.

    Attributes:
        done: place among the final trials in the order in which they became so, from 1.
        role: "search" for what a searcher proposed, "rerank" for a control from scratch.
    """

    trial: Trial
    role: Role = "search"
    done: int | None = None


class TrialDatabase:
    """Opened for writing, it is this process's alone until it is closed or the process ends."""

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        """Open the database of the campaign in `directory`, or begin one.

        Raises:
            NotFound: read_only, and there is none, or nothing is in it yet.
            Conflict: another process runs this campaign.
            TooNew, Corrupt, Full, StoreError: it cannot be opened.
        """
        self.directory = directory
        self._path = directory / FILE
        self._lock: Lock | None = None
        if read_only and not is_file(self._path):
            raise NotFound(f"there is no campaign in {directory}.")
        if not read_only:
            with _errors(self._path):
                self._lock = Lock(
                    lock_of(directory),
                    f"the campaign in {directory} is run",
                    refusal="Nothing was started. Stop it, or choose another name.",
                )
        try:
            with _errors(self._path):
                self._open(read_only)
        except BaseException:
            self._release()
            raise

    def _open(self, read_only: bool) -> None:
        told = _told(self.directory)  # before the database, which is ahead
        looks = read_only or is_file(self._path)
        # Whoever writes looks at it first without the right to: SQLite's log is merged otherwise.
        self._sql = _reader(self._path) if looks else _connect(self._path, "rwc")
        try:
            version = self._checked_version(read_only, len(told))
            if looks and not read_only:
                self._sql.close()
                self._sql = _connect(self._path, "rw")
            if not read_only:
                self._prepare(version)
        except BaseException:
            self._sql.close()
            raise
        self._has_sums = version != _WITHOUT_SUMS or not read_only

    def _checked_version(self, read_only: bool, told: int) -> int:
        """The format of what is there, 0 for nothing; of a whole database, with all that was told.

        Raises:
            TooNew, Corrupt, NotFound: it is another one.
        """
        version = int(self._sql.execute("PRAGMA user_version").fetchone()[0])
        if version > _VERSION:
            raise TooNew(
                f"{self._path} has format {version}; this version reads {_VERSION}. Nothing was "
                "changed. Use the version of elastix that wrote it."
            )
        is_new = version == 0 and self._is_empty()
        if is_new and read_only and not told:
            raise NotFound(unbegun(self.directory))
        (found,) = self._sql.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok" or (version == 0 and not is_new):
            raise Corrupt(
                f"the campaign's trial database {self._path} is damaged: "
                f"{'it has no version' if found == 'ok' else found}. Nothing was changed. Restore "
                "it from a backup."
            )
        query = "SELECT max(done) FROM trials WHERE typeof(done) = 'integer'"
        over = 0 if is_new else self._sql.execute(query).fetchone()[0] or 0
        if over < told:
            raise Corrupt(
                f"the campaign's trial database {self._path} has lost what was written last: "
                f"{told} trials were over, as {JOURNAL} says, and it knows of {over}. It, or its "
                f"log {self._path.name}-wal, is damaged or was removed. Nothing was changed. "
                f"Restore both from a backup. To run the missing trials again, rename {JOURNAL}."
            )
        return version

    def _prepare(self, version: int) -> None:
        """For writing."""
        self._inode = self._path.stat().st_ino
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute("PRAGMA synchronous=FULL")
        if version == 0:
            self._sql.executescript(_TABLES)
        elif version == _WITHOUT_SUMS:
            self._add_sums()

    def _is_empty(self) -> bool:
        return self._sql.execute("SELECT 1 FROM sqlite_master").fetchone() is None

    def _add_sums(self) -> None:
        """To a database of an earlier version: what is in it now is taken for what was written."""
        self._sql.create_function("row_sum", -1, row_sum, deterministic=True)
        try:
            self._sql.execute("BEGIN IMMEDIATE")
            for later in _LATER_TABLES:
                self._sql.execute(f"CREATE TABLE IF NOT EXISTS {later}")
            for table, columns in _COLUMNS.items():
                self._sql.execute(f"ALTER TABLE {table} ADD COLUMN sum INTEGER")
                self._sql.execute(f"UPDATE {table} SET sum = row_sum({', '.join(columns)})")
            self._sql.execute(f"PRAGMA user_version={_VERSION}")
            self._sql.execute("COMMIT")
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def close(self) -> None:
        """Let others write."""
        try:
            self._sql.close()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------- use

    def commit(
        self,
        lines: Iterable[TrialRow],
        facts: Mapping[str, Any] | None = None,
        superseded: Iterable[Ref] = (),
        passed: tuple[int, Any] | None = None,
        *,
        forget_passed: bool = False,
    ) -> None:
        """Write trials, facts, and which States have a later one; all or nothing, durably.

        Args:
            lines: trials, each as it stands now.
            facts: values by name, which take the place of former ones.
            superseded: States that have a later one.
            passed: what has passed between the loop and its advisers, with its place.
            forget_passed: remove what earlier transactions have of that: `facts` have its effect.

        Raises:
            Full, StoreError: nothing was written; or the file was removed, or replaced.
        """
        rows = [
            (
                line.trial.number,
                line.trial.state.value,
                line.role,
                line.done,
                json.dumps(line.trial.to_json(), separators=(",", ":")),
            )
            for line in lines
        ]
        values = [(name, json.dumps(value)) for name, value in (facts or {}).items()]
        refs = [(ref,) for ref in superseded]
        words = [] if passed is None else [(passed[0], json.dumps(passed[1]))]
        if not rows and not values and not refs and not words:
            return
        with _errors(self._path):
            try:
                self._sql.execute("BEGIN IMMEDIATE")
                self._put("trials", rows)
                self._put("facts", values)
                self._put("superseded", refs)
                if forget_passed:
                    self._sql.execute("DELETE FROM passed")
                self._put("passed", words)
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise
            self._check_in_place()

    def _check_in_place(self) -> None:
        """SQLite goes on with a removed file, and all that it holds is gone when it is closed."""
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                return
        raise StoreError(
            f"the campaign's trial database {self._path} was removed or replaced while it was "
            "being written. Trials that were in it alone are lost, and nothing is added any more. "
            "Run the campaign again, and leave its folder alone while it runs."
        )

    def _put(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        places = ", ".join("?" * (1 + len(_COLUMNS[table])))
        self._sql.executemany(
            f"INSERT OR REPLACE INTO {table} VALUES({places})",
            [(*row, row_sum(*row)) for row in rows],
        )

    def _rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        """Those of a table, in order.

        Raises:
            Corrupt: one is not as it was written.
        """
        columns = _COLUMNS[table]
        rows = self._sql.execute(
            f"SELECT {', '.join(columns)}{', sum' if self._has_sums else ''} FROM {table} "
            f"ORDER BY {columns[0]}"
        )
        for row in rows:
            values = row[: len(columns)]
            if self._has_sums and row[-1] != row_sum(*values):
                raise Corrupt(
                    f"{self._path} is damaged: the row {values[0]!r} of its table {table} is not "
                    "as it was written, as its checksum says. Nothing was changed. Restore it from "
                    "a backup."
                )
            yield values

    def lines(self) -> list[TrialRow]:
        """Every trial, by number."""
        with _errors(self._path), readable(self._path):
            return [
                TrialRow(Trial.from_json(json.loads(body)), role, done)
                for _, _, role, done, body in self._rows("trials")
            ]

    def fact(self, name: str) -> Any:  # noqa: ANN401 - any JSON
        """What was committed under that name; None for nothing."""
        with _errors(self._path), readable(self._path):
            found = dict(self._rows("facts"))  # all of them: a damaged name would be no fact
            return json.loads(found[name]) if name in found else None

    def passed(self) -> list[tuple[int, Any]]:
        """What has passed between the loop and its advisers and is not forgotten, by place."""
        with _errors(self._path), readable(self._path):
            return [(place, json.loads(body)) for place, body in self._rows("passed")]

    def superseded(self) -> list[Ref]:
        """States of paused trials that have a later one, and may still be in the store."""
        with _errors(self._path):
            return [Ref(ref) for (ref,) in self._rows("superseded")]

    def forget_superseded(self, refs: Iterable[Ref]) -> None:
        """These are out of the store."""
        with _errors(self._path):
            self._sql.executemany("DELETE FROM superseded WHERE ref = ?", [(r,) for r in refs])

    def count(self) -> dict[str, int]:
        """How many trials are in each state."""
        with _errors(self._path):
            found = self._sql.execute("SELECT state, count(*) FROM trials GROUP BY state")
            return {str(state): int(number) for state, number in found}


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=_BUSY_S, isolation_level=None)


def _reader(path: Path) -> sqlite3.Connection:
    """The database, or a copy of it in memory where only a copy can be read.

    Even to read, SQLite needs a file beside the database; a disk that is read-only, or full, has no
    place for it.
    What a killed process has left in the log beside is in the copy as well.
    """
    sql = _connect(path, "ro")
    try:
        sql.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        sql.close()
        if not error.sqlite_errorname.startswith(_NO_PLACE):
            raise
    except BaseException:
        sql.close()
        raise
    else:
        return sql
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        with closing(_connect(copy, "rw")) as copied:
            copied.backup(memory)
    return memory


def _told(directory: Path) -> set[int]:
    """The trials that are over, as far as the campaign's journal can be read."""
    final = {state.value for state in TrialState if state.is_final}
    told = set()
    with suppress(StoreError):  # none, or damaged: that is its readers' affair
        for event in journal.read_only(directory / JOURNAL, TrialEnded):
            if isinstance(event, TrialEnded) and event.state in final:
                told.add(event.trial)
    return told


def unbegun(directory: Path) -> str:
    """What to say of a campaign whose database is empty."""
    return (
        f"no trial is in the database of the campaign in {directory} yet: it is just starting, or "
        "was stopped before it began. Run it again in that case."
    )


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        text = f"the campaign's trial database {path} failed: {error} ({name})."
        if name in ("SQLITE_FULL", NO_SHARED):
            raise Full(
                f"{text} What it has is safe, the last results are not in it. Make room and run "
                "the campaign again."
            ) from error
        if name.startswith("SQLITE_READONLY"):
            raise ReadOnly(f"{text} Nothing was changed.") from error
        no_text = "decode to UTF-8" in str(error)  # of which Python's module speaks, without a name
        odd = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")  # the last one: other columns
        if no_text or name in odd:
            raise Corrupt(f"{text} Nothing was changed. Restore it from a backup.") from error
        raise StoreError(f"{text} The last results are not in it; run it again.") from error
    except UnicodeDecodeError as error:  # of a damaged name in what SQLite says
        raise Corrupt(
            f"the campaign's trial database {path} is damaged: {error}. Nothing was changed. "
            "Restore it from a backup."
        ) from error
    except OSError as error:
        kind = StoreError.kind_of(error)
        raise kind(
            f"the campaign's trial database {path} failed: {error}. Nothing was changed."
        ) from error


_ODD = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What is in a trial database, and cannot be there, as Corrupt."""
    try:
        yield
    except _ODD as error:
        raise Corrupt(
            f"{path} holds what is of no campaign: {error!r}. Nothing was "
            "changed. Restore it from a backup."
        ) from error
