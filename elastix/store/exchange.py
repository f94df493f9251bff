"""States out of and into the formats of others: safetensors files, Parquet tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from elastix.errors import Corrupt, NotFound, StoreError
from elastix.state import State, load, save
from elastix.store.packs import storage_errors

if TYPE_CHECKING:
    from elastix.store.store import Entry


def export(state: State, path: Path) -> None:
    """Write `state` as one safetensors file, visible all at once.

    Raises:
        StoreError: it cannot be written, or safetensors has no such dtype.
    """
    try:
        with storage_errors(f"writing {path}"):
            save(state, path)
    except (SafetensorError, KeyError, ValueError) as error:
        raise StoreError(
            f"safetensors cannot hold this State: {error}. Nothing was written."
        ) from error


def read(path: Path) -> State:
    """A State from a safetensors file; a foreign one's text metadata become the State's.

    Raises:
        NotFound: no such file. Corrupt: it cannot be read, or a digest differs.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if "manifest" not in header:
                return State({name: file.get_tensor(name) for name in file.keys()}, header)  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error}.") from error
    try:
        return load(path)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path} has a header that elastix did not write: {error!r}.") from error


def catalogue(entries: Sequence["Entry"], path: Path) -> None:
    """One row a model."""
    table = pa.table(
        {
            "ref": pa.array([e.ref for e in entries], pa.string()),
            "parents": pa.array([list(e.parents) for e in entries], pa.list_(pa.string())),
            "tags": pa.array([list(e.tags) for e in entries], pa.list_(pa.string())),
            "score": pa.array([e.score for e in entries], pa.float64()),
            "time_s": pa.array([e.time_s for e in entries], pa.float64()),
            "tensors": pa.array([e.tensors for e in entries], pa.int64()),
            "nbytes": pa.array([e.nbytes for e in entries], pa.int64()),
            "meta": pa.array([json.dumps(dict(e.meta)) for e in entries], pa.string()),
        }
    )
    with storage_errors(f"writing {path}"):
        pq.write_table(table, path)
