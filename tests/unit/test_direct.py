"""What is large goes past the page cache, and is what it was all the same."""

import errno
import os
from random import Random

import pytest
import torch

from elastix.errors import Full
from elastix.state import State
from elastix.store import Store, direct

LARGE = 3 << 20


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def written(monkeypatch):
    """How many bytes each direct write wrote."""
    counts = []
    write = direct.Direct.write

    def counting(self, parts, offset):
        counts.append(write(self, parts, offset))
        return counts[-1]

    monkeypatch.setattr(direct.Direct, "write", counting)
    return counts


def noise(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def put(store, tensors):
    return store.put_shares([store.put_share(State(tensors))])


def equal(store, ref, tensors):
    found = store.get(ref).tensors
    return all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_past_the_cache_is_read_back(store, seed):
    """Sizes that leave ends in every place, small shares between large ones."""
    choose = Random(seed)
    kept = {}
    for number in range(6):
        sizes = [
            choose.choice([1, 63, 64, 4031, 4096, 70_001, LARGE - 64, LARGE + choose.randrange(99)])
            for _ in range(choose.randrange(1, 6))
        ]
        tensors = {f"t{i}": noise(size, 100 * number + i) for i, size in enumerate(sizes)}
        kept[put(store, tensors)] = tensors
    store.put(State({"small": noise(100, 7)}))  # through the cache, in the same pack
    for ref, tensors in kept.items():
        assert equal(store, ref, tensors)
    assert store.verify() == []
    store.rebuild()
    assert all(equal(store, ref, tensors) for ref, tensors in kept.items())


def test_only_what_is_large_goes_that_way(store, written, tmp_path):
    probe = tmp_path / "probe"
    probe.touch()
    if direct.Direct.open(probe) is None:
        pytest.skip("this file system has no O_DIRECT")
    put(store, {"small": noise(1000, 0)})
    store.put(State({"small": noise(1000, 1)}))
    assert written == []
    put(store, {"large": noise(LARGE, 2)})
    store.put(State({"large": noise(LARGE, 3), "more": noise(LARGE, 4)}))
    for count, size in zip(written, (LARGE, 2 * LARGE), strict=True):
        assert size - 2 * direct.BLOCK_BYTES < count <= size + 2048


def test_a_file_system_that_cannot_is_written_to_as_usual(store, monkeypatch):
    monkeypatch.setattr(direct.os, "O_DIRECT", 0)
    tensors = {"large": noise(LARGE, 0)}
    assert equal(store, put(store, tensors), tensors)


def test_a_file_system_that_refuses_in_the_middle_is_written_to_as_usual(store, monkeypatch):
    monkeypatch.setattr(direct, "_BUFFER_BYTES", 1 << 20)
    calls = []
    write = os.pwrite

    def refusing(handle, data, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(handle, data, offset)

    monkeypatch.setattr(direct.os, "pwrite", refusing)
    tensors = {"large": noise(LARGE, 0)}
    assert equal(store, put(store, tensors), tensors)


def test_a_full_disk_is_named_and_nothing_is_lost(store, monkeypatch, written):
    first = {"large": noise(LARGE, 0)}
    ref = put(store, first)
    if not written:
        pytest.skip("this file system has no O_DIRECT")

    def full(handle, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "pwrite", full)
        with pytest.raises(Full, match="No space left"):
            store.put_share(State({"large": noise(LARGE, 1)}))
    second = {"large": noise(LARGE, 2)}
    assert equal(store, put(store, second), second)
    assert equal(store, ref, first)
    assert store.verify() == []
