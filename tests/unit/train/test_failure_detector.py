"""The failure detector: who is silent, who holds up the others, who is slow; in virtual time."""

import random
import statistics
from dataclasses import replace

import pytest

from elastix.train.control.failure_detector import FailureDetector
from elastix.train.control.messages import Heartbeat, Suspect

TIMEOUT = 10.0
FIRST = 60.0


def watched(
    beats: dict[int, Heartbeat], until: int, changing: set[int] = frozenset()
) -> FailureDetector:
    """Everybody takes a step, then sends the same heartbeat once a second; `changing` ones move."""
    detector = FailureDetector(TIMEOUT, FIRST)
    for worker, beat in beats.items():
        detector.hear(worker, replace(beat, step=beat.step - 1), -1.0)
    for second in range(until + 1):
        for worker, beat in beats.items():
            passed = second if worker in changing else 0
            detector.hear(worker, replace(beat, passed=passed), float(second))
    return detector


BUSY = Heartbeat(generation=1, step=5)
WAITS = replace(BUSY, waiting=True)


def test_a_worker_without_signs_is_silent():
    detector = FailureDetector(TIMEOUT, FIRST)
    detector.hear(0, BUSY, 0.0)
    detector.hear(1, BUSY, 5.0)
    assert detector.silent(10.0) == []
    assert detector.silent(10.5) == [0]
    detector.forget(0)
    assert detector.silent(10.5) == []


def test_if_nobody_is_heard_of_it_may_be_the_network_of_who_listens():
    """Only for so long: they may be gone, too."""
    detector = FailureDetector(TIMEOUT, FIRST)
    for worker, beat in enumerate((WAITS, BUSY, BUSY)):
        detector.hear(worker, beat, 0.0)
    for now in (9.0, 11.0, 25.0, 30.0):
        assert detector.silent(now) == []
        assert detector.holding_up((0, 1, 2), now) == []
    assert detector.silent(30.5) == [0, 1, 2]


def test_after_that_each_has_as_long_as_ever():
    detector = FailureDetector(TIMEOUT, FIRST)
    beats = (replace(WAITS, step=7), replace(BUSY, step=7), BUSY)
    for worker, beat in enumerate(beats):
        detector.hear(worker, replace(beat, step=beat.step - 1), -1.0)
        detector.hear(worker, beat, 0.0)
    for now in range(25, 35):  # two are there again, as they were
        for worker in (0, 1):
            detector.hear(worker, beats[worker], float(now))
        assert detector.silent(float(now)) == []
        assert detector.holding_up((0, 1, 2), float(now)) == []
    for now in range(35, 40):
        for worker in (0, 1):
            detector.hear(worker, beats[worker], float(now))
    assert detector.silent(39.0) == [2]
    assert detector.holding_up((0, 1), 39.0) == [1]


def test_one_alone_that_is_silent_is_so_for_itself():
    detector = FailureDetector(TIMEOUT, FIRST)
    detector.hear(0, BUSY, 0.0)
    assert detector.silent(10.5) == [0]


def test_whoever_all_others_wait_for_holds_them_up():
    beats = {0: WAITS, 1: BUSY, 2: WAITS}
    assert watched(beats, 9).holding_up((0, 1, 2), 9.0) == []
    assert watched(beats, 12).holding_up((0, 1, 2), 12.0) == [1]


def test_two_may_hang_at_once():
    assert watched({0: WAITS, 1: BUSY, 2: BUSY}, 12).holding_up((0, 1, 2), 12.0) == [1, 2]


def test_nobody_holds_up_the_others_while_all_compute_or_all_wait():
    for beat in (BUSY, WAITS):
        assert watched({0: beat, 1: beat}, 100).holding_up((0, 1), 100.0) == []


def test_a_worker_that_gets_on_is_slow_at_worst():
    detector = watched({0: WAITS, 1: BUSY}, 100, changing={1})
    assert detector.holding_up((0, 1), 100.0) == []


def test_a_worker_has_longer_for_its_first_step():
    detector = FailureDetector(TIMEOUT, FIRST)
    for second in range(70):
        detector.hear(0, WAITS, float(second))
        detector.hear(1, BUSY, float(second))
        expected = [1] if second > FIRST else []
        assert detector.holding_up((0, 1), float(second)) == expected


@pytest.mark.parametrize("moves", [0, 1], ids=["who waits", "who computes"])
def test_a_first_step_counts_from_when_anybody_of_the_two_moved_last(moves):
    detector = FailureDetector(TIMEOUT, FIRST)
    for second in range(95):
        for worker, beat in enumerate((WAITS, BUSY)):
            passed = min(second, 30) if worker == moves else 0
            detector.hear(worker, replace(beat, passed=passed), float(second))
        assert detector.holding_up((0, 1), float(second)) == ([1] if second > 30 + FIRST else [])


