"""Which processes the workers are: who is free, who is overdue, and when a worker is silent."""

from random import Random

import pytest

from elastix.events import StepCommitted
from elastix.train.checkpoint.assembly import CheckpointEnded, CheckpointId, Order
from elastix.train.control.crews import OUT_S, Crews
from elastix.train.control.messages import (
    CatchUp,
    Dismiss,
    Heartbeat,
    HeldPart,
    Leave,
    OutcomeKind,
    Ready,
    Started,
)
from elastix.train.control.run_state import RunState


def test_a_worker_of_fresh_processes_uses_room():
    crews = Crews(2, {"": 4}, again=False)
    assert crews.workers == 2
    assert crews.start(0) == ([0, 1], [])
    assert crews.start(1) == ([2, 3], [])
    assert crews.workers == 0
    assert not crews.more
    assert [crews.at(process) for process in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), None]


def test_a_mate_of_a_lost_process_and_a_fresh_one_are_a_new_worker():
    crews = Crews(2, {"": 2}, again=True)
    crews.start(0)
    assert crews.gone(1) == 0
    assert crews.break_up(0, now=10.0) == [0]
    assert crews.workers == 0
    assert crews.more  # when it is out
    crews.freed(0)
    assert crews.workers == 1
    assert crews.start(1) == ([0, 2], [])


def test_the_halves_of_two_broken_workers_are_a_new_one():
    crews = Crews(2, {"": 4}, again=False)
    crews.start(0)
    crews.start(1)
    for worker, dead, mate in ((0, 0, 1), (1, 3, 2)):
        assert crews.gone(dead) == worker
        crews.break_up(worker, now=0.0)
        crews.freed(mate)
    assert crews.workers == 1
    assert crews.start(2) == ([2, 1], [])
    assert [crews.at(2), crews.at(1)] == [(2, 0), (2, 1)]


def test_a_free_process_at_a_place_that_is_taken_makes_room_for_a_fresh_one():
    """It never changes its place: torch remembers where it was."""
    crews = Crews(2, {"": 4}, again=False)
    crews.start(0)
    crews.start(1)
    for worker, dead, mate in ((0, 0, 1), (1, 2, 3)):
        assert crews.gone(dead) == worker
        crews.break_up(worker, now=0.0)
        crews.freed(mate)
    assert crews.workers == 1
    assert crews.start(2) == ([4, 1], [3])
    assert crews.at(3) is None
    assert crews.workers == 0


def test_no_fresh_process_is_started_beside_one_that_is_about_to_be_free():
    crews = Crews(2, {"": 5}, again=True)
    crews.start(0)
    crews.start(1)
    for worker, dead in ((0, 0), (1, 3)):
        assert crews.gone(dead) == worker
        crews.break_up(worker, now=0.0)
    assert crews.workers == 0
    crews.freed(1)
    assert crews.workers == 0
    crews.freed(2)
    assert crews.workers == 2
    assert crews.start(2) == ([2, 1], [])


def test_who_does_not_come_out_is_overdue_and_its_end_is_no_second_loss():
    crews = Crews(3, {"": 3}, again=False)
    crews.start(0)
    assert crews.gone(2) == 0
    crews.break_up(0, now=10.0)
    crews.freed(0)
    assert crews.overdue(10.0 + OUT_S - 0.1) == []
    assert crews.overdue(10.0 + OUT_S) == [1]
    assert crews.gone(1) is None
    assert crews.free == [0]


def test_a_process_that_is_through_is_no_loss():
    crews = Crews(2, {"": 2}, again=False)
    crews.start(0)
    assert not crews.over(1, OutcomeKind.FINISHED)
    assert crews.break_up(0, now=0.0) == [0]
    assert crews.gone(1) is None


def beat(passed=1, *, waiting=False):
    return Heartbeat(passed=passed, waiting=waiting)


def comes_up(crews, process, worker):
    crews.passed_on(process, worker, Started(pid=process))


def test_a_worker_is_as_silent_as_its_most_silent_place():
    crews = Crews(2, {"": 2}, again=False)
    crews.start(0)
    comes_up(crews, 0, 0)
    comes_up(crews, 1, 0)
    assert crews.beat(0, beat()) is None
    assert crews.beat(0, beat()) is None
    assert crews.beat(1, beat(4)) == beat(5)
    assert crews.beat(1, beat(4)) is None
    assert crews.beat(1, beat(4)) is None  # the speaker is stopped, and so is the worker


