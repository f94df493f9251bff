"""Files beside a journal that run when they are read: the train function, as it was pickled.

Ray keeps large arguments of an actor with the process that gave them, so that a controller could
not be started again when its driver is gone. It reads the train function from here.
"""

import os
import secrets
from pathlib import Path

from blake3 import blake3

from elastix.errors import StoreError

TRAIN = "train.pkl"


def digest(pickled: bytes) -> str:
    """By which `read_code` tells that a file is the one that was written."""
    return blake3(pickled).hexdigest()


def keep_code(path: Path, pickled: bytes) -> None:
    """Write what runs when it is read, all at once and for nobody else to read or change.

    Raises:
        Full, StoreError: it cannot be written; what was there is as it was.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(pickled)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        kind = StoreError.kind_of(error)
        raise kind(
            f"{path} cannot be written: {error}. Nothing was started. Make room, or choose another "
            "store."
        ) from error


def read_code(path: Path, wanted: str) -> bytes:
    """What `keep_code` wrote.

    Args:
        path: of the file.
        wanted: its digest.

    Raises:
        StoreError: it cannot be read, or is another one. Nothing of it was run.
    """
    try:
        found = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"the train function cannot be read from {path}: {error}. Nothing was started. The "
            "store must be a directory that all nodes reach; fit() writes the file again."
        ) from error
    if digest(found) != wanted:
        raise StoreError(
            f"{path} is not what fit() has written there. Nothing of it was run. Call fit() again, "
            "and leave the folder of a run alone while it trains."
        )
    return found
