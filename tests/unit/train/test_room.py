"""A run that no cluster of this size can hold is refused, and says what would fit."""

import re
from types import SimpleNamespace

import pytest

import elastix
from elastix.errors import ConfigError
from elastix.train.on_ray import room


@pytest.fixture
def nodes(monkeypatch):
    there = [
        {"Alive": True, "NodeID": "a", "Resources": {"CPU": 2.0}},
        {"Alive": False, "NodeID": "b", "Resources": {"GPU": 8.0}},
    ]
    monkeypatch.setattr(room.ray, "nodes", lambda: there)
    return there


def test_too_many_workers_are_told_what_there_is(nodes):
    with pytest.raises(ConfigError) as caught:
        room.check_capacity(elastix.ScalingConfig(num_workers=3, cpus_per_worker=1.5))
    assert str(caught.value) == (
        "num_workers=3 with 1.5 CPU each can never be placed: the cluster has room for 1 (its "
        "nodes have 2 CPU, 0 GPU). Nothing was started. Ask for fewer workers (num_workers=1), or "
        "for less of a node for each (cpus_per_worker=0.5)."
    )


def test_where_there_is_no_gpu_fewer_workers_would_not_help(nodes):
    with pytest.raises(ConfigError, match=r"1 GPU each .* Ask for gpus_per_worker=0, or see"):
        room.check_capacity(elastix.ScalingConfig(num_workers=2, gpus_per_worker=1))
    nodes[0]["Resources"]["GPU"] = 1.0
    with pytest.raises(ConfigError, match=r"Ask for fewer workers .*\(gpus_per_worker=0.5\)"):
        room.check_capacity(elastix.ScalingConfig(num_workers=2, gpus_per_worker=1))


def test_what_fits_is_counted(nodes):
    assert room.check_capacity(elastix.ScalingConfig(num_workers=(1, 9), cpus_per_worker=0.5)) == 4
    assert room.fit_on_nodes(elastix.ScalingConfig(cpus_per_worker=0.5), avoided={"a"}) == 0


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        ({"num_workers": 9, "cpus_per_worker": 0.5}, r".*=4\), or for less .*_worker=0.1"),
        ({"num_workers": 50, "cpus_per_worker": 0.5}, r"fewer workers \(num_workers=4\)\.$"),
        (
            {"num_workers": 1, "cpus_per_worker": 3.0},
            r"less of a node for each \(cpus_per_worker=2",
        ),
        ({"num_workers": 50, "cpus_per_worker": 0.05}, r"fewer workers \(num_workers=40\)\.$"),
        ({"num_workers": 1, "gpus_per_worker": 1, "cpus_per_worker": 9}, "gpus_per_worker=0, or"),
    ],
)
def test_what_is_advised_fits_and_is_not_what_was_asked_for(nodes, asked, advice):
    with pytest.raises(ConfigError, match="Ask for " + advice) as caught:
        room.check_capacity(elastix.ScalingConfig(**asked))
    found = re.search(r"\(cpus_per_worker=([0-9.]+)\)\.$", str(caught.value))
    assert (found is not None) is ("less" in advice)
    if found:
        room.check_capacity(
            elastix.ScalingConfig(**{**asked, "cpus_per_worker": float(found.group(1))})
        )


@pytest.mark.parametrize(("actor", "advice"), [(None, "or wait longer"), ("1f", "by its ctx")])
def test_a_trial_is_not_told_to_wait_for_the_end_of_its_own_campaign(monkeypatch, actor, advice):
    context = SimpleNamespace(get_actor_id=lambda: actor)
    monkeypatch.setattr(room.ray, "get_runtime_context", lambda: context)
    assert advice in room.how_to_make_room()


@pytest.mark.parametrize("crew", [{}, {"shard": 2}])
def test_ctrl_c_while_room_is_waited_for_leaves_none_reserved(monkeypatch, crew):
    made, left = [], []

    class Group:
        def __init__(self, *_, **__):
            made.append(self)
            left.append(self)

        def wait(self, timeout_s):
            if made.index(self) == 1:
                raise KeyboardInterrupt
            return len(made) > 1

    monkeypatch.setattr(room, "placement_group", Group)
    monkeypatch.setattr(room, "remove_placement_group", left.remove)
    monkeypatch.setattr(room.ray, "available_resources", lambda: {"CPU": 1.0})
    scaling = elastix.ScalingConfig(num_workers=(2, 4), crew=crew)
    with pytest.raises(KeyboardInterrupt):
        room.reserve("it", scaling, 4, 1.0, None)
    assert len(made) > 1
    assert not left
