"""What is tracked must not change within the loop over slices: what does is named."""

import copy
from collections import deque

import numpy as np
import pytest
import torch

from elastix.errors import ConfigError
from elastix.train.replica.slice_effects import SliceEffects
from tests.unit.train.test_rewind import Kept


def found(others, loop):
    effects = SliceEffects()
    effects.begin(others)
    loop()
    try:
        effects.check(others)
    except ConfigError as error:
        return str(error).split(",")[0]
    return None


def scheduled():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return {"optimizer": optimizer, "scheduler": scheduler}


def test_a_scheduler_that_steps_and_a_rate_that_changes_are_named():
    others = scheduled()
    assert found(others, lambda: None) is None
    assert found({"scheduler": others["scheduler"]}, others["scheduler"].step) == "scheduler"
    assert found(others, lambda: others["optimizer"].param_groups[0].update(lr=0.2)) == "optimizer"


def test_gradients_and_random_numbers_are_no_effect():
    others = {**scheduled(), "rng": Kept(x=1)}
    (parameter,) = others["optimizer"].param_groups[0]["params"]

    def loop():
        parameter.square().sum().backward()
        others["rng"].state["x"] = 2

    assert found(others, loop) is None


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1.5, 2.5),
        (float("nan"), 0.0),
        ([1, 2], [1, 3]),
        ((1, {"a": None}), (1, {"a": 1})),
        (deque([1.0]), deque([2.0])),
        (np.zeros(3), np.ones(3)),
        (torch.zeros(3), torch.ones(3)),
        (torch.zeros(99), torch.ones(99)),
        ({"a": [torch.zeros(3)]}, {"a": [torch.zeros(3), torch.zeros(3)]}),
    ],
)
def test_a_value_that_changes_is_seen_and_one_that_is_set_again_is_not(value, other):
    kept = Kept(value=value)
    assert found({"kept": kept}, lambda: kept.state.update(value=value)) is None
    if not isinstance(value, torch.Tensor | dict):
        again = copy.deepcopy(value)
        assert found({"kept": kept}, lambda: kept.state.update(value=again)) is None
    assert found({"kept": kept}, lambda: kept.state.update(value=other)) == "kept"


def test_an_average_that_moves_is_seen():
    model = torch.nn.Linear(30, 30)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert found({"average": average}, lambda: average(torch.zeros(1, 30))) is None
    assert found({"average": average}, lambda: average.update_parameters(model)) == "average"


class Copied(Kept):
    """Each look at its state is a copy of large tensors."""

    def state_dict(self):
        return {"large": self.state["large"].clone()}


def test_what_cannot_be_compared_is_let_be():
    assert found({"copied": Copied(large=torch.zeros(999))}, lambda: None) is None
