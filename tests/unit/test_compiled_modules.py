"""Modules that torch.compile has wrapped: plain names, and the same compiled computation."""

import copy

import pytest
import torch
from torch import nn

from elastix.compiled_modules import plain
from elastix.errors import StateError
from elastix.state import State


class Counting:
    """A backend that counts its graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, _inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(nn.Linear(3, 4), inner, nn.ModuleList([nn.Identity()])[0], inner)


def compiled_in_part(backend):
    """A part that is there twice, one of torch's own, and a part of a part."""
    model = made()
    model[1] = model[3] = torch.compile(model[1], backend=backend)
    model[0] = torch.compile(model[0], backend=backend)
    return model


def test_parts_that_are_compiled_alone_have_plain_names_and_stay_compiled():
    backend = Counting()
    model = compiled_in_part(backend)
    reference = made()
    reference.load_state_dict(plain(copy.deepcopy(model)).state_dict())
    assert plain(model) is model
    assert list(model.state_dict()) == list(made().state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in made().named_parameters()
    ]
    x = torch.randn(5, 3)
    assert torch.equal(model(x), reference(x))
    assert backend.graphs > 0
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_compiled_as_a_whole_gives_what_is_within():
    model = made()
    assert plain(torch.compile(model, backend="eager")) is model
    assert plain(model) is model


def test_a_part_whose_wrapper_has_hooks_keeps_it():
    model = compiled_in_part("eager")
    called = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    plain(model)
    model(torch.randn(5, 3))
    assert called
    assert "0._orig_mod.weight" in model.state_dict()
    assert "1.0.weight" in model.state_dict()


@pytest.mark.parametrize("build", [made, lambda: compiled_in_part("eager")])
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_fits_what_is_compiled(build, whole):
    source = made()
    state = State({name: tensor.clone() for name, tensor in source.state_dict().items()})
    target = torch.compile(build(), backend="eager") if whole else build()
    assert state.load_into(target) is target
    x = torch.randn(5, 3)
    assert torch.equal(target(x), source.eval()(x))
    with pytest.raises(StateError):
        state.load_into(torch.compile(nn.Linear(2, 2), backend="eager"))