def test_a_fresh_process_that_is_not_up_yet_is_not_silent():
    """It may take minutes; its mates are there at once, if they were of a lost worker."""
    crews = Crews(3, {"": 3}, again=False)
    crews.start(0)
    comes_up(crews, 0, 0)
    assert crews.beat(0, beat()) == beat()
    assert crews.beat(0, beat(waiting=True)) == beat()  # for a mate, and for no other worker
    comes_up(crews, 2, 0)
    assert crews.beat(0, beat()) is None
    assert crews.beat(2, beat(4)) == beat(5)
    comes_up(crews, 1, 0)
    assert crews.beat(0, beat()) is None
    assert crews.beat(2, beat(4)) is None
    assert crews.beat(1, beat(waiting=True)) == beat(6)


def test_a_worker_whose_speaker_is_not_up_yet_says_nothing():
    crews = Crews(2, {"": 2}, again=False)
    crews.start(0)
    comes_up(crews, 1, 0)
    assert crews.beat(1, beat()) is None


@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_was_of_another_worker_before_is_up_and_can_be_silent(dead):
    crews = Crews(2, {"": 2}, again=True)
    crews.start(0)
    crews.gone(dead)
    crews.break_up(0, now=0.0)
    crews.freed(1 - dead)
    crews.start(1)
    comes_up(crews, 2, 1)
    assert crews.beat(2, beat()) is None
    assert crews.beat(1 - dead, beat()) == beat(2)


