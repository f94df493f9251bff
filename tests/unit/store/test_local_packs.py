"""Writing to packs, call by call."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from pyarrow.fs import LocalFileSystem

from elastix.errors import StoreError
from elastix.state import State
from elastix.store import Store, local_packs
from elastix.store.packs import LAST_NUMBER, NAME
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


def packs_of(path):
    return {*(path / "packs").iterdir()}


def test_a_manifest_in_a_pack_that_somebody_removed_is_written_again(tmp_path):
    state = State(small(1).tensors, {"more": 1})
    with Store(tmp_path) as other:
        other.put(small(1))  # so that the next pack has a manifest alone
        known = packs_of(tmp_path)
    with Store(tmp_path) as other:
        ref = other.put(state)
    (pack,) = packs_of(tmp_path) - known
    with Store(tmp_path) as store:
        share = store.put_share(state)
        pack.unlink()
        assert store.put(state) == ref
        assert same(store.get(ref), state)
        (pack,) = packs_of(tmp_path) - known
        known |= {pack}
    with Store(tmp_path) as store:
        pack.unlink()
        assert store.put_shares([share], meta=state.meta) == ref
        assert same(store.get(ref), state)
    with Store(tmp_path, read_only=True) as store:
        assert same(store.get(ref), state)


def test_a_pack_that_cannot_be_looked_for_is_an_error_of_the_store(tmp_path, monkeypatch):
    """As of a file system that is mounted and does not answer."""
    real = os.stat

    def stale(path, *args, **options):
        if isinstance(path, str | os.PathLike) and os.fspath(path) == str(pack):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *args, **options)

    with Store(tmp_path) as other:
        other.put(small(1))
    (pack,) = packs_of(tmp_path)
    with Store(tmp_path) as store:
        monkeypatch.setattr(os, "stat", stale)
        with pytest.raises(StoreError, match="Stale"):
            store.put(State({**small(1).tensors, "head": torch.ones(1)}))
        monkeypatch.undo()
        ref = store.put(small(2))
        assert same(store.get(ref), small(2))


def test_a_store_is_opened_while_another_process_spends_the_reserve(tmp_path, monkeypatch):
    real = Path.stat

    def spent_just_then(path, **options):
        found = real(path, **options)
        if path.name == "reserve" and not options:  # which `lstat` gives
            path.unlink()
        return found

    Store(tmp_path).close()
    monkeypatch.setattr(Path, "stat", spent_just_then)
    with Store(tmp_path) as store:
        assert same(store.get(store.put(small(1))), small(1))


@pytest.mark.parametrize("far", [False, True], ids=["local", "remote"])
def test_a_writer_that_has_run_out_of_numbers_goes_on_under_another_name(tmp_path, far):
    """The name of the next pack would be none: nobody would look into it."""
    given = {"filesystem": LocalFileSystem(), "index": tmp_path / "index"} if far else {}
    root = str(tmp_path / "store")
    with Store(root, **given) as store:
        refs = [store.put(small(1))]
        store._writer.seal()
        store._writer._number = LAST_NUMBER - 1
        for seed in (2, 3):
            refs.append(store.put(small(seed)))
            store._writer.seal()
        assert all(same(store.get(ref), small(seed)) for seed, ref in enumerate(refs, 1))
        assert len({NAME.fullmatch(pack.name)[1] for pack in packs_of(tmp_path / "store")}) == 2
    with Store(root, read_only=True, **given) as store:
        assert all(same(store.get(ref), small(seed)) for seed, ref in enumerate(refs, 1))
        assert store.verify() == []
