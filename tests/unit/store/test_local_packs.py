"""Writing to packs, call by call."""

import os
import random

import pytest

from elastix.store import local_packs


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_written_in_calls_of_limited_size(tmp_path, monkeypatch, seed):
    """The kernel may take less than it is given, wherever it likes."""
    choose = random.Random(seed)
    write = os.pwritev
    sizes = []

    def stingy(handle, parts, offset):
        given = b"".join(parts)
        sizes.append(len(given))
        return write(handle, [given[: choose.randint(1, len(given))]], offset)

    monkeypatch.setattr(local_packs, "_CALL_BYTES", 1000)
    monkeypatch.setattr(local_packs.os, "pwritev", stingy)
    parts = [choose.randbytes(choose.choice([0, 1, 64, 999, 1000, 2500])) for _ in range(20)]
    path = tmp_path / "pack"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    local_packs._write_all(handle, parts, 7)
    os.close(handle)
    assert path.read_bytes() == bytes(7) + b"".join(parts)
    assert max(sizes) <= 1000
