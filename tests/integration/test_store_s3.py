"""A store on S3, over the real protocol: pyarrow's client against a server of the tests' own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastix.errors import Conflict, Corrupt, StoreError
from elastix.state import State
from elastix.store import Store
from elastix.testing.store_contract import child, same, small
from tests.s3 import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with Server() as server:
        yield server


@pytest.fixture
def opened(server: Server, tmp_path: Path):
    """Opens the store `bucket/store`, with an index of that name."""

    def opened(index: str, **options) -> Store:
        return Store("bucket/store", filesystem=server.client(), index=tmp_path / index, **options)

    return opened


def test_what_is_put_comes_back(server: Server, opened) -> None:
    parent, big = small(1), State({"w": torch.rand(3 << 20)})  # of several parts
    with opened("a") as store:
        ref = store.put(parent)
        second = store.put(child(parent, ref, "layer0.weight", {"n": 2}))
        large = store.put(big)
        store.tag("best", second)
        store.retire(ref)
        assert store.gc().removed
        assert same(store.get(large), big)
        assert store.verify() == []
        server.failing = {"PUT", "POST"}
        with pytest.raises(StoreError, match=r"InternalError|INTERNAL_FAILURE"):
            store.put(small(3))
        server.failing = set()
        store.put(small(3))
        log = store.log()
    assert server.uploads == {}
    with opened("b") as store:
        assert store.log() == log
        assert store.ancestors("best") == [ref]
        assert store.verify() == []


def test_a_new_machine_reads_the_ends_of_packs_alone(server: Server, opened) -> None:
    with opened("a") as store:
        refs = [store.put(State({"w": torch.rand(1 << 19)}, {"n": n})) for n in range(4)]
        store.tag("best", refs[2])
    total = sum(map(len, server.buckets["bucket"].values()))
    assert total > 8 << 20
    server.bytes_read = 0
    server.requests.clear()
    with opened("b", read_only=True) as store:
        assert [entry.meta["n"] for entry in store.log()] == [3, 2, 1, 0]
        assert store.tags() == {"best": refs[2]}
    assert server.bytes_read < total / 10
    assert server.requests.total() < 30


def test_readers_see_what_others_put(opened) -> None:
    with opened("b") as store:
        first = store.put(small(1))
    with opened("a") as writer, opened("b", read_only=True) as reader:
        second = writer.put(small(2))
        writer.tag("best", second)
        assert same(reader.get("best"), small(2))
        third = writer.put(small(3))
        assert same(reader.get(third), small(3))
        assert reader.tags() == {"best": second}
        assert {entry.ref for entry in reader.log()} == {first, second, third}
        writer.retire(first)
        writer.gc()
    with opened("b", read_only=True) as reader:
        assert {entry.ref for entry in reader.log()} == {second, third}


def test_of_two_owners_none_collects_what_the_other_acknowledged(opened) -> None:
    cluster = opened("a")
    state = small(1)
    first = cluster.put(state)
    laptop = opened("b")
    heir = child(state, first, "layer0.weight", {"n": 2})
    second = cluster.put(heir)  # shares tensors with the first
    laptop.retire(first)
    for owner in (laptop, cluster):
        with pytest.raises(Conflict, match="another owner uses this store"):
            owner.gc()
    assert same(cluster.get(second), heir)
    cluster.close()
    laptop.gc()  # alone now, it reads what the other put
    assert same(laptop.get(second), heir)
    laptop.close()
    with opened("c") as store:
        assert [entry.ref for entry in store.log()] == [second]
        assert same(store.get(second), heir)
    with opened("a") as store:  # whose index is older than the collection
        assert same(store.get(second), heir)
        with pytest.raises((Corrupt, StoreError)):
            store.get(first)


def test_the_note_stays_until_the_last_of_those_with_one_index_goes(server, opened) -> None:
    def notes() -> list[str]:
        keys = server.buckets["bucket"]
        return [key for key in keys if "/owners/" in key and not key.endswith("/")]

    state = small(1)
    one = opened("a")
    first = one.put(state)
    other = opened("a")
    one.close()
    assert len(notes()) == 1
    laptop = opened("b")
    laptop.retire(first)
    with pytest.raises(Conflict, match="another owner uses this store"):
        laptop.gc()
    heir = child(state, first, "layer0.weight", {"n": 2})
    second = other.put(heir)  # shares tensors with the first
    assert same(other.get(second), heir)
    laptop.close()
    other.close()
    assert notes() == []


def test_a_second_process_does_not_end_the_collection_of_the_first(server, opened) -> None:
    with opened("a") as one:
        one.put(small(1))
        with one._ledger._claims.collecting():
            with opened("a") as second:
                second.gc()
            with pytest.raises(Conflict, match="being collected"):
                opened("b")
    opened("b").close()


def test_nobody_enters_while_garbage_is_collected(server: Server, opened) -> None:
    objects = server.buckets["bucket"]
    with opened("a") as store:
        store.put(small(1))
        objects["store/owners/0123456789abcdef.collecting"] = b"another machine"
        with pytest.raises(Conflict, match="another machine"):
            store.gc()
    with pytest.raises(Conflict, match=r"being collected \(another machine\)"):
        opened("b")
    del objects["store/owners/0123456789abcdef.collecting"]
    assert [key for key in objects if "/owners/" in key and not key.endswith("/")] == []
    with opened("b") as store:
        store.gc()
