"""A collection beside writers: what comes to be needed while it looks stays known."""

import pytest
import torch

from elastix.state import State
from elastix.store import Store, gc


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
