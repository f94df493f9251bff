"""What becomes of a trial whose run is over, one ending at a time."""

import math

import pytest

from elastix.errors import (
    Corrupt,
    EveryTrialFailed,
    NeverReported,
    NotFound,
    OtherCode,
    QuorumLost,
    SearchError,
    StoreDamaged,
    StoreError,
)
from elastix.events import TrialEnded, TrialLost
from elastix.search.advisers import Advisers
from elastix.search.executors.executor import Ended, EndedKind
from elastix.search.rungs import Asha
from elastix.search.trial import Objectives, Selection, Suggestion, TrialState
from elastix.search.trial_book import TrialBook
from elastix.search.trial_database import TrialDatabase
from elastix.search.trial_endings import Endings
from tests.search_parts import SPACE, Drawing
from tests.virtual import Clock, state_of

WAITING, PAUSED, FINISHED = TrialState.WAITING, TrialState.PAUSED, TrialState.FINISHED
FAILED, STOPPED = TrialState.FAILED, TrialState.STOPPED


class Selecting(Drawing):
    interval = 1

    def select(self, trials, room):
        return Selection()


class Learning:
    """A gate that hears what trials took."""

    def __init__(self):
        self.heard = []

    def learn(self, trial):
        self.heard.append(trial.peak_bytes)


class Desk:
    """Trials that run, and their endings."""

    def __init__(self, database, searcher, rungs=None, **terms):
        searcher.start(SPACE)
        self.events = []
        self.database = database
        self.searcher = searcher
        self.gate = Learning()
        self.advisers = Advisers(searcher, rungs)
        self.book = TrialBook(database, self.advisers, self.events.append, Clock())
        given = {"max_losses": 1, "retries": 0, "give_up_after": 3, **terms}
        objectives = Objectives.of("score")
        self.endings = Endings(self.book, self.advisers, self.gate, objectives, **given)

    def runs(self, *scores, rung=None):
        """A trial that runs, and has reported these scores."""
        case = self.book.enter(Suggestion({"x": len(self.book.cases) / 100, "depth": 1}))
        case.rung = rung
        self.book.change(case, case.trial.but(state=TrialState.RUNNING))
        case.results = {seq: {"score": score} for seq, score in enumerate(scores)}
        return case

    def ends(self, case, kind, **fields):
        fields = {"epochs": len(case.results), **fields}
        self.endings.end(case, Ended(number=case.trial.number, kind=EndedKind(kind), **fields))
        return case.trial.state

    def told(self):
        self.book.write()
        self.advisers.tell()
        return self.searcher.told

    def said(self, kind):
        self.book.write()
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def make(tmp_path):
    with TrialDatabase(tmp_path) as database:
        yield lambda searcher=None, rungs=None, **terms: Desk(
            database, searcher or Drawing(), rungs, **terms
        )


def test_a_trial_that_finished_has_its_score_and_the_searcher_hears_of_it(make):
    desk = make()
    case = desk.runs(0.5, 0.75)
    assert desk.ends(case, "finished", ref=state_of(0, 2)) is FINISHED
    assert (case.trial.losses, case.trial.epochs, case.done) == ((-0.75,), 2, 1)
    assert desk.told() == [0]
    (event,) = desk.said(TrialEnded)
    assert (event.values, event.best) == ({"score": 0.75}, True)


def test_the_first_of_two_that_are_as_good_is_the_best(make):
    desk = make()
    for score in (0.5, 0.5, 0.75, 0.25):
        desk.ends(desk.runs(score), "finished")
    assert [event.best for event in desk.said(TrialEnded)] == [True, False, True, False]


def test_who_was_the_best_at_a_rung_is_compared_by_what_it_has_come_to_since(make):
    desk = make(rungs=Asha(first=1, eta=2, last=4))
    first, second = desk.runs(0.9, rung=1), desk.runs(0.7)
    desk.ends(first, "paused")
    desk.ends(second, "finished")
    first.report(1, {"score": 0.5})
    desk.ends(first, "finished")
    desk.ends(desk.runs(0.8), "finished")
    assert [event.best for event in desk.said(TrialEnded)] == [True, False, False, True]


