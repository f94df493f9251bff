"""What grows with the number of models, and what must not: counted in steps of SQLite and bytes."""

import tracemalloc
from contextlib import contextmanager

import pytest
import torch

from elastix.state import State
from elastix.store import Store, gc, reader
from elastix.store.index import Index
from elastix.store.nearest import Candidate, Neighbours, pack_ids
from elastix.store.records import Place
from elastix.testing.models import chain

CAMPAIGN = {"campaign": "mine"}


def put(store, number, campaign="mine", layers="a b c", score=0.0):
    state = State({"w": torch.tensor([float(number)])}, {"campaign": campaign, "number": number})
    return store.put(state, signature=chain(layers), score=score)


@contextmanager
def steps(store):
    """How many tens of SQLite's steps are made within."""
    counted = [0]

    def count():
        counted[0] += 1

    sql = store.ledger.index.sql
    sql.set_progress_handler(count, 10)
    yield counted
    sql.set_progress_handler(None, 0)


def ask(store, layers="a b c"):
    found = store.nearest(chain(layers), where=CAMPAIGN)
    return found and store.manifest(found.ref).meta["number"]


def test_the_next_question_about_a_campaign_looks_at_new_models_alone(tmp_path):
    with Store(tmp_path) as store:
        for number in range(150):
            put(store, number, f"other{number % 7}")
        put(store, 1000)
        with steps(store) as first:
            assert ask(store) == 1000
        put(store, 1001, score=1.0)
        with steps(store) as second:
            assert ask(store) == 1001
        assert first[0] > 100
        assert second[0] < first[0] / 3


def test_what_a_campaign_had_by_some_time_is_found_without_signatures_of_others(
    tmp_path, monkeypatch
):
    """Each worker of each trial asks, if trials are groups: in a store that others have filled."""
    read, kept = [], Index.entries_since

    def noted(index, rev, where):
        for entry in kept(index, rev, where):
            read.append(entry.key)
            yield entry

    monkeypatch.setattr(Index, "entries_since", noted)
    with Store(tmp_path) as store:
        for number in range(20):
            put(store, number, "other", score=9.0)
        first = put(store, 1000)
        (entry,) = store.log(where=CAMPAIGN)
        put(store, 1001, score=1.0)
        for until_s, number in ((entry.time_s, 1000), (entry.time_s - 1, None), (None, 1001)):
            found = store.nearest(chain("a b c"), where=CAMPAIGN, until_s=until_s)
            assert (found and store.manifest(found.ref).meta["number"]) == number
        assert len(read) == 2
        put(store, 1002, score=2.0)
        found = store.nearest(chain("a b c"), where=CAMPAIGN, until_s=entry.time_s)
        assert found.ref == first
        assert len(read) == 3


def test_a_question_about_a_campaign_hears_of_whatever_was_put_or_retired_since(tmp_path):
    with Store(tmp_path) as store, Store(tmp_path) as other:
        assert ask(store) is None
        refs = [put(store, 0), put(other, 1, score=1.0), put(other, 2, "theirs", score=2.0)]
        assert ask(store) == 1
        other.retire(refs[1])
        assert ask(store) == 0
        put(other, 1, score=1.0)  # the same model again
        assert ask(store) == 1
        put(store, 3, layers="a b d", score=3.0)
        assert [ask(store), ask(store, "a b d")] == [1, 3]
        other.retire(refs[0])
        other.retire(refs[1])
        other.gc()  # forgets rows, whose numbers others may get
        put(other, 4, "theirs", score=9.0)
        put(other, 5, "theirs", score=9.0)
        assert ask(store) == 3
        assert store.nearest(chain("a b c"), where={"campaign": "theirs"}).score == 9.0
    with Store(tmp_path) as store:
        assert ask(store) == 3
        store.rebuild()
        assert ask(store) == 3


def test_what_forgetting_tensors_costs_grows_as_the_store_does_and_not_as_its_square(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gc, "_FORGET_BATCH", 1)
    cost = {}
    for models in (30, 120):
        with Store(tmp_path / str(models)) as store:
            for number in range(models):
                put(store, number)
            retired = [put(store, models + number) for number in range(models)]
            for ref in retired:
                store.retire(ref)
            with steps(store) as counted:
                gc._forget_blobs(store.ledger)
            assert store.stats().blobs == models
            store.gc()
            assert store.stats().models == models
            cost[models] = counted[0]
    assert cost[120] < 6 * cost[30]


def test_a_collection_with_nothing_to_remove_reads_no_pack(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        for number in range(20):
            put(store, number)
        store.retire(put(store, 20))
        assert store.gc().removed == ()  # too little of the pack is useless
        read = []
        kept = store.ledger.packs.read
        monkeypatch.setattr(
            store.ledger.packs, "read", lambda *where: read.append(where) or kept(*where)
        )
        store.gc()
        assert len(read) < 5


@pytest.mark.parametrize("later", [0, 3000])
def test_a_model_takes_few_bytes_of_memory_beside_its_ids(later):
    models, layers = 10_000, 6

    def made(number):
        paths = range(layers * number, layers * (number + 1))
        return Candidate(number, number / models, pack_ids(paths), pack_ids(range(6)), b"r" * 32)

    tracemalloc.start()
    try:
        neighbours = Neighbours(map(made, range(models)))
        for number in range(models, models + later):
            neighbours.add(made(number))
        held = tracemalloc.get_traced_memory()[0] / len(neighbours)
    finally:
        tracemalloc.stop()
    assert neighbours.lp(range(6)).key == 0
    assert held < 350


def test_a_store_that_is_read_for_long_remembers_so_many_tensors_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_PAYLOADS_KEPT", 8)
    with Store(tmp_path) as store:
        refs = [put(store, number) for number in range(20)]
        for _ in range(2):
            for number, ref in enumerate(refs):
                assert store.get(ref).tensors["w"].tolist() == [number]
        assert len(store._reader._payloads) == 8
        many = State({f"t{i}": torch.tensor([i]) for i in range(20)})
        assert sorted(store.get(store.put(many)).tensors) == sorted(many.tensors)


class Interrupted(str):
    """Whenever it is hashed another thread has its turn."""

    turn = None

    def __hash__(self):
        turn, Interrupted.turn = Interrupted.turn, None
        if turn is not None:
            turn()
            Interrupted.turn = turn
        return super().__hash__()


def test_threads_that_read_one_store_forget_tensors_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_PAYLOADS_KEPT", 2)
    places = (Place("p.pack", number, 4) for number in range(1000))
    with Store(tmp_path) as store:
        payload = store._reader._payload
        monkeypatch.setattr(Interrupted, "turn", lambda: payload(next(places), "of another"))
        for number in range(20):
            wanted = Place("q.pack", number, 4)
            assert payload(wanted, Interrupted("of ours")).place == wanted
        assert len(store._reader._payloads) == 2
