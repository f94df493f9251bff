"""What replicas have in common, and what they must not."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from elastix.state import State, Stateful

_OWN = "rng"
"""Each worker has random numbers of its own, or all would draw the same dropout masks."""


def digests(state: State) -> dict[str, str]:
    """Of each part of a State that replicas have in common, by its name: equal for equal replicas.

    Parts are "model" (parameters, buffers), the optimizers, schedulers, scalers, further modules,
    loaders (their cursors), whatever else was prepared or tracked, and the step. Left out is what
    `_OWN` names, and what a worker counts for its own bookkeeping (reports, events sent).
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    meta: dict[str, dict[str, Any]] = {}
    for name, tensor in state.tensors.items():
        tensors.setdefault(_part(name), {})[name] = tensor
    for name, value in state.meta.items():
        if name.startswith("@") or name == "step":
            meta.setdefault(_part(name), {})[name] = value
    return {
        part: State(tensors.get(part, {}), meta.get(part, {})).manifest().ref
        for part in sorted(tensors.keys() | meta.keys())
        if part != _OWN
    }


def digest(state: State) -> str:
    """One for all parts."""
    return whole(digests(state))


def whole(parts: Mapping[str, str]) -> str:
    """The digest of a State from those of its parts."""
    return blake3(json.dumps(sorted(parts.items())).encode()).hexdigest()


def _part(name: str) -> str:
    """Of which part of a State an entry is, by its name there."""
    if name == "step":
        return name
    return name[1:].split("/")[0] if name.startswith("@") else "model"


def kind_of(other: Stateful) -> str:
    """Under which name an object goes into the State."""
    if isinstance(other, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(other, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    return "scaler" if isinstance(other, torch.amp.GradScaler) else type(other).__name__.lower()


def seed(value: int) -> None:
    """Equal random numbers on all workers, so that they build equal models."""
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:  # it looks for every kind of device and takes a millisecond
        torch.default_generator.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


def diverge(worker: int) -> None:
    """Give this worker random numbers of its own: equal dropout masks on all would be a waste."""
    material = torch.get_rng_state().numpy().tobytes() + str(worker).encode()
    own = int.from_bytes(blake3(material).digest(8)) >> 1
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)
