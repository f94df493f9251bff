"""A dataset whose samples can be checked by their number, and the memory that they share."""

import random
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from elastix.data.shared import arena as arenas
from elastix.data.shared.arena import Arena


class Pictures(Dataset):
    """Sample i is made of i alone; notes each time that one is made."""

    def __init__(self, length: int = 40, size: int = 900, vary: int = 0, notes: str = ""):
        self.length, self.size, self.vary, self.notes = length, size, vary, notes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        if self.notes:
            with Path(self.notes).open("ab", 0) as file:
                file.write(b"%d\n" % index)
        size = self.size + (index * 7919) % (self.vary + 1)
        raw = random.Random(index).randbytes(size)
        return {"raw": raw, "array": np.frombuffer(raw, np.uint8).copy(), "n": index}


def same(sample, index: int, data: Pictures) -> bool:
    """Whether it is sample `index` to the last byte."""
    expected = Pictures(data.length, data.size, data.vary)[index]
    whole = np.array_equal(sample["array"], expected["array"])
    return whole and (sample["raw"], sample["n"]) == (expected["raw"], index)


def check(arena: Arena) -> None:
    """Every block is free or of one sample."""
    if arena._words[arenas._DIRTY]:
        arena._repair()
    blocks = arena._free[: arena._words[arenas._FREE]].tolist()
    for index in np.flatnonzero(arena.where).tolist():
        block = (int(arena.where[index]) & arenas._LOW) - 1
        for _ in range(arena.layout.blocks_for(arena.nbytes(index))):
            blocks.append(block)
            block = int(arena._next[block]) - 1
        assert block == -1, f"sample {index} has more blocks than bytes"
    assert sorted(blocks) == list(range(arena._words[arenas._GROWN]))
