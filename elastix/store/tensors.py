"""What a State is made of into what packs hold: bytes, digests, ties, plain metadata.

Not here: bytes into tensors (reader.py). No byte is copied that torch shows as it stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from elastix.errors import StateError
from elastix.lazy_import import later
from elastix.sharding import is_sharded, named_part
from elastix.state import State, TensorInfo, dtype_name, identity, raw_bytes
from elastix.store.records import DTYPES, check_nesting

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

_THREADED_BYTES = 32 << 20  # for less, threads cost more than they gain
_THREADS = min(4, os.cpu_count() or 1)


def plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` as JSON gives it back.

    Raises:
        StateError: it is not JSON, or a key is not text (its order, and so the ref, would change).
    """
    try:
        check_nesting(meta)
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
    """Bytes, manifest entry and tie of each tensor by its stored name; tied ones are read once."""
    for name, tensor in state.tensors.items():
        _check_tensor(name, tensor)
    stored = state.stored
    payloads: dict[str, memoryview] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in stored.items():
        original = first.setdefault(identity(tensor), name) if tensor.numel() else name
        if original == name:
            payloads[name] = raw_bytes(tensor).numpy().data
        else:
            tied[name] = original
    digests = _digests(payloads)
    infos = {
        name: TensorInfo(
            dtype_name(tensor),
            tuple(tensor.shape),
            digests[tied.get(name, name)],
        )
        for name, tensor in stored.items()
    }
    payloads.update((name, payloads[original]) for name, original in tied.items())
    return payloads, infos, tied


def _digests(payloads: Mapping[str, memoryview]) -> dict[str, str]:
    if sum(map(len, payloads.values())) < _THREADED_BYTES:
        return {name: blake3(payload).hexdigest() for name, payload in payloads.items()}
    # Threads of our own that end here, and not BLAKE3's, which a forked child would wait for.
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda payload: blake3(payload).hexdigest(), payloads.values())
        return dict(zip(payloads, found, strict=True))


def _check_tensor(name: Any, tensor: Any) -> None:  # noqa: ANN401 - whatever a caller put there
    if not isinstance(name, str):
        raise StateError(f"tensor name {name!r} is a {type(name).__name__}, not text.")
    if named_part(name) is not None:
        raise StateError(
            f"tensor name {name!r} reads as if it were a part of another tensor. Nothing was "
            "stored. Give it a name that does not end in numbers in brackets."
        )
    what = None
    if not isinstance(tensor, torch.Tensor):
        what = f"a {type(tensor).__name__} of {getattr(tensor, 'dtype', 'no')} dtype"
    elif is_sharded(tensor):
        what = "a DTensor, of which this process holds a part"
    elif torch.nn.parameter.is_lazy(tensor):
        what = "a parameter without a shape yet"
    elif _has_no_bytes(tensor):
        what = f"a {type(tensor).__name__}"
    elif tensor.is_nested:
        what = "a nested tensor"
    elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
    elif dtype_name(tensor) not in DTYPES:
        what = f"a tensor of {tensor.dtype}"
    if what is not None:
        raise StateError(
            f"{name!r} is {what}; the store keeps dense tensors with values. Nothing was stored. "
            "Convert it or leave it out."
        )


def _has_no_bytes(tensor: torch.Tensor) -> bool:
    """Whether it only looks like a tensor: it is traced, or made up of others."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    made_up: bool = is_traceable_wrapper_subclass(tensor)
    if made_up or isinstance(tensor, FakeTensor):
        return True
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data_ptr() == 0
