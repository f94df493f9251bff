"""What a step changes beside gradients is put back, if it is void: whenever it changed it."""

import copy
from collections import deque, namedtuple

import numpy as np
import pytest
import torch

from elastix.train.replica.rewind import Rewind


class Kept:
    """An object with a state."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def rewound(others, step):
    """As a void step: what was changed before and after its last backward pass is put back."""
    rewind = Rewind()
    rewind.outline(others)
    step()
    changed = rewind.fill_in(others)
    step()
    rewind.due = True
    if changed is None:
        rewind.restore(others)
    return changed


def test_schedulers_and_learning_rates_are_as_when_the_step_began():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)
    was = copy.deepcopy(scheduler.state_dict())
    optimizer.step()
    assert rewound({"optimizer": optimizer, "scheduler": scheduler}, scheduler.step) is None
    assert scheduler.state_dict() == was
    assert optimizer.param_groups[0]["lr"] == 0.1


Best = namedtuple("Best", "epoch score")


def test_so_are_arrays_sets_and_tuples_with_names():
    state = {
        "counts": np.zeros(4),
        "seen": {1},
        "last": deque([0.5], maxlen=2),
        "best": Best(1, 0.5),
        "number": np.int64(3),
    }
    meter, was = Kept(**copy.deepcopy(state)), state

    def step():
        meter.state["counts"] += 1
        meter.state["seen"].add(2)
        meter.state["last"].append(0.7)
        meter.state["best"] = Best(2, 0.7)
        meter.state["number"] += 1

    assert rewound({"meter": meter}, step) is None
    assert str(meter.state) == str(was)


def test_numbers_and_short_lists_are_as_when_the_step_began():
    counter = Kept(steps=3, last=[0.5], nested={"best": (1, None)})

    def step():
        counter.state["steps"] += 1
        counter.state["last"].append(0.1)
        counter.state["nested"]["best"] = (2, "a")

    assert rewound({"counter": counter}, step) is None
    assert counter.state == {"steps": 3, "last": [0.5], "nested": {"best": (1, None)}}


@pytest.mark.parametrize("before", [True, False])
def test_a_tensor_is_put_back_if_it_changed_after_backward_and_named_if_before(before):
    average, rewind = Kept(mean=torch.zeros(100)), Rewind()
    others = {"average": average}
    rewind.outline(others)
    if before:
        average.state["mean"] += 1
        assert rewind.fill_in(others) == "average"
        return
    assert rewind.fill_in(others) is None
    average.state["mean"] += 1
    rewind.due = True
    rewind.restore(others)
    assert not average.state["mean"].any()


@pytest.mark.parametrize("before", [True, False])
def test_so_is_a_long_list(before):
    log, rewind = Kept(losses=[0.0] * 5000), Rewind()
    rewind.outline({"log": log})
    if before:
        log.state["losses"].append(1.0)
        assert rewind.fill_in({"log": log}) == "log"
        return
    assert rewind.fill_in({"log": log}) is None
    log.state["losses"].append(1.0)
    rewind.due = True
    rewind.restore({"log": log})
    assert len(log.state["losses"]) == 5000


@pytest.mark.parametrize("kind", [list, deque])
def test_what_keeps_its_length_is_put_back_too(kind):
    losses = deque([0.0] * 100, maxlen=100) if kind is deque else [0.0] * 100
    log = Kept(losses=losses)

    def step():
        if kind is deque:
            losses.append(1.0)
        else:
            losses[7] += 1.0

    assert rewound({"log": log}, step) is None
    assert list(log.state["losses"]) == [0.0] * 100
    assert type(log.state["losses"]) is kind


def test_an_array_of_many_elements_that_was_changed_before_is_named():
    counts, rewind = Kept(histogram=np.zeros((100, 100)).T), Rewind()
    rewind.outline({"counts": counts})
    assert rewind.fill_in({"counts": counts}) is None
    rewind.outline({"counts": counts})
    counts.state["histogram"][3, 5] += 1
    assert rewind.fill_in({"counts": counts}) == "counts"


def test_what_was_tracked_within_the_step_is_put_back_to_its_end():
    counter, rewind = Kept(steps=3), Rewind()
    rewind.outline({})
    assert rewind.fill_in({"counter": counter}) is None
    counter.state["steps"] += 1
    rewind.due = True
    rewind.restore({"counter": counter})
    assert counter.state == {"steps": 3}


@pytest.mark.parametrize("before", [True, False])
def test_so_is_an_average_of_weights(before):
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9))
    average, rewind = torch.optim.swa_utils.AveragedModel(model, use_buffers=True), Rewind()
    average.update_parameters(model)
    was = copy.deepcopy(average.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    rewind.outline({"ema": average})
    if before:
        average.update_parameters(model)
        assert rewind.fill_in({"ema": average}) == "ema"
        return
    assert rewind.fill_in({"ema": average}) is None
    average.update_parameters(model)
    rewind.due = True
    rewind.restore({"ema": average})
    now = average.state_dict()
    assert now.keys() == was.keys()
    assert all(torch.equal(now[name], value) for name, value in was.items())


@pytest.mark.parametrize("number", [3, 300])
@pytest.mark.parametrize("kind", [list, dict])
def test_an_average_that_is_changed_past_its_version_counters_is_named(kind, number):
    tensors = [torch.zeros(10, 10) for _ in range(number)]
    state = dict(enumerate(tensors)) if kind is dict else tensors
    average, rewind = Kept(shadow=state), Rewind()
    rewind.outline({"average": average})
    assert rewind.fill_in({"average": average}) is None
    for tensor in tensors:
        tensor.data.lerp_(torch.ones(10, 10), 0.1)
    assert rewind.fill_in({"average": average}) == "average"


def test_so_is_one_that_is_a_module():
    average, rewind = torch.nn.Linear(20, 20), Rewind()
    rewind.outline({"average": average})
    for parameter in average.parameters():
        parameter.data.mul_(0.9)
    assert rewind.fill_in({"average": average}) == "average"


def set_out(model):
    rewind = Rewind()
    rewind.prepared([model])
    rewind.set_out(copies=False)
    return rewind


def test_parameters_and_moments_are_as_when_the_step_turned_out_void():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    was = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    rewind = set_out(model)
    assert rewind.keep_tensors([optimizer], again=False)
    rewind.due = True
    with torch.no_grad():
        model.weight.data.mul_(0.9)
    optimizer.state[model.weight]["momentum_buffer"].mul_(0.5)
    optimizer.state.pop(model.bias)
    rewind.restore({"optimizer": optimizer})
    assert str((model.state_dict(), optimizer.state_dict()["state"])) == str(was)


def test_a_state_that_is_made_anew_whenever_it_is_asked_for_is_put_back():
    class Mean(Kept):
        def state_dict(self):
            return {"mean": torch.tensor(self.state["mean"]), "kind": {1, 2}}

        def load_state_dict(self, state):
            self.state["mean"] = state["mean"].item()

    mean = Mean(mean=2.0)

    def step():
        mean.state["mean"] += 1

    assert rewound({"mean": mean}, step) is None
    assert mean.state == {"mean": 2.0}


@pytest.mark.parametrize("given", [True, False])
def test_a_step_that_is_done_again_may_begin_with_a_state_that_has_come_since(given):
    model = torch.nn.Linear(2, 1)
    rewind = set_out(model)
    assert rewind.keep_tensors([], again=True)
    rewind.due = True
    rewind.restore({})
    with torch.no_grad():
        model.weight.add_(1)
    if given:
        rewind.forget_tensors()
    assert rewind.begins_otherwise() is not given


def test_the_first_step_of_a_joiner_is_done_again_with_what_it_began_with():
    """It has not seen yet what the loop does."""
    model, rewind = torch.nn.Linear(2, 1), Rewind()
    rewind.prepared([model])
    rewind.set_out(copies=True)
    was = model.weight.clone()
    with torch.no_grad():
        model.weight.mul_(0.9)
    assert rewind.keep_tensors([], again=False)
    rewind.due = True
    rewind.restore({})
    assert torch.equal(model.weight, was)


def test_a_frozen_part_of_inference_mode_stays_as_it_is():
    with torch.inference_mode():
        frozen = torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)
    rewind = set_out(torch.nn.Sequential(frozen, torch.nn.Linear(2, 1)))
    assert rewind.keep_tensors([], again=False)
    rewind.due = True
    rewind.restore({})


@pytest.mark.parametrize("past_the_counters", [True, False])
def test_parameters_that_change_before_the_step_turns_out_void_are_named_or_copied(
    past_the_counters,
):
    model = torch.nn.Linear(2, 1)
    rewind = set_out(model)

    def step():
        with torch.no_grad():
            weight = model.weight.data if past_the_counters else model.weight
            weight.mul_(0.9)

    step()
    assert not rewind.keep_tensors([], again=False)
    rewind.set_out(copies=True)
    step()
    rewind.left(copies=True)  # so they are copied from now on
    was = model.weight.clone()
    rewind.set_out(copies=True)
    step()
    assert rewind.keep_tensors([], again=True)
    rewind.due = True
    rewind.restore({})
    assert torch.equal(model.weight, was)
    assert not rewind.begins_otherwise()
