"""A State from one mesh goes on on any other, bit for bit. Real processes, gloo, float64."""

import pytest
import torch

from elastix.errors import StateError
from elastix.sharding import Part, Shard, held, local
from elastix.state import HeldState, State, capture, restore
from elastix.store import Store
from tests.crew import MESHES, Places, built, trained

pytestmark = pytest.mark.timeout(300)  # the first of them starts processes

PAIRS = [
    ("shard 2, tensor 2", "shard 3"),
    ("shard 3", "shard 2, tensor 2"),
    ("tensor 2", "one process"),
    ("one process", "tensor 2"),
]
FIRST, LAST = range(2), range(2, 4)


class Average:
    """Something of the user's that holds tensors like the model's."""

    def __init__(self, model):
        self.mean = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.mean[name] = self.mean[name] * 0.9 + parameter.detach() * 0.1

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def made(mesh, seed):
    model = built(mesh, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, optimizer, {"optimizer": optimizer, "average": Average(model)}


def gone_on(model, optimizer, others, mesh, steps):
    trained(model, optimizer, mesh, steps)
    others["average"].update(model)


def share(store, model, others):
    state = capture({"": model}, others)
    return store.put_share(state), state.meta


def begun(mesh, path):
    """The first steps; what each place puts into the store."""
    model, optimizer, others = made(mesh, 0)
    gone_on(model, optimizer, others, mesh, FIRST)
    with Store(path) as store:
        return share(store, model, others)


def taken(mesh, path, ref):
    """A State from the store, by a process that had another; then the last steps."""
    model, optimizer, others = made(mesh, 1)
    with Store(path) as store:
        restore(store.get(ref, lazy=True), {"": model}, others)
        before = share(store, model, others)
        gone_on(model, optimizer, others, mesh, LAST)
        return before, share(store, model, others)


@pytest.fixture(scope="module")
def places():
    started = Places(4)
    yield started
    started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def whole(path):
    """What one process holds that is never disturbed: after the first steps, and after all."""
    model, optimizer, others = made(None, 0)
    found = []
    for steps in (FIRST, LAST):
        gone_on(model, optimizer, others, None, steps)
        found.append(capture({"": model}, others).clone())
    return found


@pytest.fixture(scope="module")
def begin(places, path):
    known = {}

    def begin(mesh):
        if mesh not in known:
            known[mesh] = together(path, places.run(MESHES[mesh], begun, path))
        return known[mesh]

    return begin


def together(path, found):
    shares, metas = zip(*found, strict=True)
    assert all(meta == metas[0] for meta in metas)  # every place says the same
    with Store(path) as store:
        return store.put_shares(shares, meta=metas[0])


def apart(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(a, b, marks=() if (a, b) in PAIRS else pytest.mark.slow)
        for a in MESHES
        for b in MESHES
    ],
)
def test_a_state_goes_on_on_any_mesh(places, path, whole, begin, one, other):
    ref = begin(one)
    before, after = zip(*places.run(MESHES[other], taken, path, ref), strict=True)
    restored, trained_on = together(path, before), together(path, after)
    with Store(path) as store:
        assert store.diff(ref, restored).changed == ()
        as_one = store.get(ref)
        assert as_one.meta == store.get(restored).meta
        assert apart(whole[0].tensors, as_one.tensors) < 1e-9
        assert as_one.meta == whole[0].meta
        assert store.get(restored).manifest() == as_one.manifest()
        assert store.manifest(store.consolidate(restored)) == as_one.manifest()
        assert apart(whole[1].tensors, store.get(trained_on).tensors) < 1e-9


def looked_at(mesh):
    """Each place's parts beside the whole model, which it can build as well."""
    model, whole = built(mesh), built(None).state_dict()
    state = capture({"": model}, {})
    for name, tensor in state.tensors.items():
        at = state.parts.get(name)
        mine = whole[name]
        if at is not None:
            mine = mine[at.part.within(Part((0,) * len(at.whole), at.whole))]
        assert torch.equal(tensor, mine), name
        assert tensor.untyped_storage().data_ptr() == (
            local(model.state_dict()[name]).untyped_storage().data_ptr()
        )
    return sorted(state.stored), len(state.tensors)


@pytest.mark.parametrize("mesh", [{"shard": 4}, {"tensor": 3}, {"shard": 3}])
def test_parts_lie_where_their_names_say_uneven_ones_too(places, mesh):
    """Three do not divide the columns; of four places some have nothing of the last layer."""
    found = places.run(mesh, looked_at)
    names = [set(stored) for stored, _ in found]
    assert any(len(stored) < number for stored, number in found) == ("shard" in mesh)
    last = {name for stored in names for name in stored if name.startswith("last.bias")}
    assert last == ({"last.bias"} if "tensor" in mesh else {"last.bias[0:1]", "last.bias[1:2]"})


def refused(mesh):
    """What cannot be a State, or cannot be restored: every place tells how."""
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    said = []

    def saying(function, *args):
        with pytest.raises(StateError) as error:
            function(*args)
        said.append(str(error.value))

    holes = DTensor.from_local(torch.ones(4), mesh, [_StridedShard(0, split_factor=2), Replicate()])
    saying(held, holes)
    saying(local, DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()]))
    model = built(mesh)
    state = capture({"": model}, {})
    name = "blocks.0.up.weight"
    elsewhere = Shard(Part((0, 0), (1, 10)), state.parts[name].whole)
    moved = State(state.tensors, state.meta, parts={**state.parts, name: elsewhere})
    saying(restore, moved, {"": model}, {})
    saying(restore, state, {"": built(None)}, {})
    saying(restore, capture({"": built(None, inner=24)}, {}), {"": model}, {})
    saying(state.load_into, built(None))
    return said


def test_what_does_not_fit_is_refused_by_name(places):
    for said in places.run(MESHES["shard 2, tensor 2"], refused):
        holes, partial, moved, plain, wider, loaded = said
        assert "not neighbours in the whole" in holes
        assert "terms of a sum" in partial
        assert "the State has [0:1,0:10] of tensor 'blocks.0.up.weight'" in moved
        assert "this process needs all of it" in plain
        assert "of the State is (24, 10), and here it is (20, 10)" in wider
        assert "Take the model from the store" in loaded


def holding(mesh, foreach):
    """Whether parts are held over a backward pass, and over a step."""
    model = built(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    trained(model, optimizer, mesh, range(1))
    held = HeldState({"": model}, {"optimizer": optimizer}, {})
    before = capture({"": model}, {"optimizer": optimizer}).clone()
    model(torch.ones(4, 8, dtype=torch.float64)).sum().backward()
    state = held.state()
    same = state is not None and all(
        torch.equal(tensor, before.tensors[name]) for name, tensor in state.tensors.items()
    )
    parts = state is not None and state.parts == before.parts
    optimizer.step()
    return same, parts, held.state() is None


@pytest.mark.parametrize("mesh", ["shard 2", "shard 2, tensor 2", "tensor 2"])
@pytest.mark.parametrize("foreach", [False, True])
def test_parts_are_held_until_an_optimizer_steps(places, mesh, foreach):
    if foreach and mesh == "tensor 2":
        pytest.skip("torch does not take sharded and other parameters at once")
    assert set(places.run(MESHES[mesh], holding, foreach)) == {(True, True, True)}
