"""What a run asks of the cluster beyond its founders, with Ray's placement groups played."""

from itertools import count
from typing import NamedTuple

import pytest

from elastix.train.on_ray import placement
from elastix.train.on_ray.placement import CrewSlots, Slots


class Group(NamedTuple):
    id: int
    size: int


class Cluster:
    """Has room for so many groups as `room` says, by the order in which they were asked for.

    Attributes:
        asked: groups that are asked for now.
        avoided: by group, what was said of nodes on which it must not be.
        where: by group the node that it is on, or would be on.
        silent: nodes that do not answer; Ray takes them for alive.
    """

    def __init__(self):
        self.asked, self.avoided, self.room = [], {}, 0
        self.where = {}
        self.silent = set()
        self._numbers = count()

    def ask(self, bundles, *, bundle_label_selector=(), **_):
        group = Group(next(self._numbers), len(bundles))
        self.asked.append(group)
        self.avoided[group] = [selector["ray.io/node-id"] for selector in bundle_label_selector]
        return group

    def table(self, group):
        placed = group == FOUNDERS or group in self.asked[: self.room]
        return {
            "state": "CREATED" if placed else "PENDING",
            "bundles_to_node_id": dict.fromkeys(range(group.size), self.where.get(group, "n"))
            if placed
            else {},
        }

    def nodes(self):
        return [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": name, "NodeManagerPort": 1}
            for name in ("n", "other")
        ]

    def answering(self, asked, _):
        return {(host, port) for host, port in asked if host not in self.silent}


FOUNDERS = Group(-1, 2)
"""Of a crew of two processes; or of two workers."""


@pytest.fixture
def cluster(monkeypatch):
    there = Cluster()
    monkeypatch.setattr(placement, "placement_group", there.ask)
    monkeypatch.setattr(placement, "remove_placement_group", there.asked.remove)
    monkeypatch.setattr(placement, "placement_group_table", there.table)
    monkeypatch.setattr(placement, "draining_nodes", set)
    monkeypatch.setattr(placement, "answering", there.answering)
    monkeypatch.setattr(placement, "_LOOK_S", 0.0)
    monkeypatch.setattr(placement.ray, "nodes", there.nodes)
    return there


def slots(most, crew):
    if crew:
        return CrewSlots([FOUNDERS], {"CPU": 1.0}, 2, most, "PACK", "run")
    return Slots(FOUNDERS, 2, 1 + most, {"CPU": 1.0}, "run")


def free(room):
    """How many processes can be started now."""
    return room.free if isinstance(room, Slots) else len(room.free())


def take(room):
    """All that is free; used from now on."""
    if isinstance(room, Slots):
        return [room.take() for _ in range(room.free)]
    found = room.free()
    for slot in found:
        room.take(slot)
    return found


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


@pytest.mark.parametrize("crew", [False, True])
def test_nobody_is_placed_on_a_node_that_does_not_answer(cluster, crew):
    """Ray takes it for alive for ten seconds and more."""
    room = slots(1, crew)
    cluster.silent = {"n"}
    room.look()
    assert free(room) == 0
    cluster.silent = set()
    room.look()
    assert free(room) == 2


@pytest.mark.parametrize("crew", [False, True])
def test_what_is_free_when_a_node_stops_answering_is_no_longer_free(cluster, crew):
    room = slots(1, crew)
    room.look()
    assert free(room) == 2
    cluster.silent = {"n"}
    room.look()
    assert free(room) == 0


@pytest.mark.parametrize("crew", [False, True])
def test_in_place_of_room_on_a_node_to_be_taken_away_other_is_asked_for(cluster, crew):
    """Founders' room stays where it is, as it is that of all founders; but it is not used."""
    room = slots(2, crew)
    cluster.room = 9
    for _ in range(2):
        room.look()
    (before,) = cluster.asked
    used = take(room)
    room.look({"n"})
    assert free(room) == 0
    assert before in cluster.asked  # its workers are leaving
    for slot in used:
        room.give_back(slot)
    room.look({"n"})
    assert before not in cluster.asked
    assert len(cluster.asked) == (2 if crew else 3)
    assert {selector for group in cluster.asked for selector in cluster.avoided[group]} == {
        "!in(n)"
    }
    cluster.where = dict.fromkeys(cluster.asked, "other")
    for _ in range(2):
        room.look({"n"})
    assert free(room) == (4 if crew else 3)
    assert len(cluster.asked) == (2 if crew else 3)  # once


