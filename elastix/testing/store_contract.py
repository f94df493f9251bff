"""What every Store must do, as tests. Inherit StoreContract and say how one is opened.

    class TestMine(StoreContract):
        def open_store(self, folder):
            return Store(folder / "store", filesystem=MyFileSystem())

Opening the same folder twice, one after the other, must give the same store.
"""

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elastix.errors import ConfigError, Conflict, NotFound, StateError, StoreError
from elastix.state import Ref, State, raw_bytes
from elastix.store import Signature, Store
from elastix.store.lineage import Mode, shared
from elastix.store.records import DTYPES
from elastix.testing.models import chain

AWKWARD = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "empty_scalar": torch.empty(0, dtype=torch.int64),
    "strided": torch.arange(24.0).view(4, 6)[:, ::2],
    "transposed": torch.arange(12).view(3, 4).t(),
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "nan": torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    "zeros": torch.tensor([-0.0, 0.0]),
    "bools": torch.tensor([True, False, True]),
}


def same(a: State, b: State) -> bool:
    """Bit for bit, with dtypes, shapes, metadata and parents."""
    return a.manifest() == b.manifest()


def every_dtype(seed: int = 0) -> State:
    """Random bits in each dtype that a State may hold."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        bits = torch.randint(
            0, 256, (6, dtype.itemsize * 4), dtype=torch.uint8, generator=generator
        )
        tensors[name] = (bits % 2).bool() if dtype == torch.bool else bits.view(dtype)
    return State(tensors)


def child(parent: State, ref: Ref, change: str, meta: Mapping[str, str | int]) -> State:
    """`parent` with one tensor changed."""
    tensors = dict(parent.tensors)
    tensors[change] = torch.rand_like(tensors[change])
    return State(tensors, meta, (ref,))


def small(seed: int, tensors: int = 3, size: int = 32) -> State:
    """A few random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return State(
        {f"layer{i}.weight": torch.rand(size, generator=generator) for i in range(tensors)},
        {"seed": seed},
    )


