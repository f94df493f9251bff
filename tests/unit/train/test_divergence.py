"""What is done about workers that hold different States. No processes."""

import pytest

from elastix.errors import ReplicasDiffer
from elastix.events import (
    GenerationFormed,
    ReplicasDiverged,
    Resumed,
    SamplesLeftOut,
    StateDropped,
    StateStored,
    StepCommitted,
    WorkerStarted,
)
from elastix.train.control.divergence import Divergences
from elastix.train.control.messages import Diverged
from elastix.train.control.run_state import RunState
from elastix.train.control.terms import Found

ALL = (0, 1, 2)


def said(step=9, workers=ALL, apart=(1,), unseen=False):
    error = ReplicasDiffer("they differ")
    return Diverged(
        step=step, workers=workers, apart=apart, parts=("model",), error=error, unseen=unseen
    )


@pytest.mark.parametrize(
    ("told", "cure"),
    [
        (said(), "evicted"),
        (said(unseen=True), "went back"),
        (said(apart=ALL), "went back"),
        (said(apart=ALL, unseen=True), "went back"),
        (said(workers=(0, 2), apart=(1,), unseen=True), "went back"),  # 1 is lost since
        (said(workers=(0,), apart=(), unseen=True), "went back"),
    ],
)
def test_what_is_done(told, cure):
    divergences = Divergences(replaces=True)
    verdict = divergences.judge(told, ALL)
    assert isinstance(verdict, ReplicasDiverged)
    assert (verdict.cure, verdict.unseen) == (cure, told.unseen)
    assert divergences.goes_back == (cure == "went back")


def test_what_was_told_before_comes_to_nothing():
    divergences = Divergences(replaces=True)
    assert divergences.judge(said(), ALL) is not None
    assert divergences.judge(said(), (0, 2)) is None


@pytest.mark.parametrize(
    ("told", "ends"), [(said(), False), (said(unseen=True), True), (said(apart=ALL), True)]
)
def test_without_replacements_nobody_can_go_back(told, ends):
    verdict = Divergences(replaces=False).judge(told, ALL)
    assert (verdict is told.error) == ends


@pytest.mark.parametrize(
    ("unseen", "stored", "ends"),
    [
        (True, Resumed(step=0, ref=""), False),
        (True, Resumed(step=5, ref="stored"), False),
        (False, Resumed(step=0, ref=""), True),
        (False, Resumed(step=5, ref="stored"), False),
        (False, Resumed(step=5, ref=""), False),  # a trial, at its pause
        (False, Resumed(step=5, ref="", held=True), True),
    ],
)
def test_an_exact_run_may_begin_anew(unseen, stored, ends):
    divergences = Divergences(replaces=True)
    divergences.judge(said(apart=ALL, unseen=unseen), ALL)
    error = divergences.went_back(stored)
    assert (error is not None) == ends
    assert not divergences.goes_back


def test_one_that_goes_back_to_the_same_step_again_and_again_ends():
    """However far it had come each time."""
    divergences = Divergences(replaces=True)
    ends = []
    for step in (300, 900, 500):
        assert isinstance(divergences.judge(said(step, unseen=True), ALL), ReplicasDiverged)
        ends.append(divergences.went_back(Resumed(step=200, ref="stored")))
    assert ends[:2] == [None, None]
    assert isinstance(ends[2], ReplicasDiffer)


def test_one_that_gets_on_between_does_not():
    divergences = Divergences(replaces=True)
    for step in (300, 600, 900, 1200):
        assert isinstance(divergences.judge(said(step, unseen=True), ALL), ReplicasDiverged)
        assert divergences.went_back(Resumed(step=step - 90, ref="stored")) is None


def test_nothing_is_left_to_be_stored_of_what_was_dropped():
    """A stop went by it, and stored nothing."""
    state = RunState()
    state.take(stored(500, compared=False))
    state.take(Resumed(step=0, ref=""))
    assert state.stored == 0


def stored(step, compared):
    return StateStored(
        ref="r", step=step, reason="every_s", stored_bytes=0, store_s=0.0, compared=compared
    )


def test_which_states_all_were_seen_to_hold():
    state = RunState()
    for step, compared in ((4, True), (8, False), (12, True), (16, True)):
        state.take(stored(step, compared))
    assert state.compared == {4, 12, 16}
    state.take(StateDropped(ref="r", step=4))
    state.take(stored(16, False))  # in place of the one before
    assert state.compared == {12}
    went_on = state.copy()
    state.take(Resumed(step=8, ref="r"))  # from which all have begun since
    assert state.compared == {8}
    went_on.take(Resumed(step=0, ref=""))
    assert went_on.compared == set()


def test_all_are_to_go_back_until_they_have():
    state = RunState()
    found = Divergences(replaces=True).judge(said(), ALL)
    state.take(found)
    assert state.parted is None  # the others go on
    found = Divergences(replaces=True).judge(said(unseen=True), ALL)
    state.take(found)
    state.take(StepCommitted(step=10, generation=1, world_size=3, batches=()))
    assert state.parted is found
    state.take(Resumed(step=8, ref="r"))
    assert state.parted is None


@pytest.mark.parametrize("resumed", [False, True])
def test_what_they_had_is_of_no_use_to_another_conductor(resumed):
    """The one before had not come to end them, and did not lose them."""
    state = RunState()
    for worker in ALL:
        state.take(WorkerStarted(worker=worker, pid=1, node="", device="cpu"))
    state.take(GenerationFormed(generation=1, members=ALL[:2], cause="start", urgent=True))
    state.take(Divergences(replaces=True).judge(said(workers=ALL[:2], unseen=True), ALL))
    if resumed:
        state.take(Resumed(step=8, ref="r"))
    there = [found(0, holder=True), found(1, holder=True), found(2, shadow=True), found(3)]
    assert [one.worker for one in state.of_use(there)] == [3]
    assert not state.unaccounted([3])


def found(worker, holder=False, shadow=False):
    has_state = holder or shadow
    return Found(
        worker=worker,
        pid=1,
        node="",
        device="cpu",
        generation=1,
        address=None,
        ready=has_state,
        holder=holder,
        shadow=shadow,
        operation=9 if has_state else -1,
    )


def test_it_goes_back_to_no_state_of_which_it_is_not_known_whether_it_was_before_or_after():
    """The guard has left samples out after step 8: a State of that step may have that, or not."""
    state = RunState()
    for step in (4, 8):
        facts = {"reason": "every_steps", "stored_bytes": 1, "store_s": 0.1, "compared": True}
        state.take(StateStored(step=step, ref="r", **facts))
    state.take(SamplesLeftOut(loader=0, spans=((0, 4),), step=8))
    assert state.sound is None
    state.take(Divergences(replaces=True).judge(said(unseen=True), ALL))
    assert state.sound == {4}
    state.take(Resumed(step=4, ref="r"))
    assert (state.sound, state.left_out) == (None, set())


def test_nor_to_one_that_all_have_gone_back_to_since_without_what_was_left_out_after_it():
    """All were lost, and began from State 8 anew, which has that in it or has it not."""
    state = RunState()
    state.take(stored(4, compared=True))
    state.take(SamplesLeftOut(loader=0, spans=((0, 4),), step=8))
    state.take(stored(8, compared=True))  # as the next batch was void
    state.take(Resumed(step=8, ref="r"))
    state.take(stored(12, compared=True))
    assert state.compared == {4, 8, 12}
    for step, sound in ((9, {4}), (13, {4, 12})):
        parted = state.copy()
        parted.take(Divergences(replaces=True).judge(said(step=step, unseen=True), ALL))
        assert parted.sound == sound
