"""What may be asked of the owner of an index, and how its errors read. Plain values."""

import sqlite3
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from elastix.arguments import of_kind
from elastix.errors import ConfigError, ElastixError, Full, ReadOnly, StoreError
from elastix.state import Ref
from elastix.store.index import NONSENSE, Missing, damaged, readable
from elastix.store.packs import NOT_WRITABLE
from elastix.store.records import Model, Place

ANY = "*"


@dataclass(frozen=True)
class Put:
    """Enter a model whose records are durable already. Doing it twice does nothing twice."""

    ref: Ref
    model: Model
    place: Place
    seq: int
    blobs: tuple[tuple[bytes, Place], ...]


@dataclass(frozen=True)
class Tag:
    """Let a tag mean `ref` (None: nothing) if it now means `expected` (ANY: whatever)."""

    name: str
    ref: Ref | None
    expected: str | None


@dataclass(frozen=True)
class Retire:
    """Drop a model."""

    ref: Ref


Request = Put | Tag | Retire
Reply = Missing | StoreError | None


@dataclass(frozen=True)
class PutPlan:
    """What a put must write. `seq` and `time_s`, of the owner's clock, belong into the record."""

    stored: bool
    seq: int
    time_s: float
    missing: tuple[bytes, ...]


def check_filters(where: Mapping[str, Any] | None, tagged: str | None) -> None:
    """Refuse what no model can be found by; see Store.nearest.

    Raises:
        ConfigError: names it.
    """
    if where is None:
        where = {}
    of_kind("where", where, Mapping)  # type: ignore[type-abstract]
    for key, value in where.items():
        if not isinstance(key, str) or '"' in key or not readable(value):
            raise ConfigError(
                f"where={{{key!r}: {value!r}}}: models are found by text, finite numbers and "
                "bools, under keys without quotation marks. Nothing was looked for."
            )
    try:
        ("" if tagged is None else tagged).encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"tagged={tagged!r}: tags are found by a pattern of text. Nothing was looked for."
        ) from error


NO_SHARED = "SQLITE_IOERR_SHMSIZE"
"""What SQLite says of a full disk when it opens a file, before anything is written to it."""


def index_errors() -> AbstractContextManager[None]:
    """Turn SQLite's errors, and what values that no index has lead to, into StoreErrors."""
    return _INDEX_ERRORS


class _IndexErrors(AbstractContextManager[None]):  # no generator: it is entered at every read
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ElastixError):
            return
        if isinstance(error, sqlite3.Error):
            raise _of_sqlite(error) from error
        if isinstance(error, NONSENSE):
            raise damaged(repr(error)) from error


_INDEX_ERRORS = _IndexErrors()


def _of_sqlite(error: sqlite3.Error) -> StoreError:
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if name == "ProgrammingError" and "closed" in str(error):
        return StoreError("this store was closed. Nothing was done. Open it again.")
    text = f"the store's index failed: {error} ({name})."
    if name in ("SQLITE_FULL", NO_SHARED):
        return Full(f"{text} The operation had no effect. Make room, or retire models and run gc.")
    if name.startswith("SQLITE_READONLY"):
        return ReadOnly(f"{text} Nothing was changed. {NOT_WRITABLE}")
    if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
        return damaged(str(error))
    return StoreError(f"{text} The operation had no effect; try again.")
