"""A model that is kept in parts, put again as whole tensors.

They have the bytes, and so the digests, that one process would have put: what is whole is shared
with models from any mesh, parts only with those from the same one.

One tensor after another is put together, and never all of them: a model may be larger than the
memory here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from elastix.errors import Conflict, NotFound
from elastix.sharding import Part
from elastix.state import Manifest, Ref, State
from elastix.store.reader import Tensors
from elastix.store.shares import Share, Vanished
from elastix.store.whole_tensors import wholes

if TYPE_CHECKING:
    from elastix.store.store import Store

_AT_ONCE_BYTES = 64 << 20  # tensors that are put with one sync
_ATTEMPTS = 4


def consolidate(store: Store, name: str) -> Ref:
    """See Store.consolidate."""
    manifest = store.manifest(name)
    if not any(whole.split for whole in wholes(manifest).values()):
        return manifest.ref
    for attempt in range(_ATTEMPTS):
        try:
            ref = store.put_shares(
                _shares(store, manifest),
                meta=manifest.meta,
                parents=manifest.parents,
                signature=store.signature(manifest.ref),
                score=store.score(manifest.ref),
            )
        except Vanished:  # gc came in between
            if attempt + 1 == _ATTEMPTS:
                raise
            continue
        break
    for tag, meant in store.tags().items():
        if meant == manifest.ref:
            try:
                store.tag(tag, ref, expected=meant)
            except (Conflict, NotFound):  # somebody has moved it meanwhile
                continue
    return ref


def _shares(store: Store, manifest: Manifest) -> list[Share]:
    return [store.put_share(state) for state in _states(store, manifest)]


def _states(store: Store, manifest: Manifest) -> Iterator[State]:
    """All tensors, each whole, some at a time; those that share memory together."""
    tensors = cast(Tensors, store.get(manifest.ref, lazy=True).tensors)
    tied: dict[object, list[str]] = {}
    for name in tensors:
        tied.setdefault(tensors.tie(name), []).append(name)
    made, nbytes = {}, 0
    for names in tied.values():
        shape = tensors.shape(names[0])
        tensor = tensors.part(names[0], Part((0,) * len(shape), shape))
        made.update(dict.fromkeys(names, tensor))
        nbytes += tensor.nbytes
        if nbytes >= _AT_ONCE_BYTES:
            yield State(made)
            made, nbytes = {}, 0
    yield State(made)