def test_waiting_is_counted_without_a_break():
    detector = watched({0: WAITS, 1: BUSY}, 8)
    detector.hear(0, BUSY, 9.0)
    detector.hear(0, WAITS, 10.0)
    assert detector.holding_up((0, 1), 15.0) == []
    detector.hear(0, WAITS, 20.0)  # else nobody would be heard of
    assert detector.holding_up((0, 1), 21.0) == [1]


def test_a_joiner_that_is_no_member_holds_up_nobody():
    assert watched({0: WAITS, 1: WAITS, 7: BUSY}, 30).holding_up((0, 1), 30.0) == []


def test_a_joiner_that_gets_on_does_not_hide_who_holds_up_the_group():
    detector = watched({0: WAITS, 1: BUSY, 7: BUSY}, 12, changing={7})
    assert detector.holding_up((0, 1), 12.0) == [1]


def test_own_work_is_compared_and_not_time_spent_waiting():
    detector = FailureDetector(TIMEOUT, FIRST)
    for step in range(60):  # a step takes a second; worker 2 is busy for all of it
        for worker, waits in ((0, 0.7), (1, 0.6), (2, 0.0)):
            beat = Heartbeat(generation=1, step=step, passed=step, waited_s=step * waits)
            detector.hear(worker, beat, float(step))
    slow = detector.slow((0, 1, 2), 1.5)
    assert list(slow) == [2]
    assert abs(slow[2] - 1 / 0.35) < 0.01
    assert detector.slow((0, 1, 2), 3.0) == {}


def test_pace_is_not_taken_across_a_change_of_the_group():
    detector = FailureDetector(TIMEOUT, FIRST)
    for step in range(30):
        for worker in (0, 1):
            late = 100.0 if worker and step > 15 else 0.0
            beat = Heartbeat(generation=1 + (step > 15), step=step, passed=step)
            detector.hear(worker, beat, step + late)
    assert detector.slow((0, 1), 1.5) == {}


def test_whoever_was_slow_before_a_change_of_the_group_is_not_slow_in_the_next():
    """Though no step of it has ended there."""
    detector = FailureDetector(TIMEOUT, FIRST)
    for step in range(30):
        for worker, waits in ((0, 0.7), (1, 0.0)):
            beat = Heartbeat(generation=1, step=step, passed=step, waited_s=step * waits)
            detector.hear(worker, beat, float(step))
    assert list(detector.slow((0, 1), 1.5)) == [1]
    detector.hear(1, replace(beat, generation=2), 30.0)
    assert detector.slow((0, 1), 1.5) == {}


def test_a_run_gets_on_when_an_operation_ends_and_not_when_one_begins():
    def given_up(beat):
        detector = FailureDetector(TIMEOUT, FIRST)
        detector.hear(0, replace(BUSY, call=(5, 0)), 0.0)
        for generation in range(1, 6):
            detector.suspect(0, Suspect(generation, "reset"), 10.0 * generation)
        detector.hear(0, beat, 51.0)
        return detector.hopeless(52.0) is not None

    assert given_up(replace(BUSY, call=(5, 1)))
    assert not given_up(replace(BUSY, call=(6, 0)))


def test_whoever_others_cannot_reach_is_cut_off_once_that_lasts():
    detector = FailureDetector(TIMEOUT, FIRST)
    for generation in range(1, 6):
        for worker in (0, 1):
            assert detector.suspect(
                worker, Suspect(generation, "", frozenset({2})), float(generation)
            )
            assert not detector.suspect(
                worker, Suspect(generation, "", frozenset({2})), float(generation)
            )
    members = (0, 1, 2)
    assert detector.unreachable(members, TIMEOUT + 1.0) is None
    assert detector.unreachable(members, TIMEOUT + 1.5) == 2
    assert detector.unreachable(members, TIMEOUT + 100.0) is None


def test_failures_count_no_more_once_all_are_in_a_group_or_the_worker_is_gone():
    members = (0, 1, 2)
    for ends in (lambda detector: detector.settled(members), lambda detector: detector.forget(2)):
        detector = FailureDetector(TIMEOUT, FIRST)
        for generation in (1, 2, 3):
            detector.suspect(0, Suspect(generation, "", frozenset({2})), float(generation))
        ends(detector)
        detector.suspect(0, Suspect(4, "", frozenset({2})), 4.0)
        assert detector.unreachable(members, 100.0) is None  # once is not for longer


def test_workers_in_one_operation_and_different_calls_end_the_run():
    detector = FailureDetector(TIMEOUT, FIRST)
    for worker, kind in enumerate((1, 3, 1)):
        detector.hear(worker, replace(WAITS, call=(6, 1)), 0.0)
        detector.hear(worker, replace(WAITS, call=(7, kind)), 1.0)
    text = str(detector.hopeless(1.0))
    assert "worker 1 at the end of the train function; workers 0 and 2 in a backward pass" in text


