"""A collection beside writers: what comes to be needed while it looks stays known."""

import pytest
import torch
from blake3 import blake3
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from elastix.state import State
from elastix.store import Store, gc
from elastix.store.local_packs import LocalPacks
from elastix.store.records import Header, Kind


def small(number):
    return State({"w": torch.full((50,), float(number))})


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as store:
        yield store


def gone(path, number, parents=()):
    """A model in a pack of its own, which the next collection removes."""
    with Store(path) as other:
        return other.put(small(number), parents=parents)


def meanwhile(monkeypatch, act):
    """Have `act` done where a collection has seen which models have no record any more."""
    recorded = gc._recorded

    def look(packs):
        there = recorded(packs)
        act()
        return there

    monkeypatch.setattr(gc, "_recorded", look)


def test_a_retired_model_that_is_put_again_keeps_its_parents(tmp_path, store, monkeypatch):
    parent = store.put(small(0))
    ref = gone(tmp_path / "store", 1, [parent])
    store.retire(ref)
    again = []
    meanwhile(monkeypatch, lambda: again.append(store.put(small(1), parents=[parent])))
    store.gc()
    assert again == [ref]
    assert store.ancestors(ref) == [parent]


def test_a_retired_model_of_which_a_child_comes_stays_in_its_lineage(tmp_path, store, monkeypatch):
    first = store.put(small(0))
    ref = gone(tmp_path / "store", 1, [first])
    store.retire(ref)
    children = []
    meanwhile(monkeypatch, lambda: children.append(store.put(small(2), parents=[ref])))
    store.gc()
    assert store.ancestors(children[0]) == [ref, first]


def opened(folder, index, far, **options):
    if not far:
        return Store(folder / "store", **options)
    remote = SubTreeFileSystem(str(folder), LocalFileSystem())
    return Store("store", filesystem=remote, index=folder / index, **options)


def left_behind(folder):
    """What a writer that was killed had not committed: who may not write reads a copy then."""
    writer, payload = LocalPacks(folder / "store").writer(), b"lost"
    writer.append(Header(Kind.TENSOR, len(payload), blake3(payload).digest()), payload)
    writer.close()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_a_reader_of_a_copy_of_the_index_follows_what_a_collection_moves(tmp_path, far, known):
    shared = torch.rand(100)
    with opened(tmp_path, "one", far) as store:
        gone = store.put(State({"w": shared, "large": torch.rand(10_000)}))
        kept = store.put(State({"w": shared, "n": torch.ones(3)}))
    if not far:
        left_behind(tmp_path)
    with opened(tmp_path, "two", far, read_only=True) as reader:
        assert reader.ledger._copied
        if known:
            reader.manifest(kept)
        with opened(tmp_path, "one", far) as store:
            store.retire(gone)
            assert store.gc().removed
        assert torch.equal(reader.get(kept).tensors["w"], shared)


def test_a_reader_sees_what_is_stored_after_the_index_was_made_anew(tmp_path):
    with Store(tmp_path / "store") as store:
        store.put(small(0))
    with Store(tmp_path / "store", read_only=True) as reader:
        assert len(reader.log()) == 1
        with Store(tmp_path / "store") as store:
            store.rebuild()
            store.tag("new", store.put(small(1)))
        assert torch.equal(reader.get("new").tensors["w"], small(1).tensors["w"])
        assert len(reader.log()) == 2


def test_a_file_that_is_no_pack_is_left_alone_in_a_far_store_too(tmp_path):
    with opened(tmp_path, "one", far=True) as store:
        store.put(small(0))
        (tmp_path / "store" / "packs" / "notes.pack").touch()
        assert len(store.log()) == 1
        store.gc()
        assert store.verify() == []
