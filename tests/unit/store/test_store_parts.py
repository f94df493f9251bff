"""Models kept in the parts of a mesh: read, compared and put together as if they were whole."""

import json
from itertools import pairwise, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastix.cli import app
from elastix.errors import Corrupt, StateError, StoreError
from elastix.sharding import Part, Shard
from elastix.state import State
from elastix.store import Store, exchange

RUNNER = CliRunner()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn)
DTYPES += (torch.int64, torch.complex64)


def boxes(shape, cuts):
    """The parts of a tensor that is cut at these places along each axis."""
    ends = [sorted({0, n, *(c for c in places if c < n)}) for n, places in zip(shape, cuts)]  # noqa: B905
    return [
        Part(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        for pairs in product(*(pairwise(places) for places in ends))
    ]


def places(whole, cut, number):
    """What `number` processes hold: tensors that are cut go round, all have the others."""
    held = [({}, {}) for _ in range(number)]
    for name, tensor in whole.tensors.items():
        if name not in cut:
            for tensors, _ in held:
                tensors[name] = tensor
            continue
        parts = boxes(tuple(tensor.shape), cut[name])
        for at in range(number):
            nothing = Part(tuple(tensor.shape), tuple(tensor.shape))
            part = parts[at] if at < len(parts) else nothing
            tensors, known = held[at]
            tensors[name] = tensor[part.within(Part((0,) * tensor.dim(), tuple(tensor.shape)))]
            known[name] = Shard(part, tuple(tensor.shape))
    return [State(tensors, parts=parts) for tensors, parts in held]


def put(store, whole, cut, number, **options):
    shares = [store.put_share(state) for state in places(whole, cut, number)]
    return store.put_shares(shares, meta=whole.meta, **options)


def random_bits(shape, dtype, generator):
    """Any bits at all, NaNs with payloads among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with Store(tmp_path_factory.mktemp("parts")) as opened:
        yield opened


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(6, 4, generator=generator)
    tensors = {
        "up.weight": torch.randn(8, 6, generator=generator),
        "down.weight": shared,
        "head.weight": shared,
        "norm.weight": torch.randn(8, generator=generator),
        "@optimizer/state/up.weight/exp_avg": torch.randn(8, 6, generator=generator),
    }
    return State(tensors, {"step": 3})


CUT = {
    "up.weight": ([2, 4, 6], []),
    "down.weight": ([3], [2]),
    "head.weight": ([3], [2]),
    "@optimizer/state/up.weight/exp_avg": ([2, 4, 6], []),
}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_cut_how_comes_back_bit_for_bit_whole_and_in_any_part(store, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    tensors, cut = {}, {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        name = f"t{number}"
        tensors[name] = random_bits(shape, data.draw(st.sampled_from(DTYPES)), generator)
        cuts = [data.draw(st.lists(st.integers(1, 5), max_size=2)) for _ in shape]
        if len(boxes(shape, cuts)) > 1:
            cut[name] = cuts
    whole = State(tensors)
    number = max([len(boxes(tuple(tensors[n].shape), c)) for n, c in cut.items()], default=1)
    ref = put(store, whole, cut, number + data.draw(st.integers(0, 1)))
    assert store.get(ref).manifest() == whole.manifest()
    lazy = store.get(ref, lazy=True).tensors
    assert sorted(lazy) == sorted(tensors)
    assert len(lazy) == len(tensors)
    for name, tensor in tensors.items():
        assert lazy.shape(name) == tuple(tensor.shape)
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in tensor.shape]
        part = Part(tuple(a for a, _ in ends), tuple(b for _, b in ends))
        got = lazy.part(name, part)
        wanted = tensor[part.within(Part((0,) * tensor.dim(), tuple(tensor.shape)))]
        assert State({"x": got}).manifest() == State({"x": wanted}).manifest()


def test_patterns_and_owners_are_of_whole_tensors(store, model):
    ref = put(store, model, CUT, 4)
    names = store.get(ref, "*.weight").tensors.keys()
    assert {"up.weight", "down.weight", "head.weight", "norm.weight"} <= names
    assert set(store.get(ref, ["up.*", "norm.*"]).tensors) == {"up.weight", "norm.weight"}
    assert not store.get(ref, "up.weight[[]0:2*").tensors
    assert store.owner(ref, "up.weight") == ref
    changed = State(dict(model.tensors), {"step": 4})
    changed.tensors["up.weight"] = model.tensors["up.weight"].clone()
    changed.tensors["up.weight"][:2] += 1
    child = put(store, changed, CUT, 4, parents=[ref])
    again = put(store, State(changed.tensors, {"step": 5}), CUT, 4, parents=[child])
    assert store.owner(again, "up.weight") == child  # the rest of it is from `ref`
    assert store.owner(again, "down.weight") == ref


def test_equal_parts_of_several_places_are_kept_once_and_counted_as_one_tensor(tmp_path, model):
    with Store(tmp_path) as store:
        ref = put(store, model, CUT, 6)
        assert store.stats().blobs == 4 + 4 + 1 + 4
        assert store.nbytes(ref) == model.nbytes
        assert store.log()[0].tensors == len(model.tensors)
        assert store.verify() == []
        store.rebuild()
    with Store(tmp_path) as store:
        assert store.get(ref).manifest() == model.manifest()
        assert store.log()[0].tensors == len(model.tensors)
        store.retire(ref)
        store.gc()
        assert store.stats().blobs == 0


def test_only_parts_that_overlap_what_is_asked_for_are_read(tmp_path, model):
    with Store(tmp_path) as store:
        ref = put(store, model, CUT, 4)
    (pack,) = sorted((tmp_path / "packs").iterdir())
    raw = bytearray(pack.read_bytes())
    at = raw.index(model.tensors["up.weight"][6:8].numpy().tobytes())
    raw[at] ^= 1
    pack.write_bytes(raw)
    with Store(tmp_path, read_only=True) as store:
        lazy = store.get(ref, lazy=True).tensors
        got = lazy.part("up.weight", Part((1, 2), (5, 6)))
        assert torch.equal(got, model.tensors["up.weight"][1:5, 2:6])
        with pytest.raises(Corrupt, match="payload"):
            lazy.part("up.weight", Part((1, 2), (7, 6)))
        with pytest.raises(Corrupt, match=r"up.weight\[6:8,0:6\]"):
            store.get(ref)
        assert {(d.tensor, d.model) for d in store.verify()} == {("up.weight[6:8,0:6]", ref)}


def test_what_was_asked_for_lazily_can_be_read_when_the_store_is_closed(tmp_path, model):
    with Store(tmp_path) as store:
        ref = put(store, model, CUT, 4)
    with Store(tmp_path, read_only=True) as store:
        state = store.get(ref, lazy=True)
    assert torch.equal(state.tensors["up.weight"], model.tensors["up.weight"])
    got = state.tensors.part("down.weight", Part((1, 1), (5, 3)))
    assert torch.equal(got, model.tensors["down.weight"][1:5, 1:3])


def test_tensors_that_are_tied_in_parts_are_tied_again_and_others_are_not(store, model):
    found = store.get(put(store, model, CUT, 4)).tensors
    assert found["down.weight"] is found["head.weight"]
    apart = State({**model.tensors, "head.weight": model.tensors["head.weight"].clone()})
    found = store.get(put(store, apart, CUT, 4)).tensors
    assert found["down.weight"] is not found["head.weight"]
    found["down.weight"] += 1
    assert torch.equal(found["head.weight"], apart.tensors["head.weight"])


def test_a_consolidated_model_is_the_one_that_a_single_process_puts(tmp_path, model):
    with Store(tmp_path / "one") as one:
        parent = one.put(State({"x": torch.ones(2)}))
        expected = one.put(model, parents=[parent], score=0.5)
        inside = one.manifest(expected)
    with Store(tmp_path / "crew") as store:
        parent = store.put(State({"x": torch.ones(2)}))
        tags = ["run/last", "run/final"]
        ref = put(store, model, CUT, 4, parents=[parent], score=0.5, tags=tags)
        store.tag("another", parent)
        assert store.consolidate("run/last") == expected != ref
        assert store.manifest(expected) == inside
        assert store.tags() == {"run/last": expected, "run/final": expected, "another": parent}
        assert (store.score(expected), store.manifest(ref).ref) == (0.5, ref)
        found = store.get(expected).tensors
        assert found["down.weight"] is found["head.weight"]
        assert store.consolidate(expected) == expected
        store.retire(ref)
        store.gc()
        assert store.get("run/final").manifest() == inside
        assert store.verify() == []


def test_exported_it_is_whole(store, model, tmp_path):
    ref = put(store, model, CUT, 4)
    store.export(ref, tmp_path / "model.safetensors", whole=True)
    assert exchange.read(tmp_path / "model.safetensors").manifest() == model.manifest()
    with Store(tmp_path / "other") as other:
        assert other.import_(tmp_path / "model.safetensors") == other.put(model)


def test_models_from_different_meshes_are_compared_by_their_elements(store, model):
    changed = State({**model.tensors, "up.weight": model.tensors["up.weight"] + 1}, {"step": 3})
    halves = {"up.weight": ([4], []), "norm.weight": ([4],)}
    refs = [put(store, model, CUT, 4), put(store, changed, halves, 2), store.put(changed)]
    for a, b in ((refs[0], refs[1]), (refs[0], refs[2])):
        found = store.diff(a, b)
        assert found.changed == ("up.weight",)
        assert set(found.same) == set(model.tensors) - {"up.weight"}
        assert found.added == found.removed == ()
    assert store.diff(refs[1], refs[2]).changed == ()
    longer = State({**changed.tensors, "up.weight": torch.ones(9, 6)})
    assert store.diff(refs[1], put(store, longer, {}, 1)).changed == ("up.weight",)


def test_models_in_parts_are_averaged(store, model):
    base = store.put(State({"x": torch.zeros(3)}))
    other = State({n: t + 1 for n, t in model.tensors.items()}, {"step": 3})
    refs = [put(store, one, CUT, 4, parents=[base]) for one in (model, other)]
    soup = store.soup([*refs], lambda state: 1.0)
    assert soup.averaged
    found = store.get(soup.ref).tensors["up.weight"]
    expected = (model.tensors["up.weight"].double() + other.tensors["up.weight"].double()) / 2
    assert torch.equal(found, expected.float())


def test_nothing_is_put_that_would_be_read_as_something_else(store, model):
    with pytest.raises(StateError, match="reads as if it were a part"):
        store.put(State({"w[0:2]": torch.ones(2)}))
    with pytest.raises(StateError, match="put_share"):
        store.put(places(model, CUT, 4)[0])
    shares = [store.put_share(state) for state in places(model, CUT, 4)]
    with pytest.raises(StoreError, match="12 elements of it are in none"):
        store.put_shares([*shares[:2], *shares[3:]])
    mixed = places(model, {"up.weight": ([4], [])}, 2)
    with pytest.raises(StoreError, match="are not one tensor"):
        store.put_shares([*shares, *map(store.put_share, mixed)])
    assert store.put_shares(shares, meta={"step": 3})


HOSTILE = {
    "a gap": {"w[0:2]": 2, "w[3:4]": 1},
    "an overlap": {"w[0:2]": 2, "w[1:3]": 2},
    "another shape": {"w[0:2]": 2, "w[2:4]": 3},
    "huge": {"w[0:2]": 2, "w[2:999999999999999999]": 3},
    "backwards": {"w[2:0]": 2},
    "whole and parts": {"w": 4, "w[0:2]": 2},
    "written twice": {"w[0:2]": 2, "w[0:02]": 2},
    "other axes": {"w[0:2]": 2, "w[2:4,0:1]": 2},
}


@pytest.mark.parametrize("infos", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_give_a_typed_error_and_no_tensor(tmp_path, infos, monkeypatch):
    """Written past the check of `put_shares`, as another program could."""
    with Store(tmp_path) as store:
        monkeypatch.setattr("elastix.sharding.named_part", lambda name: None)
        monkeypatch.setattr("elastix.store.tensors.named_part", lambda name: None)
        tensors = {name: torch.arange(float(size)) for name, size in infos.items()}
        ref = store.put(State({**tensors, "other": torch.ones(3)}))
        monkeypatch.undo()
    with Store(tmp_path, read_only=True) as store:
        assert torch.equal(store.get(ref, "other").tensors["other"], torch.ones(3))
        for lazy in (False, True):
            with pytest.raises(Corrupt, match=f"'w' of model {ref[:12]}"):
                store.get(ref, lazy=lazy)
        assert store.verify() == []  # every byte is as it was written
        assert store.log()[0].ref == ref
        with pytest.raises(Corrupt, match="are not one tensor"):
            store.diff(ref, ref)
    for verb in ("show", "consolidate"):
        result = RUNNER.invoke(app, ["store", verb, ref, "--store", str(tmp_path)])
        assert result.exit_code == 1
        assert "are not one tensor" in result.stderr


def test_bytes_that_are_fewer_than_a_part_says_are_found_before_there_is_room_for_it(tmp_path):
    """A manifest that claims a petabyte; its own digest is right."""
    with Store(tmp_path) as store:
        share = store.put_share(State({"w": torch.ones(2)}))
        info = share.infos["w"]
        n = 1 << 48
        fake = {
            "w[0:2]": type(info)(info.dtype, (2,), info.digest),
            f"w[2:{n}]": type(info)(info.dtype, (n - 2,), info.digest),
        }
        ref = store.put_shares([type(share)(fake, {}, share.places)])
        with pytest.raises(Corrupt, match="8 bytes are no"):
            store.get(ref)


def test_the_command_line_shows_whole_tensors_and_puts_them_together(tmp_path, model):
    with Store(tmp_path) as store:
        ref = put(store, model, CUT, 4, tags=["run/final"])

    def said(*words):
        result = RUNNER.invoke(app, ["store", *words, "--store", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "up.weight\tfloat32\t[8, 6] in 4 parts\t" in said("show", "run/final")
    assert "norm.weight\tfloat32\t[8]\t" in said("show", "run/final")
    shown = json.loads(said("show", "run/final", "--json"))["tensors"]
    assert len(shown["down.weight"]["parts"]) == 4
    assert "parts" not in shown["norm.weight"]
    made = json.loads(said("consolidate", "run/final", "--json"))
    assert (made["in_parts"], made["tags"]) == (ref, ["run/final"])
    assert "parts" not in said("show", "run/final")
    assert said("diff", ref, "run/final").splitlines()[1:] == [f"=\t{len(model.tensors)} tensors\t"]
    assert json.loads(said("consolidate", "run/final", "--json"))["in_parts"] is None


def test_a_nested_tensor_is_refused_by_name(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with Store(tmp_path) as store, pytest.raises(StateError, match="'w' is a nested tensor"):
        store.put(State({"w": nested}))


class MadeUp(torch.Tensor):
    """Looks like a tensor, and has no memory."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def masked(tensor):
    return torch.masked.masked_tensor(tensor, tensor > 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("made_up", [masked, MadeUp])
def test_what_has_no_memory_of_its_own_is_refused_by_name(tmp_path, made_up):
    tensor = made_up(torch.arange(4.0))
    named = f"'w' is a {type(tensor).__name__}"
    with Store(tmp_path) as store, pytest.raises(StateError, match=named):
        store.put(State({"w": tensor}))
