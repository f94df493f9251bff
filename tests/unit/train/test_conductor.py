"""The conductor in virtual time: losses, hangs, joiners, limits, and another conductor."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from elastix.config import FailureConfig
from elastix.errors import ConfigError, QuorumLost, ReplicasDiffer, TooManyFailures, TrainError
from elastix.events import (
    GenerationFormed,
    ProcessorsDiffer,
    Recovered,
    ReplicasDiverged,
    Resumed,
    RunStarted,
    StateNotStored,
    StateStored,
    StepCommitted,
    StopAsked,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerRaised,
    WorkerSlow,
    WorkerStarted,
)
from elastix.train.control.actions import EndWorker, KillWorker, Relay, StartWorker, Tell, Write
from elastix.train.control.conductor import Conductor
from elastix.train.control.interruption import STORE_S, Interruption
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Diverged,
    Entered,
    Heartbeat,
    Leave,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    SawDeath,
    Started,
    StoreSoon,
    Succeeded,
    Suspect,
    WatchNeighbour,
)
from elastix.train.control.run_state import RunState
from elastix.train.control.terms import Found, Phase, RunTerms
from tests.unit.train.conductor_world import START_S, World, lost


def causes(world):
    return [event.cause for event in world.events(GenerationFormed)]


def sizes(world):
    return [event.world_size for event in world.events(StepCommitted)]


def committed_once(world):
    """All steps, in order; after going back, from there."""
    step = 0
    for event in world.written:
        if isinstance(event, Resumed):
            step = event.step
        elif isinstance(event, StepCommitted):
            step += 1
            assert event.step == step
    return step == world.steps


def test_a_quiet_run_forms_one_group_and_ends():
    world = World(4)
    assert world.run().outcome == "finished"
    assert causes(world) == ["start"]
    assert sizes(world) == [4] * 60
    assert len(world.events(WorkerStarted)) == 4
    assert world.conductor.phase is Phase.OVER


def test_a_loss_is_made_good_by_a_new_worker():
    world = World(3)
    world.at(20, lambda w: w.kill(1))
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "died")]
    assert world.events(WorkerLost)[0].rank == 1
    assert causes(world) == ["start", "loss", "join"]
    assert (sizes(world)[0], min(sizes(world)), sizes(world)[-1]) == (3, 2, 3)
    assert committed_once(world)


def test_nobody_is_started_in_the_place_of_a_lost_one_unless_asked():
    world = World(3, replace=False)
    world.at(20, lambda w: w.kill(0))
    assert world.run().outcome == "finished"
    assert causes(world) == ["start", "loss"]
    assert sizes(world)[-1] == 2
    assert world.started == {0, 1, 2}


def test_survivors_have_the_cores_until_they_agree_on_a_step():
    world = World(3, step_s=0.4)
    world.at(20, lambda w: w.kill(1))
    world.play(20.2)
    assert 3 not in world.started
    world.play(20.7)  # the step was agreed on
    assert 3 in world.started


def test_a_founder_on_a_node_with_other_code_ends_the_run():
    world = World(3)
    world.other_code = {1}
    assert world.run().outcome == "failed"
    assert isinstance(world.conductor.error, ConfigError)
    assert not world.events(StepCommitted)


def test_those_with_other_code_that_come_later_are_turned_away_and_the_run_goes_on():
    """However many such a node has at once: they are no losses in a row."""
    world = World(3, max_workers=23, max_worker_losses=0)
    world.other_code = set(range(3, 23))
    assert world.run().outcome == "finished"
    turned_away = world.events(WorkerNotStarted)
    assert {event.worker for event in turned_away} == world.other_code
    assert {event.cause for event in turned_away} == {"its node has other elastix code"}
    assert (sizes(world)[0], sizes(world)[-1]) == (3, 23)


def test_who_was_gone_before_it_began_is_no_loss():
    """The other, which had begun, is one."""
    world = World(3, max_worker_losses=1)
    world.at(20, lambda w: w.kill(1))
    world.at(22, lambda w: w.kill(3))  # it was being started in place of 1
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "died")]
    assert world.events(WorkerNotStarted) == [replace(world.events(WorkerNotStarted)[0], worker=3)]
    assert sizes(world)[-1] == 3
    assert world.conductor.state.losses == 1


def test_nobody_is_started_for_ever_where_nobody_can_be():
    world = World(3, step_s=1e4, hang_timeout_s=1e6)

    def again(world):
        for worker in world.started - {0, 1, 2}:
            world.kill(worker)
        world.at(world.now + 0.2, again)

    world.at(20, lambda w: w.kill(1))
    world.at(20.1, again)
    assert world.run().outcome == "failed"
    assert isinstance(world.conductor.error, TooManyFailures)
    assert "could not be started" in str(world.conductor.error)
    assert len(lost(world)) == 1


def test_a_founder_that_is_lost_is_replaced_at_once():
    world = World(2)
    world.at(1.0, lambda w: w.kill(0))
    world.play(1.05)
    assert world.started == {0, 1, 2}


def test_a_spare_stands_in_at_the_next_boundary():
    world = World(3, spares=1)
    world.at(30, lambda w: w.kill(2))
    assert world.run().outcome == "finished"
    assert sizes(world).count(2) <= 2
    assert world.events(GenerationFormed)[-1].members == (0, 1, 3)


def test_a_spare_that_is_lost_had_no_rank():
    world = World(3, spares=1)
    world.at(40, lambda w: w.kill(3))
    world.run()
    assert [(event.worker, event.rank) for event in world.events(WorkerLost)] == [(3, -1)]


def test_spares_are_started_when_the_group_has_come_about():
    world = World(3, spares=2)
    world.play(START_S - 0.1)
    assert world.started == {0, 1, 2}
    world.play(START_S + 1)
    assert world.started == {0, 1, 2, 3, 4} == set(world.conductor.workers)


def test_two_die_in_one_step_and_a_third_while_they_meet():
    world = World(6)
    for worker, when in ((1, 20.0), (4, 20.01), (0, 20.08)):
        world.at(when, lambda w, worker=worker: w.kill(worker))
    assert world.run().outcome == "finished"
    assert {worker for worker, _ in lost(world)} == {0, 1, 4}
    assert committed_once(world)
    assert sizes(world)[-1] == 6


def test_a_hung_worker_is_taken_out_and_a_silent_one_too():
    for harm, cause in (("hung", "stuck"), ("silent", "silent")):
        world = World(4, hang_timeout_s=10.0)
        world.at(20, lambda w, harm=harm: setattr(w.alive[2], harm, True))
        assert world.run().outcome == "finished"
        assert lost(world) == [(2, cause)]
        (loss,) = world.events(GenerationFormed)[1:2]
        assert loss.cause == "loss"
        assert committed_once(world)


def test_a_worker_that_hangs_after_its_notice_is_taken_out():
    """It is in no membership any more, and all others wait for it at the boundary."""
    world = World(3, hang_timeout_s=5.0)

    def both(w):
        w.alive[1].hung = True
        w.notice(1)

    world.at(20.5, both)
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "stuck")]
    assert committed_once(world)


def test_a_joiner_that_dies_on_its_way_is_noticed_by_nobody():
    world = World(3)
    world.at(20, lambda w: w.kill(1))
    world.at(32, lambda w: w.kill(3))  # it is catching up
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "died"), (3, "died")]
    assert causes(world) == ["start", "loss", "join"]
    assert sizes(world)[-1] == 3


def test_a_notice_is_heeded_at_a_boundary_and_costs_nobody_a_recovery():
    world = World(3)
    world.at(20, lambda w: w.notice(0))
    assert world.run().outcome == "finished"
    (left,) = world.events(WorkerLeft)
    assert (left.worker, left.cause) == (0, "notice")
    assert 0 in world.forgotten
    assert causes(world) == ["start", "leave", "join"]
    assert not lost(world)


def told_to_store(actions):
    return [action for action in actions if action == Tell(None, StoreSoon())]


def test_a_group_that_is_to_go_as_a_whole_is_told_to_store_its_state_once():
    world = World(2, replace=False)
    world.play(20.5)
    conductor = world.conductor
    assert not told_to_store(conductor.hear(0, Leave("notice"), 20.5))  # the other one stays
    assert told_to_store(conductor.hear(1, Leave("notice"), 20.5))
    assert not told_to_store(conductor.hear(1, Leave("notice"), 20.6))  # as a worker may repeat it
    assert not told_to_store(conductor.tick(21.0))


def test_so_is_one_whose_only_member_without_a_notice_dies():
    world = World(3, replace=False)
    world.play(20.5)
    conductor = world.conductor
    for worker in (0, 1):
        assert not told_to_store(conductor.hear(worker, Leave("notice"), 20.5))
    assert told_to_store(conductor.died(2, 20.5))


def test_a_run_whose_last_holder_leaves_while_its_successor_dies_ends_at_once():
    """Who comes in has nothing of the State yet, and would wait for it."""
    world = World(2, spares=1, replace=False)
    world.play(20.5)
    conductor, generation = world.conductor, world.group.generation + 1
    conductor.hear(1, Leave("notice"), 20.5)  # of whom the spare takes the place
    assert conductor.membership.members == (0, 2)
    conductor.died(0, 21.0)
    left = Outcome(kind=OutcomeKind.LEFT, generation=generation, step=world.step)
    conductor.ended(1, left, 21.0)
    conductor.tick(21.2)
    assert isinstance(conductor.error, QuorumLost)
    assert "no worker is left that has the State" in str(conductor.error)


@pytest.mark.parametrize("all_enter", [True, False])
def test_the_process_of_one_that_left_stays_until_all_are_in_the_group_without_it(all_enter):
    """They may still read what it has sent; but not for ever."""
    world = World(3)
    world.play(20.5)
    conductor, generation = world.conductor, world.group.generation + 1
    ends = lambda now: EndWorker(0) in conductor.tick(now)  # noqa: E731
    conductor.hear(0, Leave("notice"), 20.5)
    left = Outcome(kind=OutcomeKind.LEFT, generation=generation, step=world.step)
    conductor.hear(1, Entered(generation), 21.0)
    conductor.ended(0, left, 21.0)
    assert not ends(21.2)
    if all_enter:
        conductor.hear(2, Entered(generation), 21.4)
        assert ends(21.6)
    else:
        assert not ends(26.0)
        assert ends(26.2)


def test_a_leaver_that_the_others_went_on_without_is_no_loss():
    world = World(3)

    def left_behind(w):
        w.notice(0)
        del w.alive[0]
        fenced = Outcome(kind=OutcomeKind.FENCED, step=w.step)
        w._do(w.conductor.ended(0, fenced, w.now))

    world.at(20, left_behind)
    assert world.run().outcome == "finished"
    (left,) = world.events(WorkerLeft)
    assert (left.worker, left.cause) == (0, "notice")
    assert not lost(world)


def test_whoever_is_on_a_node_that_goes_leaves_before_that():
    world = World(4, nodes=2)
    world.at(20, lambda w: w.draining.add("node1"))
    world.run()
    assert {event.worker for event in world.events(WorkerLeft)} >= {1, 3}
    assert {event.cause for event in world.events(WorkerLeft)} == {"draining"}
    assert not lost(world)


def test_a_worker_leaves_with_any_of_its_processes():
    """Its node is that of the first one; the others may be elsewhere."""
    world = World(3)
    world.play(20)
    for partly in ({1}, {1}, {1, 7}):
        world._do(world.conductor.room(0, more=False, now=world.now, partly=partly))
        world._do(world.conductor.tick(world.now))
    assert world.run().outcome == "finished"
    assert [(event.worker, event.cause) for event in world.events(WorkerLeft)] == [(1, "draining")]
    assert not lost(world)


def test_a_slow_worker_is_told_of_once_and_let_go_only_if_asked():
    for limit, left in ((None, []), (2.0, [1])):
        world = World(4, steps=200, evict_slower_than=limit)
        world.at(11, lambda w: setattr(w.alive[1], "busy", 3.0))
        assert world.run().outcome == "finished"
        told = [event for event in world.events(WorkerSlow) if event.worker == 1]
        assert len(told) == 1
        assert told[0].factor == pytest.approx(3.0, rel=0.2)
        assert [event.worker for event in world.events(WorkerLeft)] == left


def test_when_all_die_the_run_goes_on_from_the_stored_state():
    world = World(3)
    world.at(25, lambda w: setattr(w, "stored_step", 10))
    for worker in range(3):
        world.at(30, lambda w, worker=worker: w.kill(worker))
    assert world.run().outcome == "finished"
    (resumed,) = world.events(Resumed)
    assert resumed.step == 10
    assert committed_once(world)
    assert causes(world) == ["start", "loss", "loss", "start"]


def test_when_all_die_and_nobody_is_replaced_the_run_fails():
    world = World(2, replace=False)
    world.at(20, lambda w: w.kill(0))
    world.at(22, lambda w: w.kill(1))
    assert world.run().outcome == "failed"
    assert isinstance(world.conductor.error, QuorumLost)
    assert "no worker is left that has the State" in str(world.conductor.error)


def test_founders_that_all_die_before_there_is_a_group():
    world = World(2, replace=False)
    world.at(1, lambda w: w.kill(0))
    world.at(2, lambda w: w.kill(1))
    world.run()
    assert "before the group had come about" in str(world.conductor.error)
    assert world.now < 3


NOT_MET = {"while all are started": 1.0, "when the others wait for it": START_S - 0.01}


@pytest.mark.parametrize("when", NOT_MET.values(), ids=NOT_MET)
def test_those_that_are_left_found_the_group_if_no_other_can_come(when):
    world = World(3, min_workers=2, replace=False)
    world.at(when, lambda w: w.kill(1))
    assert world.run().outcome == "finished"
    assert world.events(GenerationFormed)[0].members == (0, 2)
    assert sizes(world) == [2] * world.steps
    assert world.events(StepCommitted)
    assert world.now < START_S + world.steps + 2
    assert world.started == {0, 1, 2}


def test_one_that_is_left_founds_the_group_alone():
    world = World(2, replace=False)
    world.at(1.0, lambda w: w.kill(0))
    assert world.run().outcome == "finished"
    assert sizes(world) == [1] * world.steps


def test_founders_for_which_there_is_no_room_yet_are_waited_for():
    world = World(3, spares=-1, min_workers=2, replace=False)
    world.coming = True
    world.at(1.0, lambda w: w.kill(0))
    world.at(5.0, lambda w: setattr(w, "free", 1))
    assert world.run().outcome == "finished"
    assert world.events(GenerationFormed)[0].members == (1, 2)


def test_too_few_founders_end_the_run_at_once_and_are_named():
    world = World(3, min_workers=3, replace=False)
    world.at(1, lambda w: w.kill(1))
    assert world.run().outcome == "failed"
    assert isinstance(world.conductor.error, QuorumLost)
    said = str(world.conductor.error)
    assert "worker 1 (died)" in said
    assert "2 are left" in said
    assert "minimum of 3" in said
    assert world.now < 2


def test_too_few_founders_wait_for_others_if_there_may_be_room():
    world = World(3, min_workers=3, replace=False, start_timeout_s=60.0)
    world.coming = True
    world.at(1, lambda w: w.kill(1))
    world.at(20, lambda w: setattr(w, "free", 1))
    assert world.run().outcome == "finished"
    assert world.events(GenerationFormed)[0].members == (0, 2, 3)
    world = World(3, min_workers=3, replace=False, start_timeout_s=60.0)
    world.coming = True
    world.at(1, lambda w: w.kill(1))
    world.run()
    assert "start_timeout_s=60" in str(world.conductor.error)
    assert "worker 1 (died)" in str(world.conductor.error)


def test_where_a_spare_was_to_be_a_founder_is_started():
    world = World(3, spares=1, replace=False)
    world.at(1, lambda w: w.kill(1))
    assert world.run().outcome == "finished"
    assert world.events(GenerationFormed)[0].members == (0, 2, 3)


def test_founders_that_have_left_are_not_waited_for_if_their_place_is_not_used_again():
    world = World(3, min_workers=2, replace=False)
    world.play(1.0)
    world.free = -1
    world.notice(1)
    assert world.run().outcome == "finished"
    assert world.events(GenerationFormed)[0].members == (0, 2)


def test_another_conductor_founds_the_group_with_those_that_are_left():
    world = World(3, min_workers=2, replace=False)
    world.at(1.0, lambda w: w.kill(1))
    world.places = 2  # its place is not used again
    world.at(1.1, World.take_over)
    assert world.run().outcome == "finished"
    assert world.events(GenerationFormed)[0].members == (0, 2)


def test_one_that_dies_after_the_others_have_finished_does_not_fail_the_run():
    world = World(2, replace=False)
    world.play(15)
    outcome = Outcome(kind=OutcomeKind.FINISHED, generation=1, step=5)
    world._do(world.conductor.ended(0, outcome, world.now))
    world.kill(1)
    world.play(16)
    assert world.conductor.error is None
    assert world.conductor.phase is Phase.OVER
    assert world.conductor.ending().outcome == "finished"


def test_a_group_below_its_minimum_waits_and_goes_on():
    world = World(4, min_workers=4)
    world.at(20, lambda w: w.kill(3))
    assert world.run().outcome == "finished"
    assert set(sizes(world)) == {4}


def test_a_group_that_waits_in_vain_is_dismissed():
    world = World(3, min_workers=3, replace=False)
    world.at(20, lambda w: w.kill(2))
    assert world.run().outcome == "failed"
    assert world.dismissed
    assert isinstance(world.conductor.error, QuorumLost)
    assert str(world.conductor.error) == "in vain"  # as the workers have it
    assert set(sizes(world)) == {3}


def test_no_room_means_no_group_and_says_so():
    world = World(4, spares=-2, min_workers=3, start_timeout_s=60.0)
    ending = world.run()
    assert ending.outcome == "failed"
    assert "start_timeout_s=60" in ending.message
    assert world.now == pytest.approx(60.0, abs=1.0)


def test_founders_that_do_not_come_in_time_are_not_waited_for_if_the_others_are_enough():
    """A node went before the group had come about, say, and there is no other."""
    world = World(4, min_workers=3, start_timeout_s=60.0, tick_s=0.05)  # while they come together
    world.at(1, lambda w: w.kill(2))
    world.at(1.01, lambda w: setattr(w, "free", -1))
    world.at(100, lambda w: setattr(w, "free", 1))
    assert world.run().outcome == "finished"
    first, *_ = world.events(GenerationFormed)
    assert first.members == (0, 1, 3)
    assert sizes(world)[0] == 3
    assert sizes(world)[-1] == 4


def test_limits_on_losses_end_the_run():
    world = World(3, max_worker_losses=1)
    world.at(20, lambda w: w.kill(0))
    world.at(25, lambda w: w.kill(1))
    world.run()
    assert isinstance(world.conductor.error, TooManyFailures)
    world = World(2, start_s=0.1, step_s=100.0)
    for second in range(1, 40):
        world.at(second, lambda w: w.kill(max(w.alive, default=-1)))
    world.run()
    assert "without a step in between" in str(world.conductor.error)
    assert len(lost(world)) == 9


def test_an_exception_ends_the_run_with_its_words():
    world = World(2)
    world.play(15)
    outcome = Outcome(kind=OutcomeKind.RAISED, rank=1, step=3, summary="a mistake", traceback="tb")
    world._do(world.conductor.ended(1, outcome, world.now))
    ending = world.run()
    assert ending.outcome == "failed"
    assert "a mistake on worker 1, rank 1" in ending.message
    assert world.events(WorkerRaised)[0].traceback == "tb"


def test_a_run_that_is_ended_before_it_is_over_has_not_finished():
    world = World(2)
    world.play(15)
    assert world.conductor.phase is Phase.RUNNING
    assert world.conductor.ending().outcome == "interrupted"


def test_what_comes_first_ends_the_run():
    world = World(2)
    world.conductor.fail(TrainError("one"))
    world.conductor.fail(TrainError("two"))
    world.conductor.stop("Ctrl-C", world.now)
    assert world.run().message == "one"


def stop(world):
    world._do(world.conductor.stop("Ctrl-C", world.now))


def test_a_run_that_is_stopped_ends_when_its_state_is_stored():
    world = World(2, step_s=1.0)
    world.at(20, stop)
    world.at(21, lambda w: w.store(w.step - 5, "every_steps"))
    world.at(22, lambda w: w.store(w.step, "best"))
    world.at(23, lambda w: w.store(w.step, "notice"))
    ending = world.run()
    assert (ending.outcome, ending.message, world.now) == ("interrupted", "Ctrl-C", 23)


def test_a_run_that_is_stopped_does_not_wait_for_ever_for_its_state():
    world = World(2, step_s=1.0)
    world.at(20, stop)
    assert world.run().outcome == "interrupted"
    assert world.now == pytest.approx(20 + STORE_S, abs=1)


def test_a_run_that_is_stopped_again_ends_at_once():
    world = World(2, step_s=1.0)
    world.play(20.5)
    assert told_to_store(world.conductor.stop("Ctrl-C", 20.5))
    assert world.conductor.phase is Phase.RUNNING
    assert not told_to_store(world.conductor.stop("Ctrl-C", 22.0))
    assert world.conductor.phase is Phase.OVER


def test_two_that_stop_a_run_at_the_same_time_stop_it_once():
    """Its State is stored nevertheless."""
    world = World(2, store_s=2.0)
    world.at(20, stop)
    world.at(20.1, stop)
    assert world.run().outcome == "interrupted"
    assert world.stored_step > 0
    assert len(world.events(StopAsked)) == 1


def test_a_run_whose_state_is_stored_already_is_stopped_at_once():
    """Nobody would store it once more."""
    world = World(2, step_s=100.0)
    world.at(START_S + 150, lambda w: w.store(w.step, "every_steps"))
    world.at(START_S + 151, stop)
    assert (world.run().outcome, world.now) == ("interrupted", START_S + 151)


def test_who_comes_in_while_a_run_is_stopped_is_told_to_store_the_state():
    """What it hears before it is given the State it forgets; all others die before they have."""
    world = World(2, spares=1, step_s=1.0, store_s=3.0, replace=False)
    world.at(40, lambda w: w.kill(0))
    world.at(41.05, stop)  # the spare comes in at the next boundary
    world.at(41.5, lambda w: w.kill(1))
    assert world.run().outcome == "interrupted"
    assert world.group.members == (2,)
    assert world.stored_step > 0


def test_a_run_that_is_stopped_tries_once_more_if_its_state_cannot_be_stored():
    """The first copy may be torn, by a train function that changes what is copied."""
    world = World(2)
    world.play(20.5)
    stop(world)
    failed = StateNotStored(step=world.step, reason="notice", why="it changed")
    assert not told_to_store(world.conductor.not_stored(replace(failed, step=world.step - 1)))
    assert told_to_store(world.conductor.not_stored(failed))
    assert world.conductor.phase is Phase.RUNNING
    assert not told_to_store(world.conductor.not_stored(failed))
    assert world.conductor.phase is Phase.OVER


def test_a_run_that_is_stopped_starts_nobody():
    world = World(2, step_s=1.0)
    world.at(20, stop)
    world.at(21, lambda w: w.kill(1))
    assert world.run().outcome == "interrupted"
    assert world.started == {0, 1}


def test_nobody_is_told_to_follow_one_that_was_dismissed():
    """Others may store their State yet, and a shadow has lost whom it followed."""
    world = World(2, shadows=1)
    world.play(40)
    conductor = world.conductor
    (shadow,) = world.shadows
    error = QuorumLost("in vain")
    conductor.ended(0, Outcome(kind=OutcomeKind.DISMISSED, error=error), 40.0)
    actions = conductor.hear(shadow, Ready(("host", shadow), ""), 40.1)
    assert Tell(shadow, CatchUp((("host", 1),), shadow=True)) in actions


def test_a_shadow_that_is_to_go_and_has_lost_its_donor_on_its_way_in_keeps_nobody_waiting():
    """It would never hear of the boundary, the others would meet it, and so in each next group."""
    world = World(2, spares=1, shadows=1)
    world.play(40)
    conductor = world.conductor
    (shadow,) = world.shadows
    (spare,) = set(world.alive) - {0, 1, shadow}
    conductor.hear(0, Leave("notice"), 40.0)
    called = conductor.membership
    assert called.members == (1, shadow)
    conductor.hear(shadow, Leave("notice"), 40.1)
    conductor.ended(0, Outcome(kind=OutcomeKind.LEFT, generation=called.generation), 40.2)
    actions = conductor.hear(shadow, Ready(("host", shadow), "", 40), 40.3)
    assert EndWorker(shadow) in actions
    assert conductor.membership.members == (1,)
    conductor.hear(1, Entered(conductor.membership.generation), 40.4)
    assert conductor.membership.members == (1, spare)


@pytest.mark.parametrize("behind", [0, 1])
def test_whoever_waited_in_vain_is_met_in_no_newer_group(behind):
    """It heard that nobody will come when the others were on their way into the next group."""
    world = World(3)
    world.play(20)
    conductor, newest = world.conductor, world.conductor.membership.generation
    outcome = Outcome(
        kind=OutcomeKind.DISMISSED, generation=newest - behind, error=QuorumLost("in vain")
    )
    conductor.ended(2, outcome, 20.0)
    assert conductor.membership.members == ((0, 1) if behind else (0, 1, 2))
    assert conductor.holders == {0, 1}


def test_another_conductor_that_misses_a_founder_it_never_heard_of_says_what_it_knows():
    terms = replace(World(3, replace=False).terms, min_workers=3)
    conductor = Conductor(terms)
    found = [ready(0), ready(2)]
    state = RunState(started={0, 2})
    conductor.take_over(state, found, {0, 1, 2}, Resumed(step=0, ref=""), 1.0)
    conductor.room(0, more=False, now=1.0)
    conductor.tick(1.2)
    assert isinstance(conductor.error, QuorumLost)
    assert str(conductor.error).startswith("some workers were gone before the group")


def test_another_conductor_starts_founders_again_that_were_not_lost_also_if_nobody_is_replaced():
    """They were ended with the one before, or as they had met by it."""
    conductor = Conductor(World(2, replace=False).terms)
    conductor.take_over(RunState(), [], {0, 1}, Resumed(step=0, ref=""), 1.0)
    conductor.room(0, more=True, now=1.0)
    conductor.tick(1.2)
    assert conductor.error is None
    assert conductor.room(2, more=False, now=2.0) == [StartWorker(2), StartWorker(3)]
    conductor.tick(2.2)
    assert conductor.error is None
    conductor.died(2, 3.0)
    conductor.died(3, 3.0)
    conductor.tick(3.2)
    assert isinstance(conductor.error, QuorumLost)


def test_another_conductor_awaits_nobody_in_place_of_a_group_that_died_with_the_one_before():
    """Nobody is replaced, whatever room there is."""
    state = RunState()
    for event in (
        *(WorkerStarted(worker=worker, pid=1, node="", device="cpu") for worker in (0, 1)),
        GenerationFormed(generation=1, members=(0, 1), cause="start", urgent=True),
        StepCommitted(step=1, generation=1, world_size=2, batches=()),
    ):
        state.take(event)
    conductor = Conductor(World(2, replace=False).terms)
    conductor.take_over(state, [], {0, 1}, Resumed(step=0, ref=""), 1.0)
    conductor.room(0, more=True, now=1.0)
    conductor.tick(1.2)
    assert isinstance(conductor.error, QuorumLost)
    said = str(conductor.error)
    assert "worker 0 (died unseen) and worker 1 (died unseen) were gone, and no other" in said
    assert "No step was taken" not in said


def test_another_conductor_gives_nobody_the_id_of_one_that_could_not_be_started():
    """A third one would end whoever has it, as the journal has it that this one is gone."""
    state = RunState()
    for event in (
        WorkerStarted(worker=0, pid=1, node="", device="cpu"),
        GenerationFormed(generation=1, members=(0,), cause="start", urgent=True),
        WorkerNotStarted(worker=1, cause="died"),
        StepCommitted(step=1, generation=1, world_size=1, batches=()),
    ):
        state.take(event)
    conductor = Conductor(World(1).terms)
    conductor.take_over(state, [ready(0, holder=True)], {0}, Resumed(step=0, ref=""), 1.0)
    started = conductor.room(1, more=False, now=3.0)
    assert started == [StartWorker(2)]
    for event in (
        WorkerStarted(worker=2, pid=2, node="", device="cpu"),
        GenerationFormed(generation=3, members=(0, 2), cause="join", urgent=False),
    ):
        state.take(event)
    found = [ready(worker, holder=True) for worker in (0, 2)]
    assert [one.worker for one in state.of_use(found)] == [0, 2]


def ready(worker: int, *, holder: bool = False, **more: Any) -> Found:
    return Found(
        worker=worker,
        pid=1,
        node="",
        device="cpu",
        generation=0,
        address=None,
        ready=True,
        holder=holder,
        **more,
    )


def test_who_was_started_before_samples_were_left_out_founds_no_group_of_another_conductor():
    """It would draw them, and the others would not. What is left out stands in a State."""
    state = RunState()
    for worker in range(4):
        state.take(WorkerStarted(worker=worker, pid=1, node="", device=""))
    there = [ready(0), ready(1, misinformed=True)]
    assert [one.worker for one in state.of_use(there)] == [0]
    shadow = ready(2, misinformed=True, shadow=True, operation=7)
    assert [one.worker for one in state.of_use([*there, shadow])] == [0, 2]
    state.take(GenerationFormed(generation=1, members=(3,), cause="start"))
    holder = ready(3, misinformed=True, holder=True)
    assert [one.worker for one in state.of_use([*there, shadow, holder])] == [3]


def test_who_said_that_it_was_ready_to_who_wanted_to_end_it_does_not_found_the_run():
    """It does not say it again; the run stood still, one worker short."""
    state = RunState(started={0})
    assert [one.worker for one in state.of_use([ready(0), ready(1)])] == [0]


def test_who_may_be_given_the_state_meanwhile_does_not_found_the_run_anew():
    """It was called to a group whose only holder the old controller took for lost."""
    state = RunState()
    for event in (
        WorkerStarted(worker=0, pid=1, node="", device=""),
        GenerationFormed(generation=1, members=(0,), cause="start", urgent=True),
        WorkerStarted(worker=1, pid=2, node="", device=""),
        GenerationFormed(generation=2, members=(0, 1), cause="join", urgent=False),
        WorkerLost(worker=0, rank=0, generation=2, cause="died"),
        WorkerStarted(worker=2, pid=3, node="", device=""),
    ):
        state.take(event)
    assert [one.worker for one in state.of_use([ready(1), ready(2)])] == [2]
    assert [one.worker for one in state.of_use([ready(1, holder=True), ready(2)])] == [1]


def test_another_conductor_goes_on_with_the_stop():
    world = World(2, store_s=3.0)
    world.at(20.5, stop)
    world.at(20.6, World.take_over)
    ending = world.run()
    assert (ending.outcome, ending.message) == ("interrupted", "Ctrl-C")
    assert world.step < 30
    assert world.stored_step > 0


def test_a_run_that_is_stopped_goes_on_from_its_shadow_and_stores_that():
    world = World(2, shadows=1, store_s=1.0)
    world.play(40)
    assert world.shadow_holds()
    stop(world)
    for worker in (0, 1):
        world.kill(worker)
    step = world.step
    assert world.run().outcome == "interrupted"
    assert world.stored_step >= step


def test_a_run_that_is_stopped_before_anybody_has_the_state_ends_at_once():
    world = World(2)
    world.at(0.1, stop)
    assert (world.run().outcome, world.now) == ("interrupted", 0.1)


def test_a_run_that_is_stopped_and_loses_all_its_workers_ends():
    world = World(2, step_s=1.0)
    world.at(20, stop)
    world.at(21, lambda w: [w.kill(worker) for worker in list(w.alive)])
    assert world.run().outcome == "interrupted"
    assert world.now == pytest.approx(21, abs=1)


def test_a_run_that_is_stopped_and_ends_meanwhile_has_finished():
    """Also if somebody looks, or asks for its end once more, when all are through."""
    world = World(2, steps=10)
    world.at(START_S + 2, stop)
    world.at(START_S + 3, lambda w: w.store(w.step, "final"))
    assert world.run().outcome == "finished"
    world.conductor.tick(world.now + 0.2)
    assert world.conductor.stop("stopped", world.now + 5) == []
    assert world.conductor.ending().outcome == "finished"


def test_an_event_that_several_send_is_written_once():
    world = World(2)
    world.play(15.5)
    before = len(world.written)
    event = world.events(StepCommitted)[-1]
    world._say(1, RecordEvents(((event.step, event),)))
    assert len(world.written) == before


def test_a_stranger_is_not_heard():
    world = World(2)
    assert world.conductor.hear(7, Heartbeat(), 0.0) == []
    assert world.conductor.died(7, 0.0) == []
    assert world.conductor.ended(7, Outcome(kind=OutcomeKind.FINISHED), 0.0) == []


def test_what_is_said_of_checkpoints_is_passed_on():
    world = World(2)
    message = object()
    assert world.conductor.hear(0, message, 0.0) == [Relay(0, message)]


def test_a_hiccup_of_the_network_costs_a_generation_and_nobody():
    world = World(3)

    def hiccup(w):
        w.stalled = True
        for worker in w.group.members:
            w._say(worker, Suspect(w.group.generation, "reset"))

    world.at(20.5, hiccup)
    assert world.run().outcome == "finished"
    assert causes(world) == ["start", "doubt"]
    assert not lost(world)


def test_whoever_the_others_cannot_reach_is_taken_out_once_that_lasts():
    world = World(4, hang_timeout_s=5.0)

    def cut(w):
        if 2 not in w.conductor.workers:
            return
        w.stalled = w.alive[2].cut_off = True
        generation = w.conductor.membership.generation
        w._say(0, Entered(generation))  # before it noticed; the others have not
        for worker in (0, 1, 3):
            w._say(worker, Suspect(generation, "no route", frozenset({2})))
        w.at(w.now + 1.5, cut)

    world.at(20.5, cut)
    assert world.run().outcome == "finished"
    assert lost(world) == [(2, "unreachable")]
    assert committed_once(world)


def test_two_that_were_in_one_group_since_are_not_cut_off_when_that_one_fails_too():
    world = World(3, hang_timeout_s=5.0)

    def fail(w):
        w.stalled = True
        w._say(0, Suspect(w.group.generation, "no route", frozenset({2})))

    world.at(20.5, fail)
    world.at(40.5, fail)
    assert world.run().outcome == "finished"
    assert causes(world) == ["start", "doubt", "doubt"]
    assert not lost(world)


def test_nobody_is_started_before_it_is_known_where():
    conductor = Conductor(World(2).terms)
    conductor.begin([])
    assert conductor.tick(0.2) == []
    started = conductor.room(2, more=False, now=0.4)
    assert [type(action) for action in started] == [StartWorker, StartWorker]


def test_when_the_group_is_founded_anew_the_time_it_may_take_begins_anew():
    world = World(2, min_workers=2, wait_s=30.0, start_timeout_s=30.0)
    world.at(20.0, lambda w: w.kill(0))
    world.at(20.1, lambda w: setattr(w, "free", 0))  # there is no room for another
    world.at(44.0, lambda w: setattr(w, "free", 1))
    world.at(45.0, lambda w: w.kill(1))
    assert world.run().outcome == "finished"
    assert committed_once(world)


def test_another_conductor_goes_on_without_losing_anybody():
    world = World(3)
    world.at(20.5, World.take_over)
    assert world.run().outcome == "finished"
    assert causes(world) == ["start", "new controller"]
    assert not lost(world)
    assert committed_once(world)
    assert world.started == {0, 1, 2}


def test_another_conductor_lets_those_go_who_had_notice():
    """The one before may have heard of it, and nobody says it again."""
    world = World(3)

    def dies(w):
        w.notice(0)
        w.take_over()

    world.at(20.5, dies)
    assert world.run().outcome == "finished"
    assert [(e.worker, e.cause) for e in world.events(WorkerLeft)] == [(0, "notice")]
    assert not lost(world)


def test_another_conductor_that_finds_nobody_with_the_state_ends_joiners_too():
    """They are in their loops, and those who found the group anew come from the beginning."""
    world = World(3)
    world.at(20, lambda w: w.kill(1))

    def all_with_the_state(w):
        for worker in (0, 2):
            w.alive.pop(worker)
        w.stored_step = w.step
        w.take_over()

    world.at(32, all_with_the_state)  # 3 is catching up
    assert world.run().outcome == "finished"
    assert 3 not in {w for formed in world.events(GenerationFormed) for w in formed.members}
    assert committed_once(world)


def taken_over_after(last):
    """The members with whom another conductor goes on, after this last event of the one before."""
    world = World(3)
    members = []

    def dies(w):
        w.entries.append(Write(last(w.conductor.membership.generation), None))
        w.take_over()
        members[:] = w.conductor.membership.members
        assert set(members) == {0, 1, 2} & set(w.alive)  # and others are started

    world.at(20, dies)
    assert world.run().outcome == "finished"
    assert committed_once(world)
    return members


def test_another_conductor_ends_whom_the_one_before_had_taken_out():
    """It had no time to end that one, whose State is older than what the others went on to."""
    out = partial(WorkerLost, worker=1, rank=1, cause="unreachable")
    assert taken_over_after(lambda newest: out(generation=newest)) == [0, 2]


def test_another_conductor_ends_who_was_left_out_of_a_group_and_has_not_heard_of_it():
    """The one before died while it told one worker after the other."""
    formed = partial(GenerationFormed, members=(0, 2), cause="doubt")
    assert taken_over_after(lambda newest: formed(generation=newest + 1)) == [0, 2]


def test_another_conductor_keeps_who_is_to_leave_and_may_not_have_left():
    formed = partial(GenerationFormed, members=(0, 2), cause="leave", urgent=False)
    assert taken_over_after(lambda newest: formed(generation=newest + 1)) == [0, 1, 2]


def test_who_is_in_the_group_is_written_down_before_anybody_is_told():
    """Else a conductor that comes after this one could take others for members."""
    conductor = Conductor(World(1).terms)
    conductor.begin([])
    conductor.room(1, more=False, now=0.0)
    conductor.hear(0, Started(pid=1, node="", device="cpu"), 0.0)
    actions = conductor.hear(0, Ready(address=None, computes_with=""), 0.0)
    written = [isinstance(getattr(one, "event", None), GenerationFormed) for one in actions]
    told = [isinstance(one, Tell) for one in actions]
    assert written.index(True) < told.index(True)


@pytest.mark.parametrize(("reason", "unseen"), [("final", []), ("periodic", [(2, "died unseen")])])
def test_who_was_through_with_its_work_is_not_lost_to_another_conductor(reason, unseen):
    """Its process was ended, and the journal has no word of that."""
    world = World(3)
    world.play(20)

    def over(w):
        stored = StateStored(step=w.step, ref="r", reason=reason, stored_bytes=1, store_s=0.1)
        w._do([Write(stored)])
        del w.alive[2]
        w.take_over()

    world.at(20.5, over)
    world.play(20.6)
    assert lost(world) == unseen


def test_another_conductor_finds_one_dead_and_ends_joiners():
    world = World(3)
    world.at(20, lambda w: w.kill(1))

    def both(w):
        w.alive.pop(0)
        w.take_over()

    world.at(31, both)  # 3 is catching up
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "died"), (0, "died unseen")]
    assert 3 in world.ended
    assert committed_once(world)
    assert sizes(world)[-1] == 3
    ids = [event.worker for event in world.events(WorkerStarted)]
    assert len(ids) == len(set(ids))


def test_a_joiner_that_is_in_before_the_run_has_gone_back_goes_on():
    """It was given the State, and says so when whoever gave it is known to be lost."""
    terms = RunTerms(
        founders=1, min_workers=1, max_workers=2, failure=FailureConfig(), first_step_s=0.0
    )
    conductor = Conductor(terms)
    for worker in (0, 1):
        conductor.room(1, more=False, now=0.0)
        conductor.hear(worker, Started(pid=1), 0.0)
        conductor.hear(worker, Ready(("host", worker), ""), 0.0)
        if worker == 0:
            conductor.hear(0, Entered(1), 0.0)
    conductor.hear(1, CaughtUp(), 1.0)
    assert conductor.membership.members == (0, 1)
    conductor.died(0, 2.0)
    conductor.tick(2.0)
    assert conductor.phase is Phase.GOING_BACK
    conductor.hear(1, Entered(conductor.membership.generation), 2.1)
    actions = conductor.went_back(Resumed(step=0, ref=""), 2.2)
    assert conductor.phase is Phase.RUNNING
    assert conductor.membership.members == (1,)
    assert conductor.membership.urgent
    assert Tell(None, conductor.membership) in actions
    assert not any(
        isinstance(action.event, Resumed) for action in actions if isinstance(action, Write)
    )


def test_another_conductor_that_finds_nobody_goes_back():
    world = World(2)
    world.at(25, lambda w: setattr(w, "stored_step", 8))

    def nobody(w):
        w.alive.clear()
        w.ended |= w.started
        w.step, w.free = 8, 2
        w.take_over()

    world.at(30, nobody)
    assert world.run().outcome == "finished"
    assert [event.step for event in world.events(Resumed)] == [8]
    assert committed_once(world)
    assert {worker for worker, _ in lost(world)} == {0, 1}


def befalls(world, chance):
    """Random harm, at random times."""
    for when in sorted(chance.uniform(12, 60) for _ in range(chance.randint(1, 8))):
        what = chance.choice(["kill", "kill", "notice", "hang", "silence", "take over"])

        def harm(w, what=what):
            members = [worker for worker in w.alive if w.alive[worker].ready] or list(w.alive)
            if not members:
                return
            worker = chance.choice(members)
            match what:
                case "kill":
                    w.kill(worker)
                case "notice":
                    w.notice(worker)
                case "hang" if not any(w.alive[m].hung for m in members):
                    # If all hung, nobody would say that they wait for others.
                    w.alive[worker].hung = w.alive[worker].holder and len(members) > 1
                case "silence":
                    w.alive[worker].silent = True
                case "take over":
                    w.take_over()

        world.at(when, harm)


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_whatever_befalls_it_the_run_comes_to_its_end(seed):
    """And nobody is left behind, no step is lost, and whoever was started is accounted for."""
    for number in range(seed, seed + 50):
        chance = random.Random(number)
        workers = chance.randint(2, 6)
        world = World(
            workers,
            spares=chance.choice([0, 0, 1, 2]),
            min_workers=chance.randint(1, workers),
            steps=80,
            step_s=chance.choice([0.3, 1.0]),
            start_s=chance.choice([0.5, 10.0]),
            hang_timeout_s=5.0,
            wait_s=1000.0,
        )
        befalls(world, chance)
        ending = world.run()
        assert ending.outcome == "finished", (number, ending)
        assert committed_once(world), number


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_whatever_befalls_a_run_that_is_stopped_it_ends(seed):
    """Nobody is left behind, and it has finished only if all steps were taken."""
    for number in range(seed, seed + 50):
        chance = random.Random(number)
        workers = chance.randint(1, 5)
        world = World(
            workers,
            spares=chance.choice([0, 0, 1, 2]),
            shadows=chance.choice([0, 0, 1]),
            min_workers=chance.randint(1, workers),
            steps=40,
            step_s=chance.choice([0.3, 1.0, 30.0]),
            start_s=chance.choice([0.5, 10.0]),
            store_s=chance.choice([None, 0.1, 3.0, 30.0]),
            hang_timeout_s=5.0,
            wait_s=1000.0,
            replace=chance.random() < 0.8,
        )
        befalls(world, chance)
        asked = chance.uniform(0, 70)
        world.at(asked, stop)
        if chance.random() < 0.3:
            world.at(asked + chance.choice([0.0, 0.5, 5.0]), stop)
        if chance.random() < 0.3:
            world.at(asked + chance.uniform(0, 3), World.take_over)
        ending = world.run()
        if ending.outcome == "finished":
            assert committed_once(world), number
        if ending.outcome == "interrupted":
            assert world.events(StopAsked), number
            assert world.now <= max(asked, 60) + STORE_S + 5, (number, world.now)


def told_to_watch(actions):
    return {
        (action.to, action.message.worker)
        for action in actions
        if isinstance(action, Tell) and isinstance(action.message, WatchNeighbour)
    }


def test_workers_of_one_node_watch_each_other_and_are_believed():
    world = World(1)
    conductor = Conductor(replace(world.terms, founders=6, max_workers=6))
    conductor.room(6, more=False, now=0.0)
    watched = set()
    for worker in range(6):
        node = "alone" if worker == 5 else "a node"
        started = Started(pid=worker, node=node, lifeline=f"/proc/{worker}")
        watched |= told_to_watch(conductor.hear(worker, started, 0.0))
        assert not told_to_watch(conductor.hear(worker, started, 0.0)), "it was said again"
    neighbours = [(a, b) for a in range(5) for b in range(5) if a != b and abs(a - b) <= 2]
    assert watched == set(neighbours)
    actions = conductor.hear(3, SawDeath(4), 1.0)
    assert [a.event.worker for a in actions if isinstance(a, Write)] == [4]
    assert KillWorker(4) in actions
    assert not conductor.hear(2, SawDeath(4), 1.0), "it is known"
    assert not conductor.hear(4, SawDeath(2), 1.0), "it is lost itself"
    assert 2 in conductor.workers


def diverged(world, apart=None, *, unseen=False):
    """All members say that the worker of this rank holds something else; None: nobody knows who."""
    members = world.conductor.membership.members
    said = Diverged(
        step=world.conductor.state.step,
        workers=members,
        apart=members if apart is None else (members[apart],),
        parts=("model",),
        error=ReplicasDiffer("they differ"),
        unseen=unseen,
    )
    world.stalled = True
    for worker in members:
        world._say(worker, said)


def test_the_minority_is_evicted_and_replaced():
    world = World(3)
    world.at(20, lambda w: diverged(w, 1))
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "diverged")]
    assert [event.cure for event in world.events(ReplicasDiverged)] == ["evicted"]
    assert (min(sizes(world)), sizes(world)[-1]) == (2, 3)
    assert committed_once(world)


def test_without_a_majority_all_go_back():
    world = World(2)
    world.stored_step = 3
    world.at(20, diverged)
    assert world.run().outcome == "finished"
    assert [event.cure for event in world.events(ReplicasDiverged)] == ["went back"]
    assert [event.step for event in world.events(Resumed)] == [3]
    assert not lost(world)
    assert committed_once(world)


@pytest.mark.parametrize("stored", [0, 3])
def test_all_go_back_for_one_if_what_it_has_computed_may_count(stored):
    world = World(3, spares=1, shadows=1)
    world.stored_step = stored
    world.at(20, lambda w: diverged(w, 1, unseen=True))
    assert world.run().outcome == "finished"
    (found,) = world.events(ReplicasDiverged)
    assert (found.cure, found.apart, found.unseen) == ("went back", (1,), True)
    assert [event.step for event in world.events(Resumed)] == [stored]
    assert not lost(world)
    assert committed_once(world)


def test_whoever_held_it_is_ended_at_once_and_nothing_that_is_on_the_way_is_stored():
    world = World(3, steps=500)
    world.play(20)
    said = []
    world._do = said.extend  # in place of the shell
    diverged(world, 1, unseen=True)
    assert world.conductor.phase is Phase.GOING_BACK
    assert {action.worker for action in said if isinstance(action, EndWorker)} == {0, 1, 2}
    assert not world.conductor.workers


def test_a_controller_that_takes_over_goes_back_if_the_one_before_was_about_to():
    """None of those who are at work goes on: nobody knows what they hold."""
    world = World(3)
    world.stored_step = 3
    world.play(20)
    found = ReplicasDiverged(
        step=world.conductor.state.step,
        workers=(0, 1, 2),
        apart=(1,),
        parts=("model",),
        cure="went back",
        unseen=True,
    )
    world._do([Write(found)])  # it dies before it has done anything about it
    world.step = 3
    world.take_over()
    assert [event.step for event in world.events(Resumed)] == [3]
    assert world.run().outcome == "finished"
    assert {0, 1, 2} <= world.ended
    assert committed_once(world)


def test_states_that_differ_when_they_are_to_be_stored_are_gone_back_for_with_the_next_tick():
    world = World(3)
    world.stored_step = 3

    def differ(world):
        error = ReplicasDiffer("they differ")
        step = world.conductor.state.step
        found = {"workers": (0, 1, 2), "apart": (1,), "parts": ("model",)}
        world.conductor.differ(Diverged(step=step, error=error, unseen=True, **found))

    world.at(20, differ)
    assert world.run().outcome == "finished"
    assert [event.cure for event in world.events(ReplicasDiverged)] == ["went back"]
    assert [event.step for event in world.events(Resumed)] == [3]


def test_states_that_differ_are_gone_back_for_also_if_all_members_are_lost_then():
    """A shadow would have gone on, perhaps from what is wrong."""
    world = World(2, shadows=1)
    world.stored_step = 3
    world.play(20.0)
    conductor, now = world.conductor, world.now
    for worker in conductor.membership.members:
        conductor.died(worker, now)
    conductor.tick(now)
    assert conductor.phase is Phase.GOING_BACK
    found = {"workers": (0, 1), "apart": (1,), "parts": ("model",)}
    error = ReplicasDiffer("they differ")
    conductor.differ(Diverged(step=conductor.state.step, error=error, unseen=True, **found))
    written = [action.event for action in conductor.judge(now) if isinstance(action, Write)]
    assert [type(event) for event in written] == [ReplicasDiverged]
    assert conductor.phase is Phase.GOING_BACK
    actions = conductor.went_back(Resumed(step=3, ref="stored"), now)
    resumed = [action.event for action in actions if isinstance(action, Write)]
    assert Resumed in map(type, resumed)


def test_what_was_stored_of_an_unseen_fault_is_void_although_the_run_ends():
    world = World(2, replace=False)
    world.play(20.0)
    found = {"workers": (0, 1), "apart": (1,), "parts": ("model",)}
    error = ReplicasDiffer("they differ")
    world.conductor.differ(Diverged(step=9, error=error, unseen=True, **found))
    world.conductor.tick(world.now)
    assert world.conductor.error is error
    assert world.conductor.state.parted is not None


@pytest.mark.parametrize(("stored", "replace"), [(0, True), (3, False)])
def test_the_run_ends_if_there_is_nothing_to_go_back_to_or_nobody_who_could(stored, replace):
    world = World(2, replace=replace)
    world.stored_step = stored
    world.at(20, diverged)
    ending = world.run()
    assert (ending.outcome, ending.message) == ("failed", "they differ")


def test_workers_that_part_three_times_in_a_few_steps_end_the_run():
    world = World(5)
    for number in range(3):
        world.at(20 + number, lambda w: diverged(w, 0))
    ending = world.run()
    assert (ending.outcome, ending.message) == ("failed", "they differ")
    assert len(world.events(ReplicasDiverged)) == 2


def test_only_a_step_of_the_survivors_frees_the_cores():
    world = World(3, step_s=1e3)
    world.at(20, lambda w: w.kill(1))
    world.play(20.3)
    generation = world.conductor.membership.generation
    step = StepCommitted(step=1, generation=generation, world_size=2, batches=())
    said = {"outcome": "reduced again", "rebuild_s": 0.1, "stall_s": 0.1}
    recovered = Recovered(worker=0, generation=generation, step=1, **said)
    for event in (recovered, replace(step, generation=generation - 1)):
        world._say(0, RecordEvents(((None, event),)))
        assert 3 not in world.started
    world._say(0, RecordEvents(((None, step),)))
    assert 3 in world.started


def test_a_fenced_worker_that_nobody_had_asked_to_leave_is_lost():
    world = World(3)
    world.play(20)
    fenced = Outcome(kind=OutcomeKind.FENCED, error=TrainError("too far behind"))
    world._do(world.conductor.ended(1, fenced, world.now))
    assert lost(world) == [(1, "fenced")]


def test_what_the_shell_has_to_say_comes_first_in_the_journal():
    begun = RunStarted(name="r", seed=0, config={}, scaling={}, versions={})
    conductor = Conductor(World(2).terms)
    assert conductor.begin([begun]) == [Write(begun, None)]


def test_nothing_else_is_decided_once_the_run_has_to_go_back():
    world = World(1, spares=1)
    world.play(30)
    conductor = world.conductor
    conductor.died(0, world.now)
    conductor.room(0, more=True, now=world.now, draining=("node0",))  # where the spare is
    assert conductor.tick(world.now) == []
    assert conductor.phase is Phase.GOING_BACK


def test_that_processors_differ_is_said_once_also_by_another_conductor():
    world = World(3, steps=80)
    world.computes_with = {1: "processor b", 3: "processor b", 5: "processor c"}
    world.at(20.0, lambda world: world.kill(0))  # 3 comes
    world.at(40.0, lambda world: (world.kill(2), world.take_over()))  # 4 comes
    world.play(59.0)
    (told,) = world.events(ProcessorsDiffer)
    assert told.kinds == {"processor a": (0, 2), "processor b": (1,)}
    world.at(60.0, lambda world: world.kill(4))  # 5 comes, and is of a kind that is new
    assert world.run().outcome == "finished"
    told = [set(event.kinds) for event in world.events(ProcessorsDiffer)]
    assert told[1:] == [{"processor b", "processor c"}]


@pytest.mark.parametrize("anew", [False, True])
def test_who_was_told_something_else_does_not_found_the_group_anew(anew):
    world = World(2)
    world.stored_step = 3
    world.play(20.0)
    conductor, now = world.conductor, world.now
    conductor.died(0, now)
    conductor.room(1, more=True, now=now)
    conductor.tick(now + 1)
    early = started(conductor.tick(now + 2))
    conductor.died(1, now + 2)
    conductor.tick(now + 2)
    assert conductor.phase is Phase.GOING_BACK
    actions = conductor.went_back(Resumed(step=3, ref="stored"), now + 2, anew=anew)
    assert early
    assert {action.worker for action in actions if isinstance(action, EndWorker)} == (
        set(early) if anew else set()
    )


def test_nor_does_it_after_a_shadow_has_gone_on_meanwhile():
    world = World(2, shadows=1)
    world.play(40.0)
    conductor, now = world.conductor, world.now
    (shadow,) = world.level
    conductor.died(0, now)
    conductor.room(1, more=True, now=now)
    conductor.tick(now + 1)
    early = started(conductor.tick(now + 2))
    assert early
    conductor.died(1, now + 2)
    conductor.tick(now + 2)
    assert conductor.phase is Phase.GOING_BACK
    stored = Resumed(step=3, ref="stored")
    assert not ended(conductor.went_back(stored, now + 2, anew=True))
    assert conductor.membership.members == (shadow,)
    step, number = conductor.state.step, conductor.state.sequence + 1
    said = Succeeded(step=step, since=number, sequence=number, equal=True)
    conductor.hear(shadow, said, now + 2)
    conductor.hear(shadow, Entered(conductor.membership.generation), now + 2)
    conductor.died(shadow, now + 2)
    conductor.tick(now + 2)
    assert conductor.phase is Phase.GOING_BACK
    assert ended(conductor.went_back(stored, now + 2)) == set(early)


def test_one_that_came_in_as_all_others_were_lost_may_say_that_they_had_parted():
    """Nobody else is left who would. That it has come in is heard last of all."""
    world = World(2)
    world.play(20.0)
    world.kill(1)
    conductor, late, say = world.conductor, [], world._say

    def say_late(worker, message):
        if worker > 1 and isinstance(message, Entered):
            late.append(worker)
        else:
            say(worker, message)

    world._say = say_late
    while not late:
        world.play(world.now + 0.01)
    (joiner,), now, newest = late, world.now, conductor.membership
    conductor.died(0, now)
    conductor.tick(now)
    assert conductor.phase is Phase.GOING_BACK
    conductor.hear(joiner, Entered(newest.generation), now)
    assert conductor.holders == {joiner}
    found = {"workers": (0, joiner), "apart": (0, joiner), "parts": ("model",)}
    step, error = conductor.state.step, ReplicasDiffer("they differ")
    conductor.hear(joiner, Diverged(step=step, error=error, unseen=True, **found), now)
    conductor.judge(now)
    actions = conductor.went_back(Resumed(step=3, ref="stored"), now)
    written = [action.event for action in actions if isinstance(action, Write)]
    assert Resumed in map(type, written)
    assert joiner not in conductor.workers


def goes_on_from_parts(world):
    """All workers are lost, and processes of theirs hold the State after the last step."""
    conductor = world.conductor
    for worker in list(conductor.workers):
        conductor.died(worker, world.now)
    conductor.tick(world.now)
    assert conductor.phase is Phase.GOING_BACK
    assert conductor.extinct
    step = conductor.state.step
    assert step > 0
    actions = conductor.went_back(Resumed(step=step, ref="", held=True), world.now)
    assert conductor.founder is not None
    return conductor, actions


def started(actions):
    return [action.worker for action in actions if isinstance(action, StartWorker)]


def ended(actions):
    return {action.worker for action in actions if isinstance(action, EndWorker)}


def test_who_holds_the_parts_of_the_state_founds_the_group_alone():
    world = World(3)
    world.play(30)
    conductor, actions = goes_on_from_parts(world)
    actions += conductor.room(5, more=True, now=world.now)
    assert started(actions) == [conductor.founder]
    conductor.hear(conductor.founder, Started(pid=1), world.now)
    conductor.hear(conductor.founder, Ready(None), world.now)
    newest = conductor.membership
    assert (newest.members, newest.cause) == ((conductor.founder,), "start")
    assert started(conductor.room(5, more=True, now=world.now)) == []
    founded = conductor.hear(conductor.founder, Entered(newest.generation), world.now)
    founded += conductor.tick(world.now + 10)
    assert len(started(founded)) > 1
    assert conductor.phase is Phase.RUNNING


@pytest.mark.parametrize("held", [True, False])
def test_a_stop_waits_for_those_who_have_the_state_in_parts(held):
    world = World(2, in_parts=True)
    world.play(30)
    conductor = world.conductor
    conductor.stop("Ctrl-C", world.now)
    for worker in list(conductor.workers):
        conductor.died(worker, world.now)
    conductor.tick(world.now)
    assert conductor.phase is Phase.GOING_BACK
    step = conductor.state.step
    actions = conductor.went_back(Resumed(step=step if held else 0, ref="", held=held), world.now)
    actions += conductor.room(5, more=True, now=world.now)
    actions += conductor.tick(world.now)
    assert started(actions) == ([conductor.founder] if held else [])
    if held:
        founder = conductor.founder
        conductor.hear(founder, Started(pid=1), world.now)
        conductor.hear(founder, Ready(None), world.now)
        generation = conductor.membership.generation
        actions = conductor.hear(founder, Entered(generation), world.now)
        assert Tell(founder, StoreSoon()) in actions
        actions = conductor.tick(world.now + 10) + conductor.room(5, more=True, now=world.now + 10)
        assert started(actions) == []
        assert conductor.phase is Phase.RUNNING
        world.store(step, "notice")
    assert conductor.phase is Phase.OVER
    assert conductor.ending().outcome == "interrupted"


def test_a_stop_does_not_wait_for_parts_for_ever():
    world = World(2, in_parts=True)
    world.play(30)
    conductor = world.conductor
    for worker in list(conductor.workers):
        conductor.died(worker, world.now)
    conductor.tick(world.now)
    conductor.stop("Ctrl-C", world.now)
    assert conductor.phase is Phase.GOING_BACK
    for second in range(21):
        conductor.tick(world.now + second)
    assert conductor.phase is Phase.OVER


def test_if_the_founder_is_lost_nobody_else_founds_the_group_but_from_a_stored_state():
    """Others know no State that the journal has been told of."""
    world = World(3)
    world.play(30)
    conductor, _ = goes_on_from_parts(world)
    conductor.room(5, more=True, now=world.now)
    actions = conductor.died(conductor.founder, world.now)
    assert started(actions) == []
    assert conductor.phase is Phase.GOING_BACK
    assert not conductor.extinct
    actions = conductor.went_back(Resumed(step=0, ref=""), world.now)
    actions += conductor.room(5, more=True, now=world.now)
    assert conductor.founder is None
    assert len(started(actions)) >= 3


def suspend(seconds):
    """All processes are stopped for so long, and then go on, the conductor's first."""

    def stopped(world):
        world._queue = [(when + seconds, number, what) for when, number, what in world._queue]
        world._do(world.conductor.tick(world.now + seconds - 1e-6))

    return stopped


