"""What may be asked of the owner of an index, and how its errors read. Plain values."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elastix.errors import ElastixError, Full, ReadOnly, StoreError
from elastix.state import Ref
from elastix.store.index import NONSENSE, Missing, damaged
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
    """What a put must write. `seq` belongs into the model's record."""

    stored: bool
    seq: int
    missing: tuple[bytes, ...]


@contextmanager
def index_errors() -> Iterator[None]:
    """Turn SQLite's errors, and what values that no index has lead to, into StoreErrors."""
    try:
        yield
    except ElastixError:
        raise
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        text = f"the store's index failed: {error} ({name})."
        if name == "SQLITE_FULL":
            raise Full(
                f"{text} The operation had no effect. Make room, or retire models and run gc."
            ) from error
        if name.startswith("SQLITE_READONLY"):
            raise ReadOnly(f"{text} Nothing was changed. Open with read_only=True.") from error
        if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            raise damaged(str(error)) from error
        raise StoreError(f"{text} The operation had no effect; try again.") from error
    except NONSENSE as error:
        raise damaged(repr(error)) from error
