"""What a person writes down about a run: a note and tags, in `notes.json` beside its journal."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastix.errors import Corrupt, StoreError

_FILE = "notes.json"


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
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"{path} is no note: {error!r}. Remove it, or write the note anew."
        ) from error


def write(directory: Path, notes: Notes) -> None:
    """Replace it, whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    path = directory / _FILE
    beside = path.with_name(f".{_FILE}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(asdict(notes)), "utf-8")
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}. Nothing was changed.") from error
    finally:
        beside.unlink(missing_ok=True)