def test_who_ends_as_good_as_it_was_at_a_rung_is_the_best_still(make):
    desk = make(rungs=Asha(first=1, eta=2, last=4))
    case = desk.runs(0.9, rung=1)
    desk.ends(case, "paused")
    desk.ends(case, "finished")
    assert [event.best for event in desk.said(TrialEnded)] == [True, True]


def test_a_lost_worker_is_no_fault_of_the_trial_until_it_was_once_too_often(make):
    desk = make(max_losses=1)
    desk.ends(desk.runs(0.5), "finished")
    case = desk.runs(0.5)
    assert desk.ends(case, "lost", worker="w1") is WAITING
    assert (list(desk.book.waiting), case.results) == ([1], {})
    assert desk.ends(case, "lost", summary="killed") is FAILED
    assert case.trial.traceback == "its worker was lost 2 times: killed"
    assert [event.cause for event in desk.said(TrialLost)] == ["w1 died"]


def test_of_a_trial_whose_gpu_has_failed_too_often_it_is_known_where(make):
    desk = make(max_losses=0)
    desk.ends(desk.runs(0.5), "finished")
    case = desk.runs()
    assert desk.ends(case, "lost", summary="its GPU failed", traceback="here\n") is FAILED
    assert case.trial.traceback == "here\nits worker was lost 1 times: its GPU failed"


@pytest.mark.parametrize(
    "ended",
    [
        {"summary": "worker 3 answered nothing for 300 s"},
        {"worker": "worker 3", "summary": "too few", "error": QuorumLost("too few")},
    ],
)
def test_of_a_worker_that_did_not_die_it_is_not_said(make, ended):
    desk = make(max_losses=1)
    desk.ends(desk.runs(0.5), "lost", **ended)
    assert [event.cause for event in desk.said(TrialLost)] == [ended["summary"]]


def test_a_trial_that_raised_and_is_run_again_was_not_lost(make):
    desk = make(max_losses=1, retries=1)
    desk.ends(desk.runs(0.5), "finished")
    case = desk.runs(0.5)
    assert desk.ends(case, "raised", summary="OSError: busy") is WAITING
    assert desk.ends(case, "lost", worker="w1") is WAITING
    told = [(event.attempt, event.cause, event.raised) for event in desk.said(TrialLost)]
    assert told == [(1, "OSError: busy", True), (2, "w1 died", False)]


def test_what_it_reported_after_the_state_that_it_goes_on_from_is_reported_again(make):
    desk = make()
    case = desk.runs(0.1, 0.2, 0.3)
    case.kept = 2
    assert desk.ends(case, "returned") is WAITING
    assert sorted(case.results) == [0, 1]


def test_halted_by_a_rung_it_is_over_and_halted_by_time_it_waits(make):
    desk = make()
    stopped, halted = desk.runs(0.1), desk.runs(0.2)
    stopped.stop = True
    assert desk.ends(stopped, "halted") is STOPPED
    assert desk.ends(halted, "halted") is WAITING
    assert desk.told() == [0]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_finite_number_is_none(make, score):
    desk = make()
    case = desk.runs(score)
    assert desk.ends(case, "finished") is FAILED
    assert not case.trial.scored
    assert "not finite" in case.trial.traceback


def test_the_first_trial_without_a_score_ends_the_campaign_and_runs_again(make):
    desk = make()
    case = desk.runs()
    with pytest.raises(NeverReported, match="trial 0"):
        desk.ends(case, "finished")
    assert case.trial.state is WAITING
    assert desk.told() == []


def test_a_later_one_has_failed(make):
    desk = make()
    desk.ends(desk.runs(0.5), "finished")
    assert desk.ends(desk.runs(), "finished") is FAILED


