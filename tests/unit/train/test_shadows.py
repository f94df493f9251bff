"""Who goes on when all members of a group are lost; then with the conductor, in virtual time."""

import random
from dataclasses import replace

import pytest

from elastix.comm.protocol.membership import Roster
from elastix.config import FailureConfig
from elastix.events import GenerationFormed, Resumed, ResumedFromShadow, StepCommitted, WorkerLost
from elastix.train.control.conductor import Conductor
from elastix.train.control.messages import Ready, Succeeded
from elastix.train.control.run_state import RunState
from elastix.train.control.shadows import Shadows
from elastix.train.control.terms import Found, RunTerms
from tests.unit.train.conductor_world import World

STORED = Resumed(step=4, ref="stored")


def terms(shadows):
    return RunTerms(
        founders=0,
        min_workers=0,
        max_workers=1,
        failure=FailureConfig(),
        first_step_s=0.0,
        shadows=shadows,
    )


def levelled(*operations):
    shadows = Shadows(terms(len(operations)))
    for worker, operation in enumerate(operations):
        shadows.level(worker, operation)
    return shadows


def said(step, since=0, sequence=20, equal=True):
    return Succeeded(step=step, since=since, sequence=sequence, equal=equal)


def run(step, sequence):
    state = RunState()
    state.step, state.sequence = step, sequence
    return state


def test_the_furthest_goes_on_and_of_two_the_older():
    assert levelled(7, 9, 8).call(STORED) == 1
    assert levelled(9, 9).call(STORED) == 0


def test_of_an_exact_run_none_goes_on_whose_state_was_found_to_differ():
    for exact in (False, True):
        shadows = Shadows(replace(terms(1), exact=exact))
        shadows.level(0, 9)
        assert shadows.call(STORED) == 0
        events = shadows.succeeded(0, said(9, equal=False), run(9, 20))
        assert [event.equal for event in events] == ([] if exact else [False])


def test_all_are_heard_before_one_of_several_goes_on():
    shadows = levelled(7, 9)
    roster = Roster(0)
    roster.holders = {5}
    assert shadows.listens(10.0)
    assert shadows.takes(1, roster)  # nobody is left whom it could follow
    shadows.at(1, 9)
    assert shadows.listens(10.5)
    assert shadows.takes(0, roster)
    shadows.at(0, 11)  # it had more to do
    assert not shadows.listens(11.0)
    assert shadows.call(STORED) == 0


def test_one_that_says_nothing_more_is_not_waited_for_for_long():
    shadows = levelled(7, 9)
    assert shadows.listens(10.0)
    assert not shadows.listens(12.5)
    assert not levelled(9).listens(10.0)  # there is no choice


def test_they_are_heard_again_when_a_later_group_is_lost():
    shadows = levelled(7, 9)
    assert shadows.listens(10.0)
    shadows.entered(5)  # a joiner had the State after all
    assert shadows.listens(500.0)


def test_what_another_conductor_has_heard_before_makes_no_shadow_of_a_member():
    shadows = Shadows(terms(1))
    roster = Roster(1)
    roster.take_over(3, [4], [6])
    assert 4 in roster.members
    assert not shadows.takes(4, roster)
    assert shadows.takes(6, roster)  # it waited; now it does not
    assert not roster.waiting


def test_who_says_where_it_is_has_a_state():
    shadows = Shadows(terms(1))
    roster = Roster(0)
    roster.holders = {0}
    assert shadows.takes(3, roster)
    shadows.at(3, -1)
    assert shadows.call(STORED) is None
    shadows.at(3, 5)
    assert shadows.call(STORED) == 3


def test_one_without_a_state_does_not():
    shadows = Shadows(terms(1))
    roster = Roster(0)
    roster.holders = {0}
    assert shadows.takes(3, roster)
    assert not shadows.can_go_on
    assert shadows.call(STORED) is None


def test_one_with_a_state_is_enough_to_go_on():
    shadows = Shadows(terms(2))
    shadows.level(0, 7)
    roster = Roster(0)
    roster.holders = {9}
    assert shadows.takes(3, roster)  # it has no State yet
    assert shadows.can_go_on
    assert shadows.call(STORED) == 0