@pytest.mark.parametrize("crew", [False, True])
def test_where_a_worker_was_refused_nobody_is_started_again_and_nobody_has_to_leave(cluster, crew):
    """Who was started before its code was edited is as the others."""
    room = slots(3, crew)
    cluster.room = 9
    for _ in range(2):
        room.look()
    slot = room.free()[0] if crew else room.take()
    if crew:
        room.take(slot)
    assert room.avoid("n")
    assert free(room) == 0
    room.give_back(slot)
    assert not room.avoid("n")
    room.look()
    assert (free(room), room.draining) == (0, set())
    assert cluster.asked
    assert {selector for group in cluster.asked for selector in cluster.avoided[group]} == {
        "!in(n)"
    }
    cluster.where = dict.fromkeys(cluster.asked, "other")
    for _ in range(2):
        room.look()
    assert free(room) == (6 if crew else 4)


@pytest.mark.parametrize("crew", [False, True])
def test_where_each_node_that_comes_has_other_code_no_more_are_asked_for(cluster, crew, caplog):
    """An autoscaler would bring one after the other. What there is stays in use."""
    room = slots(2, crew)
    cluster.room = 9
    room.look()
    tried = 0
    while cluster.asked and tried < 50:
        node = f"new {tried}"
        cluster.where = dict.fromkeys(cluster.asked, node)
        room.look()
        assert room.avoid(node)  # a worker was started there
        room.look()
        tried += 1
    assert tried == 8
    assert "8 nodes in a row had other elastix code than the driver" in caplog.text
    assert len(take(room)) == 2
    assert not (room.coming if crew else room.more)


@pytest.mark.parametrize("crew", [False, True])
def test_a_few_nodes_with_other_code_among_many_do_not_end_the_search_for_room(cluster, crew):
    """A long run on nodes that come and go meets one now and then."""
    room = slots(2, crew)
    cluster.room = 99
    room.look()
    for number in range(20):
        assert cluster.asked
        cluster.where = dict.fromkeys(cluster.asked, f"new {number}")
        room.look()
        assert room.avoid(f"new {number}")
        if number % 7 == 6:
            room.welcome()  # in other room that it was given
        room.look()
    assert cluster.asked


@pytest.mark.parametrize("crew", [False, True])
def test_a_notice_that_is_taken_back_makes_the_room_usable_again(cluster, crew):
    room = slots(1, crew)
    room.look()
    room.look({"n"})
    assert free(room) == 0
    assert cluster.asked  # and there is no room for it elsewhere
    assert room.coming if crew else room.more
    for _ in range(3):
        room.look()
    assert free(room) == 2
    assert not cluster.asked


@pytest.mark.parametrize("crew", [False, True])
def test_what_was_asked_for_before_a_notice_is_asked_for_elsewhere(cluster, crew):
    room = slots(2, crew)
    room.look()
    (before,) = cluster.asked
    take(room)
    room.look({"n"})
    (after,) = cluster.asked
    assert after != before
    assert set(cluster.avoided[after]) == {"!in(n)"}
    room.look({"n"})
    assert cluster.asked == [after]


@pytest.mark.parametrize("crew", [False, True])
def test_what_stands_for_founders_room_is_not_asked_for_again_by_another_controller(
    cluster, crew, monkeypatch
):
    """It hears of the notice only when those who ask the clouds for it have been started."""
    before = slots(1, crew)
    cluster.room = 9
    before.look()
    before.look({"n"})
    cluster.where = dict.fromkeys(cluster.asked, "other")
    for _ in range(2):
        before.look({"n"})
    used, asked = take(before), list(cluster.asked)
    assert len(used) == 2
    monkeypatch.setattr(placement, "groups_named", lambda _: list(asked))
    room = slots(1, crew)
    room.take_over(used)
    for noticed in ((), {"n"}, {"n"}):
        room.look(noticed)
    assert free(room) == 0
    assert cluster.asked == asked


@pytest.mark.parametrize(("lost", "left"), [(0, 2), (1, 1), (2, 0), (3, -1)])
def test_room_of_who_was_lost_and_is_not_replaced_stays_empty_under_another_controller(
    cluster, lost, left, monkeypatch
):
    monkeypatch.setattr(placement, "groups_named", lambda _: [])
    room = slots(2, crew=False)  # two founders' places, and one that is missing
    room.take_over([], unused=lost)
    room.look()
    assert (room.free, len(cluster.asked)) == (max(0, left), 1 if left >= 0 else 0)
    assert room.more == (left >= 0)