class StoreContract:
    """Inherit it; override `open_store`."""

    def open_store(self, folder: Path) -> Store:
        """A store that keeps everything in `folder`; the same folder, the same store."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """An empty store."""
        with self.open_store(tmp_path) as store:
            yield store

    # ------------------------------------------------------------------------------ round trip

    @pytest.mark.parametrize("name", AWKWARD)
    def test_awkward_tensors_come_back_bit_for_bit(self, store: Store, name: str) -> None:
        state = State({"x": AWKWARD[name]})
        back = store.get(store.put(state)).tensors["x"]
        expected = AWKWARD[name].resolve_conj().resolve_neg()
        assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
        assert torch.equal(raw_bytes(back), raw_bytes(expected))

    def test_views_of_one_memory_are_stored_as_what_they_are(self, store: Store) -> None:
        x = torch.tensor([1 + 2j, 3 - 4j])
        views = {
            "x": x,
            "conj": x.conj(),
            "conj_again": x.conj(),
            "resolved": x.conj().resolve_conj(),
            "twice": x.conj().conj(),
            "real": x.real,
            "imag": x.imag,
            "negative": x.conj().imag,
            "negative_resolved": x.conj().imag.resolve_neg(),
        }
        expected = {
            "x": [1 + 2j, 3 - 4j],
            "conj": [1 - 2j, 3 + 4j],
            "conj_again": [1 - 2j, 3 + 4j],
            "resolved": [1 - 2j, 3 + 4j],
            "twice": [1 + 2j, 3 - 4j],
            "real": [1.0, 3.0],
            "imag": [2.0, -4.0],
            "negative": [-2.0, 4.0],
            "negative_resolved": [-2.0, 4.0],
        }
        for state in (State(views), State(views).clone()):
            for back in (state, store.get(store.put(state))):
                for name, tensor in back.tensors.items():
                    told = torch.tensor(expected[name])
                    assert torch.equal(raw_bytes(tensor), raw_bytes(told)), name

    def test_every_dtype_comes_back_bit_for_bit(self, store: Store) -> None:
        state = every_dtype()
        back = store.get(store.put(state))
        assert same(state, back)
        assert {str(t.dtype) for t in back.tensors.values()} == {f"torch.{d}" for d in DTYPES}

    def test_the_ref_is_that_of_the_manifest(self, store: Store) -> None:
        state = State(small(1).tensors, {"nested": {"a": [1, None, 2.5, "x"]}, "nan": float("nan")})
        ref = store.put(state)
        assert ref == state.manifest().ref == store.get(ref).manifest().ref

    def test_views_are_aligned(self, store: Store) -> None:
        state = State({f"t{i}": torch.rand(i + 1) for i in range(20)})
        back = store.get(store.put(state))
        if hasattr(store, "_packs") and type(store._packs).__name__ == "LocalPacks":
            assert all(t.data_ptr() % 64 == 0 for t in back.tensors.values())

    def test_ties_are_kept_and_not_invented(self, store: Store) -> None:
        shared, alike = torch.rand(5), torch.zeros(5)
        state = State({"a": shared, "b": shared, "c": alike, "d": alike.clone()})
        tensors = store.get(store.put(state)).tensors
        tensors["a"].add_(1)
        tensors["c"].add_(1)
        assert torch.equal(tensors["a"], tensors["b"])
        assert torch.equal(tensors["d"], alike)

    def test_ties_and_equals_in_a_part(self, store: Store) -> None:
        shared = torch.rand(5)
        state = State({"a": shared, "b": shared, "c": shared.clone(), "d": shared.clone()})
        ref = store.put(state)
        for names in (["b", "c"], ["c", "b"], ["c", "d"], ["a", "b"], ["d", "a", "b"]):
            tensors = store.get(ref, names).tensors
            tensors[names[0]].add_(1)
            for name in names[1:]:
                tied = {name, names[0]} == {"a", "b"}
                assert torch.equal(tensors[name], shared + 1 if tied else shared), (names, name)

    def test_writing_to_what_was_got_changes_nothing_else(self, store: Store) -> None:
        state = small(1)
        ref = store.put(state)
        one, other = store.get(ref), store.get(ref)
        for tensor in one.tensors.values():
            tensor.fill_(7.0)
        assert same(other, state)
        assert same(store.get(ref), state)
        assert store.verify() == []

    def test_a_part_by_name(self, store: Store) -> None:
        ref = store.put(small(1))
        assert set(store.get(ref, "layer[01].*").tensors) == {"layer0.weight", "layer1.weight"}
        assert set(store.get(ref, ["layer0.*", "layer2.*"]).tensors) == {
            "layer0.weight",
            "layer2.weight",
        }
        assert store.get(ref, "nothing*").tensors == {}

    def test_lazy_survives_retirement_and_collection(self, store: Store) -> None:
        state = small(1)
        ref = store.put(state)
        lazy = store.get(ref, lazy=True)
        eager = store.get(ref)
        store.retire(ref)
        store.gc()
        assert same(eager, state)
        if type(store._packs).__name__ == "LocalPacks":
            assert same(lazy, state)

    def test_putting_twice_stores_once(self, store: Store) -> None:
        first = store.put(small(1))
        before = store.stats()
        assert store.put(small(1)) == first
        assert store.stats().models == before.models == 1
        assert store.stats().dead_bytes == 0

    def test_equal_tensors_are_stored_once(self, store: Store) -> None:
        parent = small(1, tensors=4, size=1000)
        ref = store.put(parent)
        store.put(child(parent, ref, "layer3.weight", {"n": 2}))
        stats = store.stats()
        assert stats.blobs == 5
        assert stats.unique_bytes == 5 * 4000
        assert stats.logical_bytes == 8 * 4000
        assert stats.dedup_ratio == 8 / 5

    def test_it_is_all_there_when_opened_again(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            ref = store.put(small(1), score=0.5)
            store.tag("best", ref)
        with self.open_store(tmp_path) as store:
            assert same(store.get("best"), small(1))
            assert store.log()[0].score == 0.5
            before = store.log(), store.tags(), store.stats().blobs
            store.rebuild()
            assert before == (store.log(), store.tags(), store.stats().blobs)
            assert store.verify() == []

    # ------------------------------------------------------------------------------------ names

    def test_names(self, store: Store) -> None:
        ref = store.put(small(1))
        assert same(store.get(ref[:8]), store.get(ref))
        for missing in ("nothing", "f" * 64, "../../etc/passwd", ""):
            with pytest.raises(NotFound):
                store.get(missing)

    def test_tags_compare_and_swap(self, store: Store) -> None:
        a, b, c = (store.put(small(i)) for i in range(3))
        store.tag("best", a, expected=None)
        with pytest.raises(Conflict, match="best"):
            store.tag("best", b, expected=None)
        store.tag("best", b, expected=a)
        with pytest.raises(Conflict):
            store.tag("best", c, expected=a)
        assert store.tags() == {"best": b}
        with pytest.raises(Conflict):
            store.untag("best", expected=a)
        store.untag("best", expected=b)
        assert store.tags() == {}
        with pytest.raises(NotFound):
            store.untag("best")

    @pytest.mark.parametrize("name", ["../up", "a/../../b", "", "-x", "dead", "a b", "x" * 300])
    def test_bad_tags_are_refused(self, store: Store, name: str) -> None:
        ref = store.put(small(1))
        with pytest.raises(ConfigError):
            store.tag(name, ref)

    def test_what_cannot_be_stored_is_named(self, store: Store) -> None:
        import numpy as np
        from torch._subclasses.fake_tensor import FakeTensorMode

        objects = np.array([object()], dtype=object)
        with FakeTensorMode():
            fake = torch.ones(3)
        bad = {
            "objects": objects,
            "sparse": torch.eye(3).to_sparse(),
            "meta": torch.empty(3, device="meta"),
            "text": "text",
            "lazy": torch.nn.LazyLinear(3).weight,
            "fake": fake,
        }
        for name, value in bad.items():
            with pytest.raises(StateError, match=f"'{name}'"):
                store.put(State({"fine": torch.ones(2), name: value}))  # type: ignore[dict-item]
        with pytest.raises(StateError):
            store.put(State({}, {"x": object()}))
        with pytest.raises(StateError):
            store.put(State({}, {1: "x"}))  # type: ignore[dict-item]
        assert store.stats().models == 0

    # ---------------------------------------------------------------------------------- lineage

    def test_lineage_and_owners(self, store: Store) -> None:
        a = small(1)
        ra = store.put(a)
        b = child(a, ra, "layer0.weight", {"n": 1})
        rb = store.put(b)
        c = child(b, rb, "layer1.weight", {"n": 2})
        rc = store.put(c)
        d = child(a, ra, "layer2.weight", {"n": 3})
        rd = store.put(d)
        assert store.ancestors(rc) == [rb, ra]
        assert set(store.descendants(ra)) == {rb, rc, rd}
        assert store.common_ancestor(rc, rd) == ra
        assert [store.owner(rc, f"layer{i}.weight") for i in range(3)] == [rb, rc, ra]
        assert store.diff(rb, rc).changed == ("layer1.weight",)
        assert store.diff(rb, rc).meta == {"n": (1, 2)}
        assert [entry.ref for entry in store.log(rc)] == [rc, rb, ra]
        assert [entry.ref for entry in store.log(rc, limit=2)] == [rc, rb]

    def test_the_log_of_models_with_some_metadata(self, store: Store) -> None:
        a = small(1)
        ra = store.put(a)
        rb = store.put(child(a, ra, "layer0.weight", {"kind": "b", "n": 1}), parents=[ra])
        rc = store.put(child(a, ra, "layer1.weight", {"kind": "c", "n": 1}), parents=[rb])
        rd = store.put(child(a, ra, "layer2.weight", {"kind": "b", "n": 2}), parents=[ra])
        store.tag("latest", rd)

        def refs(*args: Any, **options: Any) -> list[str]:  # noqa: ANN401 - as `log` takes them
            return [entry.ref for entry in store.log(*args, **options)]

        assert refs(where={"kind": "b"}) == [rd, rb]
        assert refs(where={"kind": "b"}, limit=1) == [rd]
        assert refs(where={"kind": "b", "n": 1}) == [rb]
        assert refs(rc, where={"n": 1}) == [rc, rb]
        assert refs(rc, where={"n": 1}, limit=1) == [rc]
        assert refs("latest", where={"n": 1}) == []
        assert refs(where={"kind": "none"}) == []
        assert refs(where={}) == [rd, rc, rb, ra]
        (entry,) = store.log(where={"n": 2})
        assert (entry.parents, entry.tags, entry.meta) == (
            (ra,),
            ("latest",),
            {"kind": "b", "n": 2},
        )
        store.retire(rb)
        assert refs(where={"kind": "b"}) == [rd]
        assert refs(rc, where={"n": 1}) == [rc]
        with pytest.raises(ConfigError, match="where"):
            store.log(where={"kind": float("nan")})

    def test_retiring_unlists_no_ancestor(self, store: Store) -> None:
        a = small(1)
        ra = store.put(a)
        b = child(a, ra, "layer0.weight", {"n": 1})
        rb = store.put(b)
        c = child(b, rb, "layer1.weight", {"n": 2})
        rc = store.put(c)
        owners = [store.owner(rc, name) for name in c.tensors]
        store.retire(rb)
        store.gc()
        assert store.ancestors(rc) == [rb, ra]
        assert [store.owner(rc, name) for name in c.tensors] == owners
        assert same(store.get(rc), c)
        assert same(store.get(ra), a)
        with pytest.raises(NotFound, match="retired"):
            store.get(rb)
        store.retire(rc)
        store.gc()
        assert same(store.get(ra), a)
        store.rebuild()
        assert same(store.get(ra), a)
        assert store.verify() == []

    def test_a_tagged_model_is_not_retired(self, store: Store) -> None:
        ref = store.put(small(1))
        store.tag("best", ref)
        with pytest.raises(Conflict, match="best"):
            store.retire(ref)
        assert same(store.get(ref), small(1))

    def test_a_retired_model_may_be_put_again(self, store: Store) -> None:
        ref = store.put(small(1))
        store.retire(ref)
        assert store.put(small(1)) == ref
        store.gc()
        store.rebuild()
        assert same(store.get(ref), small(1))

    def test_random_dag_retired_in_random_order(self, store: Store) -> None:
        retire_everything(store, models=60, check_every=10, seed=1)

    # ---------------------------------------------------------------------------------- nearest

    def test_one_models_odd_metadata_hide_no_other_from_nearest(self, store: Store) -> None:
        odd = {"campaign": "c", "loss": float("nan"), "reach": float("-inf"), "größe": 2, "a\\b": 3}
        alone = store.put(State(small(1).tensors, {"campaign": "c"}), signature=chain("a b"))
        strange = store.put(State(small(2).tensors, odd), signature=chain("a b c"))
        for mode in ("lp", "lcs"):
            found = store.nearest(chain("a b c"), mode, where={"campaign": "c"})
            assert found is not None
            assert (found.ref, found.length) == (strange, 3)
            other = store.nearest(chain("a b c"), mode, where={"campaign": "c"}, but=strange)
            assert other is not None
            assert other.ref == alone
        for key, value in (("größe", 2), ("a\\b", 3)):
            found = store.nearest(chain("a b c"), where={key: value})
            assert found is not None
            assert found.ref == strange

    @pytest.mark.parametrize("where", [{"loss": float("nan")}, {"n": [1]}, {'a"b': 1}])
    def test_nearest_refuses_what_no_metadata_can_match(
        self, store: Store, where: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match="where"):
            store.nearest(chain("a"), where=where)

    def test_nearest_with_ties_and_filters(self, store: Store) -> None:
        one = chain("a b c d")
        two = chain("a b x d")
        r1 = store.put(small(1), signature=one, score=0.1)
        r2 = store.put(small(2), signature=two, score=0.9)
        store.put(small(3))
        wanted = chain("a b c y d")
        assert store.signature(r1) == one
        found = store.nearest(wanted)
        assert found is not None
        assert (found.ref, found.length) == (r1, 3)
        tie = store.nearest(chain("a b z"))
        assert tie is not None
        assert (tie.ref, tie.length, tie.score) == (r2, 2, 0.9)
        lcs = store.nearest(wanted, "lcs")
        assert lcs is not None
        assert (lcs.ref, lcs.length) == (r1, 4)
        by_meta = store.nearest(wanted, where={"seed": 2})
        assert by_meta is not None
        assert by_meta.ref == r2
        store.tag("keep/one", r1)
        by_tag = store.nearest(chain("a b z"), tagged="keep/*")
        assert by_tag is not None
        assert by_tag.ref == r1
        assert store.nearest(wanted, tagged="other*") is None
        assert store.nearest(chain("q r")) is None
        assert store.nearest(Signature(()), "lcs") is None
        store.retire(r2)
        left = store.nearest(chain("a b x d"))
        assert left is not None
        assert (left.ref, left.length) == (r1, 2)

    @pytest.mark.parametrize("mode", ["lp", "lcs"])
    def test_nearest_among_some_is_that_of_a_scan_while_models_come_and_go(
        self, store: Store, mode: Mode
    ) -> None:
        draws, there = random.Random(3), dict[Ref, tuple[Signature, float | None, str]]()
        for number in range(40):
            signature = chain(" ".join(draws.choices("ab", k=4)))
            score, campaign = draws.choice([None, 0.1, 0.5, 0.5]), draws.choice("xyz")
            state = State(small(number).tensors, {"campaign": campaign})
            there[store.put(state, signature=signature, score=score)] = signature, score, campaign
            if draws.random() < 0.4:
                gone = draws.choice(list(there))
                store.retire(gone)
                del there[gone]
            if draws.random() < 0.1:
                store.gc()
            wanted = chain(" ".join(draws.choices("ab", k=4)))
            for campaign in "xyw":  # nobody asks for z, and w has no model
                found = store.nearest(wanted, mode, where={"campaign": campaign})
                among = [  # the first of equals is the oldest
                    (len(shared(wanted, other, mode)), -math.inf if its is None else its, ref)
                    for ref, (other, its, of) in there.items()
                    if of == campaign and shared(wanted, other, mode)
                ]
                best = max(among, key=lambda each: each[:2], default=None)
                assert (found and (found.length, found.ref)) == (best and (best[0], best[2]))

    # --------------------------------------------------------------------------------- exchange

    def test_export_and_import(self, store: Store, tmp_path: Path) -> None:
        shared = torch.rand(5)
        state = State({"a": shared, "b": shared, "c": torch.rand(2, 3)}, {"x": [1, 2]})
        ref = store.put(state)
        path = tmp_path / "out.safetensors"
        store.export(ref, path)
        store.retire(ref)
        store.gc()
        assert store.import_(path) == ref
        assert same(store.get(ref), state)
        with pytest.raises(StoreError):
            store.import_(tmp_path / "absent.safetensors")

    def test_catalogue(self, store: Store, tmp_path: Path) -> None:
        import pyarrow.parquet as pq

        ref = store.put(small(1), score=0.25)
        store.tag("best", ref)
        store.catalogue(tmp_path / "models.parquet")
        (row,) = pq.read_table(tmp_path / "models.parquet").to_pylist()
        assert (row["ref"], row["tags"], row["score"]) == (ref, ["best"], 0.25)


def retire_everything(store: Store, models: int, check_every: int, seed: int) -> None:
    """Law 5: retire a random DAG in random order; survivors and ancestors stay; 0 blobs remain."""
    choose = random.Random(seed)
    states: dict[Ref, State] = {}
    order: list[Ref] = []
    for n in range(models):
        parents = choose.sample(order, min(len(order), choose.randint(0, 2)))
        tensors = dict(states[parents[0]].tensors) if parents else dict(small(n).tensors)
        if len(parents) == 2:
            name = choose.choice(sorted(tensors))
            tensors[name] = states[parents[1]].tensors[name]
        tensors[choose.choice(sorted(tensors))] = small(n).tensors["layer0.weight"]
        state = State(tensors, {"n": n}, tuple(parents))
        ref = store.put(state)
        states[ref] = state
        order.append(ref)
    ancestors = {ref: store.ancestors(ref) for ref in order}
    owners = {ref: {n: store.owner(ref, n) for n in states[ref].tensors} for ref in order}
    choose.shuffle(order)
    while order:
        ref = order.pop()
        store.retire(ref)
        if len(order) % check_every == 0:
            store.gc()
            for left in order if len(order) <= 50 else choose.sample(order, 50):
                assert same(store.get(left), states[left])
                assert store.ancestors(left) == ancestors[left]
                assert {n: store.owner(left, n) for n in states[left].tensors} == owners[left]
            assert store.verify() == []
    store.gc()
    stats = store.stats()
    assert (stats.models, stats.blobs, stats.unique_bytes) == (0, 0, 0)