@pytest.mark.parametrize(
    ("speaker", "follower", "worker"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_a_worker_waits_for_others_if_all_its_places_do(speaker, follower, worker):
    crews = Crews(2, {"": 2}, again=False)
    crews.start(0)
    comes_up(crews, 1, 0)
    crews.beat(0, beat(waiting=speaker))
    passed_on = crews.beat(1, beat(waiting=follower))
    assert passed_on is not None
    assert passed_on.waiting == worker


def test_signs_of_life_on_the_way_out_are_nobodys():
    crews = Crews(2, {"": 2}, again=False)
    crews.start(0)
    crews.gone(1)
    crews.break_up(0, now=0.0)
    assert crews.beat(0, beat()) is None
    assert crews.beat(7, beat()) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_process_is_at_two_places_and_none_is_forgotten(seed):
    draw = Random(seed)
    size, workers = draw.randint(1, 4), 3
    crews = Crews(size, {"": workers * size}, again=True)
    alive: set[int] = set()
    worker = 0
    for now in range(200):
        at_work = [p for p in alive if crews.at(p) is not None]
        if crews.workers and draw.random() < 0.5:
            chosen, ended = crews.start(worker)
            alive -= set(ended)
            assert len(set(chosen)) == size
            assert [crews.at(p) for p in chosen] == [(worker, place) for place in range(size)]
            alive |= set(chosen)
            worker += 1
        elif at_work and draw.random() < 0.6:
            process = draw.choice(at_work)
            there = crews.at(process)
            assert there is not None
            lost = crews.gone(process)
            alive.discard(process)
            assert crews.at(process) is None
            for mate in crews.break_up(there[0], now) if lost is not None else ():
                assert mate in alive
        for process in crews.overdue(now):
            crews.gone(process) if draw.random() < 0.5 else crews.freed(process)
            if crews.at(process) is None and process not in crews.free:
                alive.discard(process)
        assert set(crews.free) <= alive
        assert len(alive) <= workers * size


def test_what_another_process_than_the_speaker_says_counts_if_it_is_of_what_it_sees():
    crews = Crews(2, {"": 2}, again=True)
    crews.start(0)
    assert crews.passed_on(0, 0, Ready(None)) == Ready(None)
    assert crews.passed_on(1, 0, Ready(None)) is None
    assert crews.passed_on(1, 0, Leave("notice")) == Leave("notice")


def test_who_hears_what():
    crews = Crews(2, {"": 4}, again=True)
    crews.start(0)
    crews.start(1)

    def told(to, message):
        return [process for process in range(4) if crews.hears(process, to, message) is not None]

    mark = CheckpointId(3)
    assert told(None, CheckpointEnded(mark)) == [0, 1, 2, 3]
    assert told(1, CheckpointEnded(mark)) == [2, 3]
    assert told(1, Order(mark, ("w",), place=1)) == [3]
    assert told(None, CatchUp(())) == [0, 2]
    assert told(None, Dismiss("nobody comes")) == [0, 1, 2, 3]
    crews.gone(3)
    crews.break_up(1, now=0.0)
    crews.freed(2)
    assert told(None, Dismiss("nobody comes")) == [0, 1]


def test_what_a_process_says_of_a_worker_that_is_lost_is_nothing_of_its_next():
    crews = Crews(2, {"": 3}, again=True)
    crews.start(0)
    assert crews.gone(1) == 0
    crews.break_up(0, now=0.0)
    crews.freed(0)
    assert crews.passed_on(0, 0, Ready(None)) is None
    assert crews.start(1) == ([0, 2], [])
    assert crews.passed_on(0, 0, Ready(None)) is None
    assert crews.passed_on(0, 1, Ready(None)) == Ready(None)


def test_what_befalls_one_process_befalls_its_worker():
    crews = Crews(2, {"": 2}, again=True)
    crews.start(0)
    assert crews.over(1, OutcomeKind.OUT_OF_MEMORY)
    assert crews.over(0, OutcomeKind.FINISHED)


def test_processes_of_one_worker_are_of_one_site():
    crews = Crews(2, {"a": 3, "b": 3}, again=True)
    assert crews.workers == 2  # the third of each site stays alone
    assert crews.start(0) == ([0, 1], [])
    assert crews.start(1) == ([2, 3], [])
    assert crews.room == {"a": 1, "b": 1}
    assert crews.workers == 0
    with pytest.raises(ValueError, match="no room for worker 2"):
        crews.start(2)


def test_halves_of_two_sites_are_no_worker_but_each_with_what_is_there():
    crews = Crews(2, {"a": 2, "b": 2}, again=False)
    crews.start(0)
    crews.start(1)
    for worker, dead, mate in ((0, 0, 1), (1, 3, 2)):
        assert crews.gone(dead) == worker
        crews.break_up(worker, now=0.0)
        crews.freed(mate)
    assert crews.workers == 0
    crews.room["b"] = 1
    assert crews.start(2) == ([2, 4], [])


def test_workers_that_were_found_go_on_as_they_are():
    crews = Crews(2, {"": 1}, again=True)
    crews.take_over({3: [(5, ""), (9, "")]}, known=11)
    assert crews.of(3) == [5, 9]
    assert crews.gone(9) == 3
    crews.break_up(3, now=0.0)
    crews.freed(5)
    assert crews.start(4) == ([5, 11], [])


# ---------------------------------------------------------------------------- parts of a State


def broken_up(kept, sites=None, distrusted=()):
    """Workers that have lost all but one process each; `kept` is (place, what) of that one."""
    crews = Crews(2, sites or {"": 2 * len(kept)}, again=True)
    for worker in range(len(kept)):
        crews.start(worker)
    for worker in distrusted:
        crews.distrust(worker)
    for worker, (place, what) in enumerate(kept):
        mine = crews.of(worker)[place]
        for process in crews.of(worker):
            if process != mine:
                crews.gone(process)
        crews.break_up(worker, now=0.0)
        assert crews.leaving
        crews.freed(mine, what)
    assert not crews.leaving
    return crews


def has(step, following, generation=1, **told):
    return HeldPart(step, following, generation=generation, **told)


def told_of(step, sequence, generation=1):
    """A journal with steps of one generation up to that one."""
    state = RunState()
    for one in range(1, step + 1):
        state.take(StepCommitted(step=one, generation=generation, world_size=1, batches=()))
    state.sequence = sequence
    return state


def step_of(found):
    return None if found is None else found.step


def test_processes_that_have_all_parts_of_one_state_are_the_next_worker():
    crews = broken_up([(1, has(7, 3)), (0, has(6, 2)), (0, has(7, 3))])
    assert step_of(crews.found_from(told_of(7, 2), after=0)) == 7
    assert crews.founding
    assert crews.start(3) == ([4, 1], [])
    assert crews.founds(3)
    assert not crews.founding
    crews.start(4)
    assert not crews.founds(4)  # it has one of them that is older


@pytest.mark.parametrize(
    ("kept", "journal"),
    [
        pytest.param([(0, has(7, 3)), (0, has(7, 3))], (7, 2, 0), id="a place is lost"),
        pytest.param([(0, has(7, 3)), (1, has(6, 3))], (7, 2, 0), id="of different steps"),
        pytest.param([(0, has(7, 3)), (1, None)], (7, 2, 0), id="one is changed since"),
        pytest.param([(0, has(7, 3)), (1, has(7, 3))], (6, 2, 0), id="the journal lacks a step"),
        pytest.param([(0, has(7, 3)), (1, has(7, 3))], (7, 1, 0), id="it lacks events"),
        pytest.param([(0, has(7, 3)), (1, has(7, 3))], (7, 2, 7), id="no further than is stored"),
        pytest.param([(0, has(7, 3)), (1, has(7, 4))], (7, 3, 0), id="one has reported since"),
        pytest.param(
            [(0, has(7, 3, places=((0, 84),))), (1, has(7, 3, places=((1, 84),)))],
            (7, 2, 0),
            id="one is in the next epoch",
        ),
        pytest.param(
            [(0, has(7, 3, asked=0)), (1, has(7, 3, asked=1))],
            (7, 2, 0),
            id="one is where the next loader is asked",
        ),
        pytest.param(
            [(0, has(7, 3, 1)), (1, has(7, 3, 2))], (7, 2, 0), id="one has taken it once more"
        ),
        pytest.param(
            [(0, has(7, 3, 2)), (1, has(7, 3, 2))], (7, 2, 0), id="the journal has the first time"
        ),
    ],
)
def test_parts_of_no_state_that_is_of_use_found_nothing(kept, journal):
    crews = broken_up(kept)
    step, sequence, after = journal
    assert crews.found_from(told_of(step, sequence), after) is None
    assert not crews.founding
    crews.start(2)
    assert not crews.founds(2)


def test_what_lost_workers_have_not_told_of_a_state_is_found_with_its_parts():
    """The end of their mates was heard of sooner than that."""
    numbered = [
        (one, StepCommitted(step=one, generation=1, world_size=2, batches=())) for one in (6, 7)
    ]
    first, second = has(7, 8, untold=tuple(numbered[:1])), has(7, 8, untold=tuple(numbered))
    found = broken_up([(1, first), (0, second)]).found_from(told_of(5, 5), after=0)
    assert step_of(found) == 7
    assert found.untold == tuple(numbered)
    found = broken_up([(1, first), (0, second)]).found_from(told_of(6, 6), after=0)
    assert found.untold == tuple(numbered[1:])
    assert broken_up([(1, first), (0, first)]).found_from(told_of(5, 5), after=0) is None


def test_who_was_given_the_state_goes_with_those_whose_step_the_journal_has():
    parts = [(0, has(7, 3, 1)), (0, has(7, 3, 2)), (1, has(7, 3, None))]
    for generation, founder in ((1, 0), (2, 2)):
        crews = broken_up(parts)
        assert step_of(crews.found_from(told_of(7, 2, generation), after=0)) == 7
        assert crews.start(3)[0] == [founder, 5]


def test_of_two_states_in_parts_the_further_one_counts():
    crews = broken_up([(0, has(6, 2)), (1, has(6, 2)), (1, has(7, 3)), (0, has(7, 3))])
    assert step_of(crews.found_from(told_of(8, 4), after=5)) == 7
    assert crews.start(4) == ([6, 5], [])


@pytest.mark.parametrize("stored", [5, 6])
def test_parts_of_a_step_that_was_given_up_do_not_go_with_those_of_its_second_time(stored):
    crews = broken_up([(0, has(7, 3)), (0, has(6, 2)), (0, has(7, 3))])  # nobody is at place 1
    assert crews.found_from(told_of(7, 2), after=stored) is None
    crews.room[""] = 2
    founders, _ = crews.start(3)  # from what is stored; two of the old ones have nothing to do
    crews.gone(founders[0])
    crews.break_up(3, now=0.0)
    crews.freed(founders[1], has(7, 3))  # it was the second time that it came to step 7
    assert len(crews.free) == 3
    assert crews.found_from(told_of(7, 2), after=stored) is None


def test_what_is_no_further_than_the_run_went_back_to_is_of_use_still():
    crews = broken_up([(0, has(6, 2)), (1, has(6, 2)), (0, has(7, 3)), (1, has(7, 3))])
    assert step_of(crews.found_from(told_of(7, 4), after=5)) == 7
    crews.gone(crews.start(4)[0][0])  # so the founder is lost as well
    assert step_of(crews.found_from(told_of(7, 4), after=5)) == 6


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"sites": {"a": 2, "b": 2}}, id="at different sites"),
        pytest.param({"distrusted": [1]}, id="of one that had another State"),
    ],
)
def test_parts_that_do_not_go_together_are_no_worker(how):
    crews = broken_up([(0, has(7, 3)), (1, has(7, 3))], **how)
    assert crews.found_from(told_of(7, 2), after=0) is None


def test_founders_of_which_one_dies_found_nothing():
    crews = broken_up([(0, has(7, 3)), (1, has(7, 3))])
    crews.found_from(told_of(7, 2), after=0)
    assert crews.gone(0) is None
    assert not crews.founding