def test_so_many_failures_and_nothing_else_end_the_campaign(make):
    desk = make(give_up_after=2)
    assert desk.ends(desk.runs(), "raised", summary="no", traceback="here") is FAILED
    with pytest.raises(EveryTrialFailed, match="here"):
        desk.ends(desk.runs(), "raised", summary="no", traceback="there")


def test_fewer_do_at_the_end(make):
    desk = make(give_up_after=9)
    desk.ends(desk.runs(), "raised", summary="no", traceback="here")
    with pytest.raises(EveryTrialFailed, match="all 1 trials that ran failed"):
        desk.endings.look_for_scores()
    desk.ends(desk.runs(0.5), "finished")
    desk.endings.look_for_scores()


@pytest.mark.parametrize(
    "error",
    [StoreError("full"), StoreDamaged("the index is damaged"), OtherCode("a node has elastix 9")],
)
def test_a_store_that_failed_or_a_node_with_other_code_is_no_fault_of_the_trial(make, error):
    desk = make()
    case = desk.runs(0.5)
    with pytest.raises(type(error)):
        desk.ends(case, "raised", error=error)
    assert case.trial.state is WAITING


@pytest.mark.parametrize("error", [Corrupt("of one model"), NotFound("retired")])
def test_a_model_that_cannot_be_read_fails_the_trial_that_was_to_go_on_from_it(make, error):
    desk = make()
    desk.ends(desk.runs(0.5), "finished")
    assert desk.ends(desk.runs(0.5), "raised", error=error) is FAILED


def test_at_a_rung_those_behind_stay_paused_and_the_best_go_on(make):
    desk = make(rungs=Asha(first=1, eta=2, last=4))
    worse, better = desk.runs(0.1, rung=1), desk.runs(0.9, rung=1)
    assert desk.ends(worse, "paused", ref=state_of(0, 1)) is PAUSED
    assert desk.ends(better, "paused", ref=state_of(1, 1)) is WAITING
    assert list(desk.book.waiting) == [1]
    assert (worse.kept, better.kept) == (1, 1)
    assert desk.told() == []


def test_who_selects_among_trials_needs_their_states(make):
    desk = make(Selecting())
    with pytest.raises(SearchError, match="Selecting lets trials go on from States"):
        desk.ends(desk.runs(0.5, rung=1), "paused")


def test_a_state_that_a_later_one_replaces_is_outgrown(make):
    desk = make(Selecting())
    case = desk.runs(0.5, rung=1)
    desk.ends(case, "paused", ref=state_of(0, 1))
    desk.endings.stop(case)
    desk.book.write()
    assert case.trial.state is STOPPED
    assert desk.database.superseded() == []
    other = desk.runs(0.5, rung=1)
    desk.ends(other, "paused", ref=state_of(1, 1))
    desk.ends(other, "finished", ref=state_of(1, 2))
    desk.book.write()
    assert desk.database.superseded() == [state_of(1, 1)]


def test_what_a_trial_took_is_learned_unless_it_raised_or_was_lost(make):
    desk = make(max_losses=0)
    desk.ends(desk.runs(0.5), "finished", peak_bytes=7)
    desk.ends(desk.runs(0.5), "raised", peak_bytes=9)
    desk.ends(desk.runs(0.5), "lost", summary="its GPU failed", peak_bytes=8)
    desk.ends(desk.runs(0.5), "starved", peak_bytes=11, alone=False)
    assert desk.gate.heard == [7, 11]


def test_after_a_restart_the_best_so_far_is_known_and_the_gate_has_learned_again(make):
    desk = make()
    desk.ends(desk.runs(0.5), "finished", peak_bytes=7)
    desk.ends(desk.runs(), "raised", peak_bytes=9)
    desk.book.write()
    after = make()
    lines = after.book.restore()
    after.advisers.restore(after.database, lines, same_searcher=True, same_rungs=True)
    after.endings.restore(lines)
    assert after.gate.heard == [7]
    after.ends(after.runs(0.4), "finished")
    after.ends(after.runs(0.6), "finished")
    assert [event.best for event in after.said(TrialEnded)] == [False, True]
