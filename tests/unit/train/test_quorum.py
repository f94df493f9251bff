"""Quorum: who is waited for, for how long, and how a run with too few workers ends."""

import pytest

from elastix.config import FailureConfig
from elastix.errors import QuorumLost
from elastix.events import GenerationFormed, Resumed, StepCommitted
from elastix.train.control.quorum import Quorum
from elastix.train.control.run_state import RunState

FOUNDED = {"founded": True, "coming": False, "state": RunState(step=7)}
REPLACE = FailureConfig(replace=True, wait_s=10.0, start_timeout_s=60.0)
LEAVE = FailureConfig(replace=False, wait_s=10.0, start_timeout_s=60.0)


def test_enough_is_enough_however_long_it_was_too_few():
    quorum = Quorum(2, REPLACE)
    assert quorum.judge(1, **FOUNDED, now=0.0) is None
    assert quorum.judge(2, **FOUNDED, now=9.0) is None
    assert quorum.judge(1, **FOUNDED, now=12.0) is None
    assert quorum.judge(1, **FOUNDED, now=21.9) is None
    assert isinstance(quorum.judge(1, **FOUNDED, now=22.1), str)


def test_who_waits_in_vain_is_dismissed_once_and_then_ended():
    quorum = Quorum(2, REPLACE)
    quorum.judge(1, **FOUNDED, now=0.0)
    reason = quorum.judge(1, **FOUNDED, now=10.5)
    assert isinstance(reason, str)
    assert "wait_s=10" in reason
    assert quorum.judge(1, **FOUNDED, now=20.0) is None
    end = quorum.judge(1, **FOUNDED, now=21.0)
    assert isinstance(end, QuorumLost)
    assert "after step 7" in str(end)


@pytest.mark.parametrize(("failure", "coming"), [(LEAVE, True), (REPLACE, False)])
def test_while_somebody_may_come_they_wait(failure, coming):
    quorum = Quorum(2, failure)
    for now in (0.0, 9.9):
        assert quorum.judge(1, **{**FOUNDED, "coming": coming}, now=now) is None


def test_if_nobody_can_come_they_are_dismissed_at_once():
    reason = Quorum(2, LEAVE).judge(1, **FOUNDED, now=0.0)
    assert isinstance(reason, str)
    assert "replace=False" in reason


def test_a_group_that_does_not_come_about_has_longer_and_ends_without_a_word():
    quorum = Quorum(2, LEAVE)
    state = RunState(gone={1: "died"})
    starting = {"founded": False, "coming": False, "state": state}
    assert quorum.judge(0, **starting, now=0.0) is None
    assert quorum.judge(1, **starting, now=59.0) is None
    end = quorum.judge(1, **starting, now=61.0)
    assert isinstance(end, QuorumLost)
    assert "start_timeout_s=60; worker 1 (died) was gone" in str(end)
    assert "No step was taken." in str(end)


def test_a_group_that_does_not_come_about_again_does_not_say_that_no_step_was_taken():
    state = RunState()
    state.take(GenerationFormed(generation=1, members=(0, 1), cause="start", urgent=True))
    quorum = Quorum(2, REPLACE)
    starting = {"founded": False, "coming": True, "state": state}
    assert quorum.judge(0, **starting, now=0.0) is None
    assert "No step was taken." in str(quorum.judge(0, **starting, now=61.0))  # nobody came in
    state.take(StepCommitted(step=1, generation=1, world_size=2, batches=()))
    state.take(Resumed(step=0, ref=""))
    end = quorum.judge(0, **starting, now=61.0)
    assert isinstance(end, QuorumLost)
    assert "No step was taken" not in str(end)
    assert "goes on from the last stored State" in str(end)


def test_waiting_begins_anew_with_a_new_group():
    quorum = Quorum(2, REPLACE)
    quorum.judge(0, **FOUNDED, now=0.0)
    quorum.start_over()
    assert quorum.judge(0, **FOUNDED, now=11.0) is None


def test_who_is_dismissed_is_told_who_is_gone_and_why():
    """More room is of no use where all that comes is turned away."""
    gone = {1: "died", 4: "its node has other elastix code"}
    reason = Quorum(2, LEAVE).judge(1, **{**FOUNDED, "state": RunState(gone=gone)}, now=0.0)
    assert isinstance(reason, str)
    assert "worker 1 (died) and worker 4 (its node has other elastix code) were gone" in reason
