"""What a person writes down about a run: a note and tags, in `notes.json` beside its journal."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastix.errors import Corrupt, StoreError
from elastix.observe.run_lock import Lock

_FILE = "notes.json"
_LOCK = ".notes.lock"  # one a store, beside the runs: a folder that is removed keeps none
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Notes:
    """Of one run."""

    note: str = ""
    tags: Sequence[str] = ()


def read(directory: Path) -> Notes:
    """Of the run in this directory.

    Raises:
        Corrupt: the file is not what was written.
    """
    path = directory / _FILE
    try:
        found = json.loads(path.read_text("utf-8"))
        return Notes(str(found["note"]), tuple(map(str, found["tags"])))
    except FileNotFoundError:
        return Notes()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"{path} is no note: {error!r}. Remove it, or write the note anew."
        ) from error


def change(
    directory: Path,
    note: str | None = None,
    tags: Callable[[Sequence[str]], Sequence[str]] = lambda before: before,
) -> Notes:
    """Change what is written of a run; of changes made at the same time none is lost.

    Args:
        directory: of the run.
        note: the new one; None keeps the old one.
        tags: makes the new ones from the old ones.

    Returns:
        What is written then.

    Raises:
        Corrupt: the file is not what was written.
        Conflict: another process holds the notes of this store for half a minute.
        StoreError: it cannot be written; the run may be gone.
    """
    with alone(directory):
        before = read(directory)
        notes = Notes(before.note if note is None else note, tuple(tags(before.tags)))
        _write(directory, notes)
    return notes


def alone(directory: Path) -> Lock:
    """Held while the notes of this run, or its folder, are changed.

    Raises:
        Conflict: see `change`.
    """
    return Lock(
        directory.parent / _LOCK,
        f"notes in {directory.parent} are being changed",
        patience_s=_PATIENCE_S,
        refusal="Nothing was changed. Try again when it has ended.",
    )


def _write(directory: Path, notes: Notes) -> None:
    """Replace it, whole or not at all."""
    path = directory / _FILE
    beside = path.with_name(f".{_FILE}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(asdict(notes)), "utf-8")
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}. Nothing was changed.") from error
    finally:
        beside.unlink(missing_ok=True)
