"""States out of and into the formats of others: safetensors files, Parquet tables.

Not here: the store's own files (packs.py, records.py).

Invariant: what `export` wrote comes back from `read` to the last bit, or `read` names what differs.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from elastix.errors import Corrupt, NotFound, StoreError
from elastix.lazy_import import later
from elastix.state import Ref, State, identity
from elastix.store.local_packs import sync_directory
from elastix.store.packs import storage_errors

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from elastix.store.log import Entry
else:
    pa, pq, torch = map(later, ("pyarrow", "pyarrow.parquet", "torch"))

_FORMAT = 1
_HEADER = "__metadata__"  # under which name a safetensors file has it beside the tensors


def export(state: State, path: Path) -> None:
    """Write `state` as one safetensors file, durable and visible under `path` all at once.

    Tied tensors are written once. Metadata, parents and digests stand in the file's header.

    Raises:
        StoreError: it cannot be written (Full: no room), or safetensors has no such dtype or name;
            then whatever was under `path` is still there.
    """
    from safetensors.torch import save_file  # imports torch

    if _HEADER in state.tensors:  # it would be written, and the file read by nobody
        raise StoreError(
            f"safetensors cannot hold this State: {_HEADER!r} is the name of its header, and of a "
            "tensor. Nothing was written."
        )

    manifest = state.manifest()
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    unique = {}
    for name, tensor in state.tensors.items():
        original = first.setdefault(identity(tensor), name)
        if original == name:
            unique[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().clone()
        else:
            tied[name] = original
    header = {
        "format": str(_FORMAT),
        "ref": manifest.ref,
        "manifest": manifest.to_json(),
        "tied": json.dumps(tied),
    }
    try:
        with _replaced(path) as draft:
            mode = draft.stat().st_mode  # save_file makes files that nobody else may read
            with _system_errors():
                save_file(unique, draft, metadata=header)
            draft.chmod(mode)
    except (SafetensorError, KeyError, ValueError) as error:
        raise StoreError(
            f"safetensors cannot hold this State: {error}. Nothing was written."
        ) from error


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Where to write what is then under `path`, durable and visible all at once.

    Raises:
        StoreError: it cannot be written (Full: no room); what was there before is there still.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")  # whatever the length of its name
    with storage_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.touch(exist_ok=False)  # new: nothing that others have put there is followed
            yield draft
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)


@contextmanager
def _system_errors() -> Iterator[None]:
    """What the system refuses as an OSError: safetensors has only its number, in a text."""
    try:
        yield
    except SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def read(path: Path) -> State:
    """A State from a safetensors file; a foreign one's text metadata become the State's.

    Raises:
        NotFound: no such file. StoreError: it cannot be read (ReadOnly: this user may not).
        Corrupt: it is no such file, of a newer format, or a digest differs (names the tensor).
    """
    with storage_errors(f"reading {path}"):
        if not path.is_file():
            raise NotFound(f"there is no file {path}. Nothing was read.")
        path.open("rb").close()  # safetensors says little of why it cannot
    try:
        with (
            storage_errors(f"reading {path}"),
            _system_errors(),
            safe_open(path, framework="pt") as file,
        ):
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise Corrupt(
            f"{path} cannot be read: {error}. Nothing was stored. Is it a safetensors file?"
        ) from error
    if not {"manifest", "ref"} & header.keys():
        return State(tensors, header)
    if header.get("format") != str(_FORMAT):
        raise Corrupt(
            f"{path} has format {header.get('format')}; this version reads {_FORMAT}. "
            "Read it with the version of elastix that wrote it."
        )
    try:
        return _exported(tensors, header, path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Corrupt(
            f"the header of {path} is damaged: {error!r}. Nothing was stored. Export it again."
        ) from error


def _exported(tensors: Mapping[str, torch.Tensor], header: Mapping[str, str], path: Path) -> State:
    """What `export` wrote, every digest compared."""
    body = json.loads(header["manifest"])
    tied = {name: tensors[other] for name, other in json.loads(header["tied"]).items()}
    written = {name: info[2] for name, info in body["tensors"].items()}
    present = {name: t for name, t in {**tensors, **tied}.items() if name in written}
    state = State(present, body["meta"], tuple(Ref(parent) for parent in body["parents"]))
    manifest = state.manifest()
    for name in sorted({*written, *tensors, *tied}):
        info = manifest.tensors.get(name)
        if info is None or info.digest != written.get(name):
            raise Corrupt(
                f"tensor {name!r} in {path} is not what was written; its digest differs. Nothing "
                "was stored. Export the model again."
            )
    if manifest.ref != header.get("ref"):
        raise Corrupt(
            f"the header of {path} is not what was written; its digest differs. Nothing was "
            "stored. Export the model again."
        )
    return state


def catalogue(entries: Sequence[Entry], path: Path) -> None:
    """One row a model; written as `export` does.

    Raises:
        StoreError: it cannot be written (Full: no room).
    """
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
    with _replaced(path) as draft:
        pq.write_table(table, draft)
