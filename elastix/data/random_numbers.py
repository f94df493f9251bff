"""Random numbers that are a function of a place in a run, and of nothing that came before it.

Whoever comes to the place sets the generators of Python, NumPy and torch by it. So what code
draws there is the same on any worker, in any process that loads, after any loss, and in a replay.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from blake3 import blake3


def seed_at(seed: int, *place: int | str) -> int:
    """The seed of one place: 63 bits that look random for any two that differ."""
    return int.from_bytes(blake3(repr((seed, *place)).encode()).digest(8)) >> 1


def come_to(seed: int, *place: int | str) -> None:
    """From here on random numbers are those of this place of a run with that seed."""
    seed_generators(seed_at(seed, *place))


@contextmanager
def elsewhere(seed: int, *place: int | str) -> Iterator[None]:
    """Within: the random numbers of that place. After it they go on as if nothing had been."""
    generators = RandomState()
    before = generators.state_dict()
    come_to(seed, *place)
    try:
        yield
    finally:
        generators.load_state_dict(before)


def seed_generators(value: int) -> None:
    """Set the generators of Python, NumPy and torch, that of each device included."""
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:  # it looks for every kind of device and takes a millisecond
        torch.default_generator.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


def generators_digest() -> int:
    """Of what those generators would give next; 62 bits."""
    found = blake3(torch.get_rng_state().numpy().data)
    if torch.cuda.is_initialized():
        found.update(torch.cuda.get_rng_state().numpy().data)
    _, keys, place, *rest = np.random.get_state()
    found.update(np.ascontiguousarray(keys).tobytes())
    found.update(repr((place, rest, random.getstate())).encode())
    return int.from_bytes(found.digest(8)) >> 2


class RandomState:
    """The generators of Python, NumPy and torch (CPU and every CUDA device) as one Stateful."""

    def state_dict(self) -> dict[str, Any]:
        """Every generator's state."""
        kind, keys, *rest = np.random.get_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "python": random.getstate(),
            "numpy": [kind, np.asarray(keys).astype(np.int64), *rest],
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator that exists here; devices that the State lacks keep theirs."""
        random.setstate(state_dict["python"])
        kind, keys, *rest = state_dict["numpy"]
        np.random.set_state((kind, keys.astype(np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"].cpu())
        if torch.cuda.is_available():
            for device, rng in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(rng.cpu(), device)
