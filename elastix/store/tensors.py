"""Tensors into bytes and back, without a copy where torch allows it.

Invariants: bytes, dtype, shape and ties come back as they were; two tensors that were not tied
never share memory that is written to; nothing is handed out whose digest was not compared.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3

from elastix.errors import Corrupt, NotFound, StateError, StoreError
from elastix.state import State, TensorInfo, raw_bytes
from elastix.store.packs import Packs, View
from elastix.store.records import ALIGNMENT, DTYPES, Kind, Model, Place, parse_header


def plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` as JSON gives it back.

    Raises:
        StateError: it is not JSON, or a key is not text (its order, and so the ref, would change).
    """
    try:
        _check_keys(meta)
        return dict(json.loads(json.dumps(meta)))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"metadata must be JSON: {error}. Nothing was stored.") from error


def _check_keys(value: Any) -> None:  # noqa: ANN401 - any JSON
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}, not text")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def flatten(
    state: State,
) -> tuple[dict[str, memoryview], dict[str, TensorInfo], dict[str, str]]:
    """Bytes, manifest entry and tie of each tensor; tied ones are read once."""
    payloads: dict[str, memoryview] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.tensors.items():
        _check_tensor(name, tensor)
        where = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
        key = (*where, tensor.dtype, tuple(tensor.shape), tensor.stride())
        original = first.setdefault(key, name) if tensor.numel() else name
        if original == name:
            payloads[name] = raw_bytes(tensor.detach().resolve_conj().resolve_neg()).numpy().data
        else:
            tied[name] = original
    digests = {name: blake3(payload).hexdigest() for name, payload in payloads.items()}
    infos = {
        name: TensorInfo(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            digests[tied.get(name, name)],
        )
        for name, tensor in state.tensors.items()
    }
    payloads.update((name, payloads[original]) for name, original in tied.items())
    return payloads, infos, tied


def _check_tensor(name: Any, tensor: Any) -> None:  # noqa: ANN401 - whatever a caller put there
    if not isinstance(name, str):
        raise StateError(f"tensor name {name!r} is a {type(name).__name__}, not text.")
    what = None
    if not isinstance(tensor, torch.Tensor):
        what = f"a {type(tensor).__name__} of {getattr(tensor, 'dtype', 'no')} dtype"
    elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
    elif str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        what = f"a tensor of {tensor.dtype}"
    if what is not None:
        raise StateError(
            f"{name!r} is {what}; the store keeps dense tensors with values. Nothing was stored. "
            "Convert it or leave it out."
        )


class Moved(StoreError):
    """A pack was removed between the index's answer and its opening: ask again."""


class Tensors(Mapping[str, torch.Tensor]):
    """Tensors of one model, built when they are asked for. Holds a view of each pack."""

    def __init__(
        self,
        model: Model,
        names: Iterable[str],
        places: Mapping[str, Place],
        packs: Packs,
        checked: set[str],
    ) -> None:
        """Open every pack that is needed.

        Args:
            model: whose they are.
            names: the tensors wanted.
            places: of all its tensors.
            packs: where they are.
            checked: digests that need not be compared again; grows.

        Raises:
            Moved: a place or a pack is gone.
        """
        self._model = model
        self._infos = {name: model.manifest.tensors[name] for name in names}
        self._places = places
        self._checked = checked
        self._views: dict[str, View] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._given: set[Place] = set()
        for name in self._infos:
            place = places.get(name)
            if place is None:
                raise Moved(self._says(name, "no pack holds its bytes"))
            if place.pack not in self._views:
                try:
                    self._views[place.pack] = packs.view(place.pack)
                except NotFound as error:
                    raise Moved(self._says(name, str(error))) from error

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __getitem__(self, name: str) -> torch.Tensor:
        first = self._model.tied.get(name, name)
        made = self._made.get(first)
        if made is None:
            made = self._made[first] = self._make(name)
        return made

    def _make(self, name: str) -> torch.Tensor:
        info, place = self._infos[name], self._places[name]
        try:
            memory = self._memory(place, info.digest)
        except Corrupt as error:
            raise Corrupt(self._says(name, str(error))) from error
        dtype = getattr(torch, info.dtype)
        if math.prod(info.shape) * dtype.itemsize != place.length:
            raise Corrupt(self._says(name, f"{place.length} bytes are no {info.dtype}{info.shape}"))
        if place.length == 0:
            return torch.empty(info.shape, dtype=dtype)
        tensor = torch.frombuffer(memory, dtype=dtype).view(info.shape)
        if place in self._given:  # equal but not tied: writing to one must not change the other
            return tensor.clone()
        self._given.add(place)
        return tensor

    def _memory(self, place: Place, digest: str) -> memoryview:
        view = self._views[place.pack]
        memory = view.bytes_at(place.offset, place.length)
        if digest not in self._checked:
            at = place.offset - ALIGNMENT
            header = parse_header(bytes(view.bytes_at(at, ALIGNMENT)), place.pack, at)
            expected = (Kind.TENSOR, place.length, bytes.fromhex(digest))
            if (header.kind, header.length, header.digest) != expected:
                raise Corrupt(f"the record at byte {place.offset} of {place.pack} is another one.")
            if blake3(memory).hexdigest() != digest:
                raise Corrupt(f"the payload at byte {place.offset} of {place.pack} is damaged.")
            self._checked.add(digest)
        return memory

    def _says(self, name: str, what: str) -> str:
        return (
            f"tensor {name!r} of model {self._model.manifest.ref[:12]} cannot be read: "
            f"{what.rstrip('.')}. Nothing was changed; other tensors and models are readable."
        )