def test_while_all_are_in_the_same_calls_nobody_looks_at_all_of_them(monkeypatch):
    monkeypatch.setattr("elastix.train.control.failure_detector.apart", pytest.fail)
    detector = FailureDetector(TIMEOUT, FIRST)
    for worker in range(3):
        detector.hear(worker, replace(WAITS, call=(6, 2)), 0.0)
    assert detector.hopeless(1.0) is None


def test_a_worker_that_is_an_operation_ahead_may_be_in_another_call():
    detector = FailureDetector(TIMEOUT, FIRST)
    detector.hear(0, replace(WAITS, call=(7, 2)), 0.0)
    detector.hear(1, replace(WAITS, call=(6, 1)), 0.0)
    detector.hear(2, replace(BUSY, call=(7, 0)), 0.0)
    assert detector.hopeless(1.0) is None


def test_who_is_slow_agrees_with_the_definition():
    """Own work of so many times the median of the others', or more; whoever takes how long."""
    for seed in range(300):
        chance = random.Random(seed)
        busy = {w: chance.choice([0.125, 0.25, 0.5, 1.0]) for w in range(chance.randint(1, 9))}
        detector = FailureDetector(TIMEOUT, FIRST)
        for worker, work in busy.items():
            for step in (0, 1, 21):  # a step takes a second; just as many as are looked at
                waited_s = step * (1.0 - work)
                beat = Heartbeat(generation=1, step=step, passed=step, waited_s=waited_s)
                detector.hear(worker, beat, float(step))
        expected = {}
        for worker, work in busy.items():
            others = [other for w, other in busy.items() if w != worker]
            if others and work >= 2.0 * statistics.median(others):
                expected[worker] = work / statistics.median(others)
        assert detector.slow(busy, 2.0) == expected


def test_a_worker_that_is_gone_is_in_no_call():
    detector = FailureDetector(TIMEOUT, FIRST)
    detector.hear(0, replace(WAITS, call=(7, 1)), 0.0)
    detector.hear(1, replace(WAITS, call=(7, 3)), 0.0)
    assert detector.hopeless(0.0) is not None
    detector.hear(2, replace(WAITS, call=(7, 2)), 0.0)
    detector.forget(1)
    assert detector.hopeless(0.0) is not None
    detector.forget(0)
    assert detector.hopeless(0.0) is None
    detector.forget(2)
    assert detector.hopeless(0.0) is None


def test_whoever_has_gone_on_is_no_longer_in_its_last_operation():
    detector = FailureDetector(TIMEOUT, FIRST)
    detector.hear(0, replace(WAITS, call=(6, 1)), 0.0)
    detector.hear(0, replace(BUSY, call=(7, 0)), 1.0)
    detector.hear(1, replace(WAITS, call=(6, 2)), 2.0)
    assert detector.hopeless(3.0) is None


def test_while_a_member_gets_on_nobody_looks_at_all_of_them():
    class Members(frozenset):
        def __iter__(self):
            raise AssertionError("all were looked at")

    detector = watched({0: WAITS, 1: BUSY}, 12, changing={1})
    assert detector.holding_up(Members((0, 1)), 12.0) == []


@pytest.mark.parametrize(
    "inside", [{"call": (6, 1)}, {"phase": "enter"}, {"phase": "meet"}], ids=str
)
def test_all_who_wait_for_each_other_stand_still(inside):
    """What one has sent is lost, say; some may be through with what the others are in."""
    inside, outside = replace(WAITS, **inside), replace(WAITS, call=(7, 0))
    beats = {0: inside, 1: outside, 2: BUSY}  # the last is no member
    detector = watched(beats, 100)
    assert not detector.standing_still((0, 1), 99.0)
    assert detector.standing_still((0, 1), 100.0)
    assert not detector.standing_still((0, 1), 199.0)  # what they wait for may be large
    assert detector.standing_still((0, 1), 200.0)


@pytest.mark.parametrize(
    "beats",
    [
        pytest.param({0: WAITS, 1: WAITS}, id="between operations"),
        pytest.param({0: replace(WAITS, phase="pause"), 1: WAITS}, id="too few"),
        pytest.param({0: replace(WAITS, call=(6, 1)), 1: BUSY}, id="one computes"),
    ],
)
def test_others_do_not_stand_still(beats):
    assert not watched(beats, 101).standing_still((0, 1), 101.0)


def test_whoever_gets_on_keeps_the_others_from_standing_still():
    inside = replace(WAITS, call=(6, 1))
    assert not watched({0: inside, 1: inside}, 101, changing={1}).standing_still((0, 1), 101.0)
