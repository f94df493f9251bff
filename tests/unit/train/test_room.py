"""A run that no cluster of this size can hold is refused, and says what would fit."""

import pytest

import elastix
from elastix.errors import ConfigError
from elastix.train.on_ray import room


@pytest.fixture
def nodes(monkeypatch):
    there = [
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    monkeypatch.setattr(room.ray, "nodes", lambda: there)
    return there


def test_too_many_workers_are_told_what_there_is(nodes):
    with pytest.raises(ConfigError) as caught:
        room.check_capacity(elastix.ScalingConfig(num_workers=3, cpus_per_worker=1.5))
    assert str(caught.value) == (
        "num_workers=3 with 1.5 CPU each can never be placed: the cluster has room for 1 (its "
        "nodes have 2 CPU, 0 GPU). Nothing was started. Ask for fewer workers, or for a fraction "
        "of a CPU or GPU each (cpus_per_worker=0.5)."
    )


def test_where_there_is_no_gpu_fewer_workers_would_not_help(nodes):
    with pytest.raises(ConfigError, match=r"1 GPU each .* Ask for gpus_per_worker=0, or see"):
        room.check_capacity(elastix.ScalingConfig(num_workers=2, gpus_per_worker=1))
    nodes[0]["Resources"]["GPU"] = 1.0
    with pytest.raises(ConfigError, match="Ask for fewer workers, or for a fraction"):
        room.check_capacity(elastix.ScalingConfig(num_workers=2, gpus_per_worker=1))


def test_what_fits_is_counted(nodes):
    assert room.check_capacity(elastix.ScalingConfig(num_workers=(1, 9), cpus_per_worker=0.5)) == 4
