"""What replicas have in common, and what they must not."""

import random

import numpy as np
import torch
from blake3 import blake3

from elastix.state import State, Stateful

_REPLICATED = ("optimizer", "scheduler", "scaler", "rate")


def digest(state: State) -> str:
    """Of models, optimizers, schedulers, scalers and the step: equal for equal replicas.

    Random numbers differ by design, and so may objects that the user's code feeds with losses.
    """
    names = ("@module", *(f"@{kind}" for kind in _REPLICATED))
    tensors = {
        name: tensor
        for name, tensor in state.tensors.items()
        if not name.startswith("@") or name.startswith(names)
    }
    meta = {name: v for name, v in state.meta.items() if name == "step" or name.startswith(names)}
    return State(tensors, meta).manifest().ref


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