@pytest.mark.parametrize("seconds", [40.0, 4000.0])
def test_a_machine_that_was_suspended_costs_no_worker(seconds):
    world = World(3, hang_timeout_s=30.0, steps=60)
    world.at(20.5, suspend(seconds))
    assert world.run(until=8000).outcome == "finished"
    assert lost(world) == []


def test_whoever_is_still_silent_after_a_suspension_is_found_in_time():
    world = World(3, hang_timeout_s=30.0, steps=60)
    world.at(20.5, suspend(4000.0))
    world.at(24.5, lambda w: setattr(w.alive[1], "silent", True))
    world.play(4056)
    assert lost(world) == [(1, "silent")]


def test_a_run_that_is_suspended_while_it_is_stopped_stores_its_state():
    world = World(2, store_s=3.0)
    world.at(20.5, stop)
    world.at(20.6, suspend(100.0))
    assert world.run().outcome == "interrupted"
    assert world.stored_step


def test_a_silent_worker_is_found_where_ticks_always_come_late():
    """Each of them comes later than half of the timeout, as after a suspension."""
    world = World(3, hang_timeout_s=2.0, tick_s=1.5, heartbeat_s=0.4)
    world.at(20.0, lambda w: setattr(w.alive[1], "silent", True))
    assert world.run().outcome == "finished"
    assert lost(world) == [(1, "silent")]