@pytest.mark.parametrize(("lost", "left"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_room_of_processes_that_were_lost_stays_empty_under_another_controller(
    cluster, lost, left, monkeypatch
):
    """Three of four are idle, and one lives: first of all its own mate was lost."""
    before = slots(2, crew=True)
    cluster.room = 9
    for _ in range(2):
        before.look()
    asked = list(cluster.asked)
    monkeypatch.setattr(placement, "groups_named", lambda _: list(asked))
    room = slots(2, crew=True)
    room.take_over([next(slot for slot in before.free() if slot.group in asked)], unused=lost)
    room.look()
    assert (free(room), room.coming, cluster.asked) == (left, 0, asked)
    assert not lost or all(slot.founding for slot in room.free())


@pytest.mark.parametrize("crew", [False, True])
def test_what_another_controller_had_asked_for_elsewhere_is_asked_for_anywhere(
    cluster, crew, monkeypatch
):
    """The notice was taken back when nobody led the run."""
    before = slots(2, crew)
    for _ in range(2):
        before.look({"n"})
    asked = list(cluster.asked)
    assert all(cluster.avoided[group] for group in asked)
    monkeypatch.setattr(placement, "groups_named", lambda _: list(asked))
    room = slots(2, crew)
    room.take_over([])
    for _ in range(2):
        room.look()
    assert cluster.asked
    assert not any(cluster.avoided[group] for group in cluster.asked)


def test_of_a_crew_s_room_what_mates_still_use_stays(cluster):
    room = slots(1, crew=True)
    room.look()
    first, second = take(room)
    room.give_back(first)
    room.look({"n"})
    assert not cluster.asked
    room.give_back(second)
    room.look({"n"})
    assert len(cluster.asked) == 1
    assert free(room) == 0


@pytest.mark.parametrize("crew", [False, True])
def test_nodes_where_room_is_idle_are_known(cluster, crew):
    """Their clouds are asked before somebody is started there."""
    room = slots(1, crew)
    cluster.where = {FOUNDERS: "other"}
    room.look()
    assert room.nodes == {"other"}


def fails(room, times):
    """So many workers, one after the other, can do nothing with the GPU of the next slot."""
    for _ in range(times):
        room.look()
        slot = room.free()[-1] if isinstance(room, CrewSlots) else room.take()
        if isinstance(room, CrewSlots):
            room.take(slot)
        room.give_back(slot, "CUDA error: unknown error")
    room.look()


@pytest.mark.parametrize("crew", [False, True])
def test_where_a_gpu_fails_each_worker_nobody_is_started_any_more(cluster, crew, caplog):
    """Its room stays reserved, as Ray would give that GPU to others; and there is other room."""
    room = slots(1, crew)
    room.look()
    fails(room, 4)
    assert (free(room), cluster.asked) == (2, [])
    fails(room, 1)
    assert free(room) == 1
    assert len(cluster.asked) == 1  # of a crew a whole group
    assert "5 workers in a row could do nothing with a GPU of node n" in caplog.text
    assert "CUDA error: unknown error" in caplog.text
    cluster.room = 9
    for _ in range(2):
        room.look()
    assert free(room) == (3 if crew else 2)


@pytest.mark.parametrize("crew", [False, True])
def test_a_gpu_that_fails_now_and_then_is_used_further(cluster, crew):
    room = slots(1, crew)
    for _ in range(3):
        fails(room, 4)
        used = take(room)
        for slot in reversed(used):
            room.give_back(slot)  # it was of use, whatever became of its worker
    room.look()
    assert (free(room), cluster.asked) == (2, [])


@pytest.mark.parametrize("crew", [False, True])
def test_a_cluster_whose_gpus_all_fail_is_not_asked_for_others_without_end(cluster, crew):
    room = slots(1, crew)
    cluster.room = 99
    for _ in range(200):
        room.look()
        if not free(room):
            break
        fails(room, 1)
    assert free(room) == 0
    assert len(cluster.asked) <= 8
    assert not (room.coming if crew else room.more)


@pytest.mark.parametrize("crew", [False, True])
def test_room_with_a_broken_gpu_that_is_moved_to_another_node_is_used_again(cluster, crew):
    """The node was replaced. Ray gives what it has to that room first; others wait in vain."""
    room = slots(1, crew)
    fails(room, 5)
    assert (free(room), len(cluster.asked)) == (1, 1)
    cluster.where = {FOUNDERS: "other"}
    for _ in range(3):
        room.look()
    assert free(room) == 2
    assert cluster.asked == []  # nobody is needed in its place


def test_further_room_with_a_broken_gpu_that_is_moved_is_let_go_of(cluster):
    """Another group was asked for in its place, which can be where that was."""
    room = slots(2, crew=False)
    take(room)
    cluster.room = 1
    for _ in range(2):
        room.look()
    broken = cluster.asked[0]
    fails(room, 5)
    assert (free(room), len(cluster.asked)) == (0, 2)
    cluster.where = {broken: "other"}
    for _ in range(2):
        room.look()
    assert broken not in cluster.asked
    assert (free(room), len(cluster.asked)) == (1, 1)


@pytest.mark.parametrize("crew", [False, True])
def test_all_room_whose_gpus_were_broken_is_used_again_when_it_is_moved(cluster, crew):
    """That for which no other was asked too."""
    room = slots(1, crew)
    for _ in range(2):
        fails(room, 5)
    assert free(room) == 0
    cluster.where = {FOUNDERS: "other"}
    for _ in range(3):
        room.look()
    assert free(room) == 2
    assert cluster.asked == []
