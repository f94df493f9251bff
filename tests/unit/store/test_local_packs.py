"""Writing to packs, call by call."""

import os
import random
import shutil

import pytest
import torch

from elastix.errors import StoreError
from elastix.state import State
from elastix.store import Store, local_packs
from elastix.store.shares import Vanished
from elastix.testing.store_contract import same, small


def remove_all(path):
    shutil.rmtree(path)


def remove_packs(path):
    for pack in (path / "packs").iterdir():
        pack.unlink()


def move_away(path):
    path.rename(path.with_name("elsewhere"))


def put_another_in_its_place(path):
    move_away(path)
    with Store(path) as other:
        other.put(small(7))


@pytest.mark.parametrize(
    "damage",
    [remove_all, remove_packs, move_away, put_another_in_its_place],
    ids=lambda f: f.__name__,
)
def test_nothing_is_stored_where_nobody_would_find_it(tmp_path, damage):
    path = tmp_path / "store"
    store = Store(path)
    store.put(small(1))
    damage(path)
    for _ in range(2):  # nor afterwards: other packs may be gone, too
        with pytest.raises(StoreError, match="was removed or moved away"):
            store.put(small(2))
        with pytest.raises(StoreError, match="was removed or moved away"):
            store.put_share(small(3))
    store.close()
    with Store(path) as again:
        ref = again.put(small(2))
    with Store(path, read_only=True) as again:
        assert same(again.get(ref), small(2))


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


def test_what_stood_in_a_pack_that_somebody_removed_is_written_again(tmp_path):
    shared = small(1).tensors
    with Store(tmp_path) as other:
        other.put(State({**shared, "head": torch.zeros(1)}))
    (pack,) = (tmp_path / "packs").iterdir()
    with Store(tmp_path) as store:
        pack.unlink()
        ref = store.put(State({**shared, "head": torch.ones(1)}))
        assert all(torch.equal(store.get(ref).tensors[name], shared[name]) for name in shared)


def test_a_share_in_a_pack_that_somebody_removed_makes_no_model(tmp_path):
    with Store(tmp_path) as worker, Store(tmp_path) as store:
        share = worker.put_share(small(1))
        (pack,) = (tmp_path / "packs").iterdir()
        pack.unlink()
        with pytest.raises(Vanished):
            store.put_shares([share])
