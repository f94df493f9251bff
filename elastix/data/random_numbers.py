"""Random numbers that are a function of a place in a run, and of nothing that came before it.

Whoever comes to the place sets the generators of Python, NumPy and torch by it. So what code
draws there is the same on any worker, in any process that loads, after any loss, and in a replay.
"""

import random

import numpy as np
import torch
from blake3 import blake3


def seed_at(seed: int, *place: int | str) -> int:
    """The seed of one place: 63 bits that look random for any two that differ."""
    return int.from_bytes(blake3(repr((seed, *place)).encode()).digest(8)) >> 1


def come_to(seed: int, *place: int | str) -> None:
    """From here on random numbers are those of this place of a run with that seed."""
    seed_generators(seed_at(seed, *place))


def seed_generators(value: int) -> None:
    """Set the generators of Python, NumPy and torch, that of each device included."""
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:  # it looks for every kind of device and takes a millisecond
        torch.default_generator.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)
