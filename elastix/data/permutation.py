"""An order of millions of samples that is computed where it is needed. Pure.

A permutation that is drawn as a whole takes a second and 80 MB for ten million samples, on each
worker, before the first batch; here a sample's place gives its index at once. It is a Feistel
network over just enough bits, walked on while it leaves the range, which keeps it one to one.

Source: J. Black, P. Rogaway, Ciphers with arbitrary finite domains (2002): cycle walking.
"""

import numpy as np
import numpy.typing as npt

FROM = 1 << 20
"""Datasets of so many samples are scattered; smaller ones are drawn as a whole."""

_ROUNDS = 8  # an even number, so that both halves come to lie where they were
Words = npt.NDArray[np.uint64]


def scattered(
    seed: int, epoch: int, length: int, places: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Indices at these places of an epoch's order: a permutation of range(length).

    A pure function of its arguments: the same on every machine and with every version.
    """
    bits = max(2, (length - 1).bit_length())
    drawn = np.random.SeedSequence([seed, epoch, 2]).generate_state(_ROUNDS, np.uint64)
    keys = drawn.astype(np.uint64)
    found = _through(places.astype(np.uint64), bits, keys)
    beyond = np.flatnonzero(found >= length)
    while len(beyond):
        found[beyond] = again = _through(found[beyond], bits, keys)
        beyond = beyond[again >= length]
    return found.astype(np.int64)


def _through(values: Words, bits: int, keys: Words) -> Words:
    """A permutation of all numbers of so many bits."""
    low = bits // 2
    sizes = (bits - low, low)
    left, right = values >> np.uint64(low), values & _mask(low)
    for number, key in enumerate(keys):
        left, right = right, left ^ (_mixed(right + key) & _mask(sizes[number % 2]))
    return left << np.uint64(low) | right


def _mixed(values: Words) -> Words:
    """SplitMix64's: each bit depends on all."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