@pytest.mark.parametrize(("step", "goes_on"), [(3, False), (4, True), (5, True)])
def test_it_goes_on_unless_what_is_stored_is_newer(step, goes_on):
    shadows = levelled(9)
    shadows.call(STORED)
    assert bool(shadows.succeeded(0, said(step), run(5, 14))) is goes_on


def test_what_it_lacks_of_the_journal_is_void_and_said():
    void, resumed = levelled(9).succeeded(0, said(8, sequence=11), run(10, 14))
    assert (void.step, void.ref) == (8, "")
    assert resumed.steps_lost == 2
    state = run(10, 14)
    state.take(void)
    state.take(resumed)
    assert (state.step, state.sequence) == (8, 10)


def test_what_the_journal_lacks_is_told_again():
    (resumed,) = levelled(9).succeeded(0, said(11, since=13), run(10, 14))
    assert resumed.steps_lost == 0
    state = run(10, 14)
    state.take(resumed)
    assert (state.step, state.sequence) == (10, 14)


def test_a_newer_stored_state_and_a_gap_in_the_journal_rule_it_out():
    shadows = levelled(9)
    shadows.call(STORED)
    assert shadows.succeeded(0, said(3), run(10, 14)) == []
    assert levelled(9).succeeded(0, said(11, since=16), run(10, 14)) == []
    assert levelled(9).succeeded(0, said(11, since=15), run(10, 14)) != []


def test_whoever_is_gone_or_in_the_group_is_no_heir():
    shadows = levelled(9, 8)
    assert shadows.call(STORED) == 0
    shadows.forget(0)
    assert shadows.heir is None
    assert shadows.call(STORED) == 1
    shadows.entered(1)
    assert shadows.heir is None
    assert shadows.lacking


# ------------------------------------------------------------------ in virtual time


def lose_all(world):
    for worker in world.group.members:
        world.kill(worker)


def lose_one(world, rng):
    if world.shadow_holds() or len(world.group.members) > 1:
        world.kill(rng.choice(sorted(world.alive)))


def test_a_shadow_is_started_and_never_in_the_group():
    world = World(2, shadows=1, steps=60)
    assert world.run().outcome == "finished"
    assert world.shadows == {2}
    assert {event.members for event in world.events(GenerationFormed)} == {(0, 1)}


def test_all_are_lost_and_the_shadow_goes_on():
    world = World(2, shadows=1, steps=60)
    world.at(30.0, lose_all)
    assert world.run().outcome == "finished"
    (resumed,) = world.events(ResumedFromShadow)
    assert (resumed.worker, resumed.steps_lost) == (2, 0)
    assert not world.events(Resumed)
    assert [event.step for event in world.events(StepCommitted)] == list(range(1, 61))
    assert len(world.events(GenerationFormed)[-1].members) == 2  # and is at strength again
    assert len(world.shadows - world.heirs) == 1  # with another shadow


def test_nobody_is_a_shadow_before_there_is_a_group_to_follow():
    shadows, roster = Shadows(replace(terms(1), max_workers=2)), Roster(2, 2)
    for worker in (0, 1, 2, 3):
        roster.ready(worker)
    assert roster.newest.members == (0, 1)
    assert not list(shadows.invitations(roster, lambda worker: ("host", worker)))
    roster.lost(0)
    roster.lost(1)
    assert roster.newest.members == (2, 3)  # they are needed


def test_another_conductor_goes_on_from_the_furthest_shadow():
    conductor = Conductor(terms(2))
    found = [
        Found(
            worker=worker,
            pid=1,
            node="",
            device="cpu",
            generation=1,
            address=None,
            ready=True,
            holder=False,
            shadow=True,
            operation=operation,
        )
        for worker, operation in ((4, 10), (5, 12))
    ]
    state = RunState(step=12, started={4, 5})
    conductor.take_over(state, found, {4, 5}, Resumed(step=0, ref=""), 1.0)
    assert conductor.membership.members == (5,)


def test_it_goes_on_alone_if_nobody_is_replaced():
    world = World(2, shadows=1, steps=60, replace=False)
    world.at(30.0, lose_all)
    assert world.run().outcome == "finished"
    assert [event.step for event in world.events(StepCommitted)] == list(range(1, 61))


