"""A model from the store straight to the device, beside torch.load and safetensors.

Files lie in memory (see the package), so what is measured is the way to the GPU. `store_first` is a
Store that was opened just now: it compares every tensor's digest, which none of the others does.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Terms, wait_for
from elastix.state import Ref, State
from elastix.store import Store

_TENSORS = 96
_LEAST, _MOST = 3, 10

Tensors = dict[str, torch.Tensor]
Read = Callable[[], Tensors]


def _from_store(store: Store, ref: Ref, device: torch.device) -> Tensors:
    return {name: tensor.to(device) for name, tensor in store.get(ref).tensors.items()}


def _first(root: Path, ref: Ref, device: torch.device) -> Tensors:
    with Store(root, read_only=True) as store:
        return _from_store(store, ref, device)


def _torch(path: Path, device: torch.device) -> Tensors:
    found: Tensors = torch.load(path, map_location=device, mmap=True, weights_only=True)
    return found


def _safetensors(path: Path, device: torch.device) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path, device=str(device))


def _copied(tensors: Tensors, device: torch.device) -> Tensors:
    """With no file: the limit."""
    found = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    if device.type == "cpu":
        found = {name: tensor.clone() for name, tensor in tensors.items()}
    return found


def rates(reads: dict[str, Read], nbytes: int, terms: Terms) -> dict[str, dict[str, float]]:
    """GB/s of each, taking turns."""
    took: dict[str, list[float]] = {name: [] for name in reads}
    names, number = list(reads), 0
    deadline = time.perf_counter() + terms.seconds
    while number <= _LEAST or (number <= _MOST and time.perf_counter() < deadline):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            wait_for(terms.device)
            started = time.perf_counter()
            tensors = reads[name]()
            wait_for(terms.device)
            took[name].append(time.perf_counter() - started)
            del tensors
        number += 1
    found = {}
    for name, seconds in took.items():
        counted = [nbytes / one / 1e9 for one in seconds[1:]]
        found[name] = {
            "gb_per_s": statistics.median(counted),
            "min": min(counted),
            "max": max(counted),
        }
    return found


def measure(terms: Terms) -> dict[str, Any]:
    """See the package."""
    from safetensors.torch import save_file

    gpu, device = terms.device.type == "cuda", terms.device
    elements = (10_000 if terms.tiny else 2_000_000_000 // 2) // _TENSORS
    torch.manual_seed(0)
    made = torch.randn(_TENSORS, elements, device=device).to(torch.bfloat16).cpu()
    tensors = {f"t{number}": made[number].clone() for number in range(_TENSORS)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    root, plain, safe = (terms.folder / name for name in ("store", "model.pt", "model.safetensors"))
    with Store(root) as writer:
        ref = writer.put(State(tensors))
    torch.save(tensors, plain)
    save_file(tensors, safe)
    reads: dict[str, Read] = {
        "store_first": partial(_first, root, ref, device),
        "torch_load_mmap": partial(_torch, plain, device),
        "safetensors": partial(_safetensors, safe, device),
        "ordinary_memory": partial(_copied, tensors, device),
    }
    if gpu:
        pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        reads["pinned_memory"] = partial(_copied, pinned, device)
    with Store(root, read_only=True) as store:
        reads["store"] = partial(_from_store, store, ref, device)
        for name, read in reads.items():
            got = read()
            if not all(torch.equal(got[key].cpu(), tensors[key]) for key in tensors):
                raise AssertionError(f"{name} has read something else")
            del got
        return {"bytes": nbytes, **rates(reads, nbytes, terms)}