@pytest.mark.parametrize("when", [0.5, 25.0])
def test_a_run_that_is_suspended_while_it_waits_for_workers_waits_as_long_as_ever(when):
    world = World(2, min_workers=2, wait_s=30.0, start_timeout_s=30.0)
    world.at(20.0, lambda w: w.kill(0))
    world.at(20.1, lambda w: setattr(w, "free", 0))  # there is no room for another
    world.at(28.0, lambda w: setattr(w, "free", 1))
    world.at(when, suspend(100.0))
    assert world.run().outcome == "finished"
    assert committed_once(world)


def test_what_is_asked_for_before_a_suspended_conductor_knows_the_time_is_no_later_for_that():
    interruption = Interruption()
    interruption.ask("Ctrl-C", step=5, stored=0, now=4000.0)
    interruption.was_away(3600.0, now=4000.2)
    interruption.look(4019.0, held=True)
    assert not interruption.over
    interruption.look(4020.5, held=True)
    assert interruption.over


class Deaf(World):
    """No heartbeat comes through between these times, and no step is taken."""

    cut_off = (20.5, 0.0)

    def _beat(self):
        since, until = self.cut_off
        if since <= self.now < until:
            self._later(self._heartbeat_s, self._beat)
        else:
            super()._beat()

    def _commit(self, group):
        """Workers wait at a boundary for whoever leads the run."""
        since, until = self.cut_off
        if since <= self.now < until:
            self._later(1.0, lambda: self._commit(group))
        else:
            super()._commit(group)


def test_a_conductor_that_is_cut_off_from_all_workers_takes_none_of_them_for_lost():
    world = Deaf(3, hang_timeout_s=30.0)
    world.cut_off = (20.5, 65.0)
    assert world.run().outcome == "finished"
    assert lost(world) == []
    assert committed_once(world)


def test_a_conductor_that_hears_of_nobody_for_long_goes_back():
    world = Deaf(3, hang_timeout_s=30.0)
    world.at(20.5, lambda w: [setattr(w.alive[n], "silent", True) for n in range(3)])
    assert world.run().outcome == "finished"
    assert lost(world) == [(n, "silent") for n in range(3)]
    assert world.events(Resumed)