def test_its_death_costs_nobody_anything_and_it_is_replaced():
    world = World(2, shadows=1, steps=80)
    world.at(30.0, lambda world: world.kill(2))
    world.play(59.0)
    assert [event.cause for event in world.events(GenerationFormed)] == ["start"]
    world.at(60.0, lose_all)
    assert world.run().outcome == "finished"
    (resumed,) = world.events(ResumedFromShadow)
    assert resumed.worker == 3


def test_it_dies_with_all_others_and_the_run_goes_on_from_what_is_stored():
    world = World(2, shadows=1, steps=40)
    world.at(30.0, lambda world: (world.kill(2), lose_all(world)))
    assert world.run().outcome == "finished"
    assert not world.events(ResumedFromShadow)
    assert len(world.events(Resumed)) == 1


def test_it_dies_when_it_was_asked_to_go_on():
    world = World(2, shadows=1, steps=40)
    world.at(30.0, lose_all)
    world.dies_when_called = True
    assert world.run().outcome == "finished"
    assert not world.events(ResumedFromShadow)
    assert len(world.events(Resumed)) == 1


def test_a_spare_becomes_the_shadow_of_one_that_died():
    world = World(2, shadows=1, spares=1, steps=60)
    world.at(30.0, lambda world: world.kill(min(world.shadows)))
    world.play(31.0)
    assert world.shadows & set(world.alive)
    assert world.run().outcome == "finished"


def test_a_shadow_takes_the_seat_and_the_spare_is_the_shadow_from_then_on():
    world = World(2, shadows=1, spares=1, steps=60)
    world.at(30.0, lambda world: world.kill(1))
    world.play(33.0)
    assert world.took_seats == [2]
    assert world.group.members == (0, 2)
    world.play(36.0)
    assert world.shadows == {3}
    world.at(40.0, lose_all)
    assert world.run().outcome == "finished"
    assert [event.worker for event in world.events(ResumedFromShadow)] == [3]


def test_it_stays_until_somebody_else_can_be_the_shadow():
    """The one that replaces the lost worker: it takes its time to start."""
    world = World(2, shadows=1, steps=60)
    world.at(30.0, lambda world: world.kill(1))
    world.play(39.0)
    assert not world.took_seats
    world.play(46.0)
    assert world.took_seats == [2]
    assert world.shadows == {3}
    assert world.run().outcome == "finished"


def test_one_that_was_not_found_equal_takes_no_seat():
    world = World(2, shadows=1, spares=1, steps=60)
    world.confirms = False
    world.at(30.0, lambda world: world.kill(1))
    world.play(33.0)
    assert world.group.members == (0, 3)
    assert world.run().outcome == "finished"
    assert not world.took_seats


def test_one_that_follows_nobody_any_more_is_not_waited_for():
    """It says so when its seat is agreed on: the others go on without it."""
    world = World(2, shadows=1, spares=1, steps=60)
    world.at(30.0, lambda world: world.kill(1))
    world.play(30.0)
    while not world.proposal:
        world.play(world.now + 0.01)
    assert world.proposal.members == (0, 2)
    world._say(2, Ready(("host", 2)))
    assert world.conductor.membership.members == (0,)
    assert world.conductor.membership.urgent
    assert world.run().outcome == "finished"


def test_another_conductor_goes_on_from_the_shadow_too():
    world = World(2, shadows=1, steps=60)
    world.at(30.0, lambda world: (lose_all(world), world.take_over()))
    assert world.run().outcome == "finished"
    assert [event.steps_lost for event in world.events(ResumedFromShadow)] == [0]
    assert [event.step for event in world.events(StepCommitted)] == list(range(1, 61))


@pytest.mark.parametrize("seed", range(100))
def test_no_step_is_lost_whenever_the_group_dies_if_the_shadow_lives(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    world = World(size, shadows=rng.randint(1, 2), spares=rng.randint(0, 1), steps=120)
    for moment in sorted(rng.uniform(15, 110) for _ in range(rng.randint(1, 4))):
        if rng.random() < 0.3:
            world.at(moment - 3, lambda world: lose_one(world, rng))
        world.at(moment, lambda world: world.shadow_holds() and lose_all(world))
    assert world.run().outcome == "finished"
    steps = [event.step for event in world.events(StepCommitted)]
    assert steps == list(range(1, 121))
    assert not world.events(Resumed)
    lost = {event.worker for event in world.events(WorkerLost)}
    assert not lost & set(world.alive)
