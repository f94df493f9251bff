"""What a person writes down about a run: a note and tags, in `notes.json` beside its journal."""

import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastix.errors import Corrupt, Full, StoreError
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
        Corrupt: the file is not what was written. StoreError: it cannot be read.
    """
    path = directory / _FILE
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # nobody waits at a pipe
            raise OSError(errno.EINVAL, "it is no file")
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found["tags"], list):
            raise TypeError(f"tags are {found['tags']!r:.60}")
        return Notes(str(found["note"]), tuple(map(str, found["tags"])))
    except FileNotFoundError:
        return Notes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(
            f"{path} is no note: {error!r}. Remove it, and write the note anew."
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
        Full, StoreError: it cannot be read or written; the run may be gone.
    """
    with alone(directory):
        before = read(directory)
        notes = Notes(before.note if note is None else note, tuple(tags(before.tags)))
        _write(directory, notes)
    return notes


def alone(directory: Path, *, makes_room: bool = False) -> Lock:
    """Held while the notes of this run or its folder are changed, or the folder is removed.

    Raises:
        Conflict: see `change`.
    """
    return Lock(
        directory.parent / _LOCK,
        f"notes in {directory.parent} are being changed",
        patience_s=_PATIENCE_S,
        refusal="Nothing was changed. Try again when it has ended.",
        makes_room=makes_room,
    )


def _write(directory: Path, notes: Notes) -> None:
    """Replace it, whole or not at all, and durably."""
    path = directory / _FILE
    draft = path.with_name(f".{_FILE}.draft")  # one, as one process writes: it leaves no others
    try:
        draft.unlink(missing_ok=True)  # of a process that was killed, or a link
        with draft.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(notes)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        kind = StoreError.kind_of(error)
        todo = " Make room." if kind is Full else ""
        raise kind(f"{path} cannot be written: {error}. Nothing was changed.{todo}") from error
