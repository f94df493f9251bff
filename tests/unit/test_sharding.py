"""Names of stored parts, and which sets of them are one whole tensor: against a naive model."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate

from elastix.errors import StateError
from elastix.mesh_check import pretended
from elastix.sharding import (
    Part,
    Shard,
    held,
    is_sharded,
    like,
    local,
    named_part,
    stored_name,
    tensors_of,
)
from elastix.sharding import whole_of as whole_of_
from elastix.state import State, capture, restore, warm_start
from tests.crew import built, skip_if_refused


class Info(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def part(*pairs):
    return Part(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def whole_of(infos):
    """Dtype and shape of the one tensor that these stored names are of."""
    ((name, stored),) = tensors_of(infos).items()
    return whole_of_(name, stored, infos)


def stored(parts, dtype="float32"):
    return {stored_name("w", p): Info(dtype, p.shape) for p in parts}


boxes = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), min_size=1, max_size=4
)


@given(st.text(max_size=12), boxes)
def test_a_name_with_a_part_is_read_as_it_was_written(name, pairs):
    one = part(*pairs)
    assert named_part(stored_name(name, one)) == (name, one)
    assert tensors_of([stored_name(name, one)]) == {name: {stored_name(name, one): one}}


@pytest.mark.parametrize(
    "name",
    [
        *("w", "w[0]", "w[0:1", "w[]", "w[:]", "w[-1:2]", "w[0:1,]", "w[0:1]x", "w[+0:1]"),
        *("w[0:1 ]", "w[0:1:2]", "w[\u0660:1]", f"w[0:{10**18}]"),
    ],
)
def test_what_is_written_otherwise_is_the_name_of_a_whole_tensor(name):
    assert named_part(name) is None


def grid(shape, cuts):
    """The parts of a whole that is cut along each axis at these places."""
    parts = [Part((), ())]
    for size, places in zip(shape, cuts, strict=True):
        ends = sorted({0, size, *(place % (size + 1) for place in places)})
        parts = [Part((*p.start, a), (*p.stop, b)) for p in parts for a, b in pairwise(ends)]
    return parts


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cuts = [draw(st.lists(st.integers(0, 6), max_size=3)) for _ in shape]
    return tuple(shape), grid(shape, cuts)


@given(grids(), st.randoms())
def test_parts_that_tile_a_whole_are_one_tensor_in_any_order(made, random):
    shape, parts = made
    random.shuffle(parts)
    assert whole_of(stored(parts)) == ("float32", shape)
    empty = Part(tuple(shape), tuple(shape))  # of a place that has nothing
    assert whole_of(stored([*parts, empty])) == ("float32", shape)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=6, unique=True))
def test_exactly_the_sets_of_parts_are_taken_that_cover_each_element_once(found):
    """Whatever boxes there are: taken if and only if painting them leaves a one everywhere."""
    parts = list({part(sorted((a, b)), sorted((c, d))) for a, b, c, d in found})
    stops = tuple(max(p.stop[axis] for p in parts) for axis in (0, 1))
    painted = np.zeros(stops, int)
    for p in parts:
        painted[p.within(part((0, stops[0]), (0, stops[1])))] += 1
    if (painted == 1).all():
        assert whole_of(stored(parts)) == ("float32", stops)
    else:
        with pytest.raises(StateError, match="'w' are not one tensor"):
            whole_of(stored(parts))


@pytest.mark.parametrize(
    ("infos", "says"),
    [
        ({"w[0:2]": (2,), "w[3:4]": (1,)}, "1 elements of it are in none"),
        ({"w[0:2]": (2,), "w[1:4]": (3,)}, "some overlap"),
        ({"w[0:2]": (2,), "w[0:2,0:1]": (2, 1)}, "another number of axes"),
        ({"w[0:2]": (2,), "w[2:4]": (3,)}, r"'w\[2:4\]' holds \(3,\)"),
        ({"w[0:2]": (2,), "w": (4,)}, "as a whole, and in parts too"),
        ({"w[4:2]": (2,)}, "ends before it begins"),
        ({"w[0:2]": (2,), "w[00:2]": (2,)}, "is not how"),
        ({"w[0:999999999999999999]": (2,)}, "holds"),
        ({"w[" + ",".join(["0:1"] * 9) + "]": (1,) * 9}, None),
        (
            {
                "w[" + ",".join(["0:1"] * 9) + "]": (1,) * 9,
                "w[" + ",".join(["1:2"] * 9) + "]": (1,) * 9,
            },
            "split along 9 axes",
        ),
    ],
)
def test_hostile_parts_are_named_and_refused(infos, says):
    made = {name: Info("float32", shape) for name, shape in infos.items()}
    if says is None:
        assert whole_of(made) == ("float32", (1,) * 9)
        return
    with pytest.raises(StateError, match=says):
        whole_of(made)


def test_a_tensor_that_is_stored_whole_is_taken_as_it_is():
    assert whole_of({"w": Info("float64", (2, 3))}) == ("float64", (2, 3))


def test_parts_of_different_dtypes_are_refused():
    made = {"w[0:1]": Info("float32", (1,)), "w[1:2]": Info("float64", (1,))}
    with pytest.raises(StateError, match="another dtype"):
        whole_of(made)


@given(grids(), grids())
def test_a_part_is_put_together_from_what_overlaps_it(one, other):
    shape = one[0]
    whole = Part((0,) * len(shape), shape)
    values = torch.arange(1, np.prod(shape) + 1).view(shape)
    there = {p: values[p.within(whole)] for p in one[1]}
    for wanted in (p for p in other[1] if len(p.start) == len(shape)):
        wanted = wanted.overlap(whole)
        made = torch.zeros(wanted.shape, dtype=torch.int64)
        for p, tensor in there.items():
            both = p.overlap(wanted)
            if not both.empty:
                made[both.within(wanted)] = tensor[both.within(p)]
        assert torch.equal(made, values[wanted.within(whole)])


def test_plain_tensors_are_handed_through_as_they_are():
    tensor = torch.nn.Parameter(torch.ones(2))
    assert local(tensor) is tensor
    assert like(tensor, tensor) is tensor
    assert not is_sharded(tensor)
    tensors = {"w": tensor}
    assert State(tensors).stored is tensors


# ------------------------------------------------------------------------ DTensors, on one process


@pytest.fixture
def mesh():
    skip_if_refused()
    with pretended({"shard": 2, "tensor": 2}) as made:
        yield made


def test_a_tensor_that_each_place_has_all_of_is_in_no_parts(mesh):
    whole = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate(), Replicate()], run_check=False)
    assert is_sharded(whole)
    assert held(whole) is None


def first_part(whole, at):
    return whole if at is None else whole[at.part.within(Part((0,) * len(at.whole), at.whole))]


def test_the_first_place_of_a_mesh_takes_its_part_of_a_whole_state_and_gives_it_back(mesh):
    whole = built(None)
    slots = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=False)
    for number, parameter in enumerate(whole.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1)
    slots.step()
    state = capture({"": whole}, {"optimizer": slots}).clone()
    assert not state.parts
    model = built(mesh, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, foreach=False)
    restore(state, {"": model}, {"optimizer": optimizer})
    mine = capture({"": model}, {"optimizer": optimizer})
    assert mine.meta == state.meta
    assert mine.parts["blocks.0.up.weight"] == Shard(Part((0, 0), (5, 10)), (20, 10))
    for name, tensor in mine.tensors.items():
        assert torch.equal(tensor, first_part(state.tensors[name], mine.parts.get(name))), name
    moments = "@optimizer/state/blocks.0.up.weight/exp_avg"
    assert mine.parts[moments] == mine.parts["blocks.0.up.weight"]
    again = built(mesh, seed=2)
    other = torch.optim.AdamW(again.parameters(), lr=0.2, foreach=False)
    restore(mine.clone(), {"": again}, {"optimizer": other})
    assert capture({"": again}, {"optimizer": other}).manifest() == mine.manifest()


def test_what_a_warm_start_gives_an_optimizer_are_this_places_moments(mesh):
    whole = built(None)
    slots = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=False)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    slots.step()
    ancestor = capture({"": whole}, {"optimizer": slots})
    model = built(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    names = {name: name for name, _ in model.named_parameters()}
    assert warm_start({"": model}, {"optimizer": optimizer}, ancestor, names) == len(names)
    mine = capture({"": model}, {"optimizer": optimizer})
    moments = "@optimizer/state/blocks.0.up.weight/exp_avg"
    assert torch.equal(mine.tensors[moments], ancestor.tensors[moments][:5])


class Kept:
    """Something of the user's that keeps a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def test_other_objects_are_given_what_they_have_now(mesh):
    parameter = built(mesh).blocks[0].up.weight
    values = {"@kept": {"tensor": {"$tensor": "@kept/tensor"}}}
    whole = State({"@kept/tensor": torch.rand(20, 10)}, values)
    sharded, plain = Kept(parameter.detach().clone()), Kept(torch.zeros(20, 10))
    for kept in (sharded, plain):
        restore(whole, {}, {"kept": kept})
    assert torch.equal(local(sharded.tensor).float(), whole.tensors["@kept/tensor"][:5])
    assert sharded.tensor.placements == parameter.placements
    assert plain.tensor is whole.tensors["@kept/tensor"]
    mine = capture({}, {"kept": sharded})
    with pytest.raises(StateError, match="this process needs all of it"):
        restore(mine, {}, {"kept": plain})


