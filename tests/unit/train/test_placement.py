"""What a run asks of the cluster beyond its founders, with Ray's placement groups played."""

from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from elastix.train.on_ray import placement
from elastix.train.on_ray.placement import CrewSlots, Slots

NODE = {"NodeID": "n", "Alive": True, "NodeManagerAddress": "here", "NodeManagerPort": 1}


class Group(NamedTuple):
    id: int
    size: int


@pytest.fixture
def cluster(monkeypatch):
    """Has room for so many groups as `room` says, by the order in which they were asked for."""
    there = SimpleNamespace(asked=[], room=0)
    numbers = count()

    def ask(bundles, **_):
        group = Group(next(numbers), len(bundles))
        there.asked.append(group)
        return group

    def table(group):
        placed = group in there.asked[: there.room]
        return {
            "state": "CREATED" if placed else "PENDING",
            "bundles_to_node_id": dict.fromkeys(range(group.size), "n") if placed else {},
        }

    monkeypatch.setattr(placement, "placement_group", ask)
    monkeypatch.setattr(placement, "placement_group_table", table)
    monkeypatch.setattr(placement, "draining_nodes", set)
    monkeypatch.setattr(placement, "answering", lambda asked, _: asked)
    monkeypatch.setattr(placement, "_LOOK_S", 0.0)
    monkeypatch.setattr(placement.ray, "nodes", lambda: [NODE])
    return there


def slots(most, crew):
    founders = Group(-1, 1)
    if crew:
        return CrewSlots([founders], {"CPU": 1.0}, 2, most, "PACK", "run")
    return Slots(founders, 1, most, {"CPU": 1.0}, "run")


@pytest.mark.parametrize("crew", [False, True])
def test_as_many_as_there_are_is_asked_for_piece_by_piece(cluster, crew):
    room = slots(10**15, crew)
    for _ in range(3):
        room.look()
    assert 0 < len(cluster.asked) <= 64
    before = len(cluster.asked)
    cluster.room = 40
    for _ in range(3):
        room.look()
    assert before < len(cluster.asked) <= 40 + 64


@pytest.mark.parametrize("crew", [False, True])
def test_each_slot_that_is_missing_is_asked_for_once(cluster, crew):
    room = slots(200, crew)
    cluster.room = 1000
    for _ in range(8):
        room.look()
    assert len(cluster.asked) == 199
