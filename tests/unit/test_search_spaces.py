"""The five spaces: what they sample builds, runs forward and backward, and survives JSON."""

import importlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.search.config_values import generator
from elastix.search.inherit import match_tensors
from elastix.store import signature
from search_spaces import conv1d, convnet, mlp, tabular, transformer

INPUTS = {
    "mlp": lambda: torch.rand(3, 1, 8, 8),
    "convnet": lambda: torch.rand(3, 1, 8, 8),
    "conv1d": lambda: torch.rand(3, 1, 300),
    "tabular": lambda: torch.rand(3, 64),
    "transformer": lambda: torch.randint(0, 256, (3, 12)),
}
OUTPUTS = {"mlp": 10, "convnet": 10, "conv1d": 2, "tabular": 1, "transformer": 10}
SPACES = {
    space.__name__.rpartition(".")[2]: space
    for space in (mlp, convnet, conv1d, tabular, transformer)
}


def check(name: str, config: dict) -> None:
    module = importlib.import_module(f"search_spaces.{name}")
    module.space.check(config)
    config = json.loads(json.dumps(config))
    module.space.check(config)
    torch.manual_seed(0)
    model = module.build(config)
    out = model(INPUTS[name]())
    assert out.shape == (3, OUTPUTS[name])
    out.square().sum().backward()
    for parameter, tensor in model.named_parameters():
        assert tensor.grad is not None, (parameter, config)
        assert torch.isfinite(tensor.grad).all()


@pytest.mark.parametrize("name", INPUTS)
@settings(max_examples=8)
@given(st.integers(0, 2**31))
def test_samples_and_their_mutations_build_and_train(name, seed):
    space = SPACES[name].space
    config = space.sample(seed)
    check(name, config)
    changed = space.mutate(config, generator(seed, 1))
    check(name, changed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", INPUTS)
@settings(max_examples=200)
@given(st.integers(0, 2**31))
def test_very_many_samples_build_and_train(name, seed):
    check(name, SPACES[name].space.sample(seed))


@pytest.mark.parametrize("name", INPUTS)
def test_the_default_builds_and_trains(name):
    check(name, SPACES[name].space.get_default_configuration())


@pytest.mark.parametrize("length", [1, 7, 50])
def test_conv1d_takes_any_length(length):
    config = {
        **conv1d.space.get_default_configuration(),
        "convolutions": [{"filters": 8, "kernel": 21, "pool": 10}] * 4,
    }
    assert conv1d.build(config)(torch.rand(2, 1, length)).shape == (2, 2)


@pytest.mark.parametrize("name", INPUTS)
def test_a_child_inherits_from_its_parent(name):
    """Most mutations leave most layers as they are; the signatures must show it."""
    space, build = SPACES[name].space, SPACES[name].build
    shares = []
    for seed in range(12):
        config = space.sample(seed)
        child = space.mutate(config, generator(seed, 1))
        mine, theirs = signature(build(child)), signature(build(config))
        _, layers = match_tensors(mine, theirs, "lcs")
        shares.append(layers / len(mine.layers))
    assert sorted(shares)[len(shares) // 2] >= 0.5, shares
