"""A model put in shares by several writers is the model put by one."""

import pytest
import torch

from elastix.errors import ConfigError
from elastix.state import State
from elastix.store import Store, Vanished


@pytest.fixture
def state():
    torch.manual_seed(0)
    shared = torch.randn(50)
    return State({"a": torch.randn(9, 9), "b": shared, "c": shared, "@o/x": torch.ones(3)})


def part(state, *names):
    return State({name: state.tensors[name] for name in names})


def test_shares_of_two_writers_make_the_model_that_one_puts(tmp_path, state):
    with Store(tmp_path / "one") as one:
        expected = one.put(State(state.tensors, {"step": 3}))
    with Store(tmp_path / "two") as store, Store(tmp_path / "two") as other:
        shares = [store.put_share(part(state, "b", "c")), other.put_share(part(state, "a", "@o/x"))]
        assert store.log() == []  # nothing is visible before it is whole
        ref = store.put_shares(shares, meta={"step": 3}, tags=["run/last"], score=0.5)
        assert ref == expected
        assert other.tags() == {"run/last": ref}
        found = other.get("run/last")
        assert found.tensors["b"] is found.tensors["c"]
        assert store.score(ref) == 0.5
        assert store.nbytes(ref) == state.nbytes
    with Store(tmp_path / "two") as again:
        assert again.get(ref).manifest().ref == ref
        assert again.verify() == []


def test_what_the_store_has_is_not_written_again(tmp_path, state):
    with Store(tmp_path) as store:
        store.put(state)
        share = store.put_share(part(state, "a", "b"))
        assert share.written_bytes == 0
        assert store.put_share(State({"n": torch.zeros(7)})).written_bytes == 28


def test_a_share_that_gc_took_is_named_and_can_be_written_again(tmp_path, state):
    with Store(tmp_path) as store:
        with Store(tmp_path) as writer:
            share = writer.put_share(part(state, "a"))
        rest = store.put_share(part(state, "b", "c", "@o/x"))
        store.gc()  # the writer is gone, and no model needs what it wrote
        with pytest.raises(Vanished) as caught:
            store.put_shares([share, rest], tags=["run/last"])
        assert "a" in caught.value.names
        assert store.tags() == {}
        again = [store.put_share(part(state, name)) for name in caught.value.names]
        ref = store.put_shares([share, rest, *again], tags=["run/last"])
        assert store.get("run/last").manifest().ref == ref
        assert store.verify() == []


def test_what_gc_took_of_a_share_may_have_been_put_again_by_somebody_else(tmp_path, state):
    """Then nobody has to write it. It was asked for without end: whoever was asked found it there.

    Two runs of one seed have equal tensors, and neither knew of the other's when it wrote its own.
    """
    with Store(tmp_path) as store, Store(tmp_path) as writer:
        share = writer.put_share(part(state, "a"))
        equal = store.put_share(part(state, "a"))
        assert equal.places  # it was not known yet
        rest = store.put_share(part(state, "b", "c", "@o/x"))
        writer.close()
        store.gc()
        store.put_shares([equal])
        ref = store.put_shares([share, rest])
        assert store.get(ref).manifest().ref == ref
        assert store.verify() == []


def test_what_gc_took_of_a_share_is_written_again_if_what_was_put_since_is_damaged(tmp_path, state):
    """As whatever is known to be damaged is. The model would be stored, and could not be read."""
    with Store(tmp_path) as store, Store(tmp_path) as writer:
        share = writer.put_share(part(state, "a"))
        equal = store.put_share(part(state, "a"))
        writer.close()
        store.gc()
        store.put_shares([equal])
    (place,) = equal.places.values()
    pack = tmp_path / "packs" / place.pack
    data = pack.read_bytes()
    at = place.offset
    pack.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with Store(tmp_path) as store:
        assert store.verify()
        rest = store.put_share(part(state, "b", "c", "@o/x"))
        with pytest.raises(Vanished) as caught:
            store.put_shares([share, rest])
        assert caught.value.names == ("a",)
        ref = store.put_shares([share, rest, store.put_share(part(state, "a"))])
        assert store.get(ref).manifest().ref == ref


def test_a_bad_tag_leaves_nothing_visible(tmp_path, state):
    with Store(tmp_path) as store:
        share = store.put_share(state)
        with pytest.raises(ConfigError):
            store.put_shares([share], tags=["../escape"])
        assert store.log() == []


def test_tags_move_with_the_commit(tmp_path, state):
    with Store(tmp_path) as store:
        first = store.put_shares([store.put_share(state)], meta={"step": 1}, tags=["run/last"])
        second = store.put_shares([store.put_share(state)], meta={"step": 2}, tags=["run/last"])
        assert first != second
        assert store.tags() == {"run/last": second}


@pytest.mark.parametrize("later", ["b", "c"])
def test_of_tensors_that_are_tied_in_one_share_a_later_one_may_have_another(tmp_path, state, later):
    """It was said to be stored, and nobody could read it: neither is the other any more."""
    apart = {**state.tensors, later: torch.arange(50.0)}
    with Store(tmp_path) as store:
        shares = [store.put_share(state), store.put_share(State({later: apart[later]}))]
        ref = store.put_shares(shares)
    with Store(tmp_path) as again:
        found = again.get(ref)
        assert all(torch.equal(found.tensors[name], apart[name]) for name in apart)
        again.rebuild()
        assert again.get(ref).manifest().ref == ref