def test_what_is_no_part_or_of_another_whole_is_refused(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = [_StridedShard(0, split_factor=2), Replicate()]
    with pytest.raises(StateError, match="not neighbours in the whole"):
        held(DTensor.from_local(torch.ones(4), mesh, strided))
    with pytest.raises(StateError, match="terms of a sum"):
        local(DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()]))
    model = built(mesh)
    state = capture({"": model}, {})
    name = "blocks.0.up.weight"
    with pytest.raises(StateError, match=r"\(3, 10\) elements are given for a place that holds"):
        like(torch.ones(3, 10), model.blocks[0].up.weight)
    elsewhere = Shard(Part((5, 0), (10, 10)), (20, 10))
    moved = State(state.tensors, state.meta, parts={**state.parts, name: elsewhere})
    with pytest.raises(StateError, match=r"the State has \[5:10,0:10\] of tensor"):
        restore(moved, {"": model}, {})
    with pytest.raises(StateError, match=r"is \(24, 10\), and here it is \(20, 10\)"):
        restore(capture({"": built(None, inner=24)}, {}), {"": model}, {})
    with pytest.raises(StateError, match="Take the model from the store"):
        state.load_into(built(None))
    assert state.only({f"{name}[0:5,0:10]"}).tensors.keys() == {name}
    assert state.only({name}).tensors == {}
