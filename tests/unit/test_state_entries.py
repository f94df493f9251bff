"""What of a State is of a stage, or of some kinds of objects; and that of all stages together."""

from collections import OrderedDict

import pytest
import torch

from elastix.state import State, capture, parameter_names, restore
from elastix.state_entries import (
    entries_of,
    is_optimizer,
    meta_of_stages,
    model_of,
    of_stage,
    without,
    without_stage,
)
from tests.unit.test_state import CountsSteps, HasMore, Net, train


def by_groups(layers):
    """An optimizer with a group for weights, and one for biases."""
    weights, biases = [x.weight for x in layers.values()], [x.bias for x in layers.values()]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.5}])


def counting(layers):
    """An optimizer that keeps something which is of no parameter."""
    return CountsSteps(torch.nn.ModuleDict(layers).parameters(), lr=0.1, momentum=0.9)


def by_name(layers):
    return torch.optim.AdamW(torch.nn.ModuleDict(layers).named_parameters(), lr=0.1)


@pytest.mark.parametrize("of_layers", [by_groups, by_name, counting])
def test_stages_make_up_the_state_of_the_whole_model_and_each_takes_its_own_back(of_layers):
    layers = {"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(4, 2)}
    whole = torch.nn.Sequential(OrderedDict(layers))
    optimizer = of_layers(layers)
    train(whole, optimizer)
    want = capture({"": whole}, {"optimizer": optimizer})
    parts = []
    for name, layer in layers.items():
        stage, own = torch.nn.ModuleDict({name: layer}), of_layers({name: layer})
        names = set(parameter_names({"": stage}).values())
        restore(of_stage(want, names), {"": stage}, {"optimizer": own})
        assert len([key for key in own.state if isinstance(key, torch.Tensor)]) == 2
        parts.append(capture({"": stage}, {"optimizer": own}))
    assert meta_of_stages([part.meta for part in parts]) == want.meta
    assert {name for part in parts for name in part.tensors} == want.tensors.keys()


def test_metadata_of_replicas_that_are_no_stages_is_that_of_the_first():
    one, other = Net(0), Net(1)
    metas = []
    for model in (one, other):
        optimizer = torch.optim.AdamW(model.parameters())
        if model is other:
            train(model, optimizer)
        metas.append(capture({"": model}, {"optimizer": optimizer}, {"step": len(metas)}).meta)
    assert meta_of_stages(metas) == metas[0]


def trained():
    """A State of a model, two optimizers and a scheduler."""
    model = Net(0)
    first = torch.optim.AdamW(model.first.parameters(), lr=0.1)
    second = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
    for optimizer in (first, second):
        train(model, optimizer)
    others = {
        "optimizer": first,
        "optimizer1": second,
        "scheduler": torch.optim.lr_scheduler.StepLR(first, 2),
    }
    return capture({"": model}, others, {"step": 3})


def test_the_others_of_a_state_are_not_its_model_nor_its_counts():
    rest = without(trained(), ["optimizer1"])
    assert sorted(rest.meta) == ["@optimizer", "@scheduler"]
    assert rest.tensors
    assert all(name.startswith("@optimizer/") for name in rest.tensors)


def test_a_model_is_taken_out_with_what_it_has_besides_tensors():
    model, other = (torch.nn.Sequential(HasMore({"n": n, "t": torch.ones(n)})) for n in (1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = {"optimizer": optimizer, "extra": optimizer}
    state = capture({"": model, "@module1/": other}, others, {"step": 3})
    assert model_of(state).manifest() == capture({"": model}, {}).manifest()


def test_a_kind_is_of_all_objects_of_it():
    found = entries_of(trained(), "optimizer")
    assert sorted(found.meta) == ["@optimizer", "@optimizer1"]
    assert {name.split("/")[0] for name in found.tensors} == {"@optimizer", "@optimizer1"}


def test_an_optimizer_of_another_name_is_one_and_that_of_outer_steps_is_none_of_a_models():
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    others = {"late": optimizer, "outer_optimizer": optimizer}
    found = entries_of(capture({"": model}, others), "optimizer")
    assert list(found.meta) == ["@late"]
    assert {name.split("/")[0] for name in found.tensors} == {"@late"}


def test_a_part_of_a_tensor_stays_one():
    state = trained()
    name = next(iter(entries_of(state, "optimizer").tensors))
    held = State(state.tensors, state.meta, parts={name: "a part", "first.weight": "another"})
    assert entries_of(held, "optimizer").parts == {name: "a part"}


def test_parameters_that_a_stage_does_not_have_are_named():
    state = trained()
    assert without_stage(state, {"first.weight", "last.weight"}) == ["first.bias", "last.bias"]
    assert without_stage(of_stage(state, {"first.weight"}), {"first.weight"}) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"param_groups": []},
        {"state": {}, "param_groups": {}},
        {"state": {}, "param_groups": [{}]},
        {"state": {"$items": []}, "param_groups": []},
    ],
)
def test_what_only_looks_like_an_optimizer_is_none(value):
    assert not is_optimizer(value)
    assert is_optimizer(trained().meta["@optimizer"])
