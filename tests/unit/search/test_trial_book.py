"""What a campaign has decided is written in one transaction, and said after it."""

import pytest

from elastix.errors import StoreError
from elastix.events import TrialStarved
from elastix.search.advisers import Advisers
from elastix.search.trial import Suggestion, TrialState
from elastix.search.trial_book import Case, TrialBook
from elastix.search.trial_database import TrialDatabase
from tests.search_parts import SPACE, Drawing
from tests.virtual import Clock, state_of


class Desk:
    """A book with its database open."""

    def __init__(self, database):
        searcher = Drawing()
        searcher.start(SPACE)
        self.database = database
        self.clock = Clock()
        self.said = []
        self.book = TrialBook(database, Advisers(searcher, None), self.emit, self.clock)

    def emit(self, event):
        self.said.append((event.trial, sorted(self.states())))

    def states(self):
        return {line.trial.number: line.trial.state for line in self.database.lines()}


@pytest.fixture
def desk(tmp_path):
    with TrialDatabase(tmp_path) as database:
        yield Desk(database)


def suggestion(x, **fields):
    return Suggestion({"x": x, "depth": 1}, **fields)


def event(number):
    return TrialStarved(trial=number, times=1, peak_bytes=1, reserved_bytes=1, cause="")


def becomes(desk, number, **fields):
    case = desk.book.cases[number]
    desk.book.change(case, case.trial.but(**fields))


def test_what_is_said_of_a_trial_is_in_the_database_first(desk):
    desk.book.add(suggestion(0.1))
    desk.book.say(event(0))
    assert (desk.said, desk.states()) == ([], {})
    desk.book.write()
    assert desk.said == [(0, [0])]
    desk.book.write()
    assert desk.said == [(0, [0])]


def test_nothing_is_said_that_could_not_be_written(desk, monkeypatch):
    def full(*_given, **_named):
        raise StoreError("full")

    desk.book.add(suggestion(0.1))
    desk.book.say(event(0))
    with monkeypatch.context() as patch:
        patch.setattr(TrialDatabase, "commit", full)
        with pytest.raises(StoreError):
            desk.book.write()
    assert desk.said == []
    desk.book.write()
    assert desk.said == [(0, [0])]


def test_what_is_forgotten_before_it_is_written_never_was(desk):
    desk.book.add(suggestion(0.1))
    desk.book.write()
    becomes(desk, 0, state=TrialState.STOPPED)
    desk.book.outgrow(state_of(0, 1))
    desk.book.say(event(0))
    desk.book.forget_unwritten()
    desk.book.write()
    assert (desk.said, desk.states()) == ([], {0: TrialState.WAITING})
    assert desk.database.superseded() == []


def test_final_trials_are_numbered_as_they_become_so_and_epochs_are_counted_once(desk):
    for x in (0.1, 0.2, 0.3):
        desk.book.add(suggestion(x))
    becomes(desk, 2, state=TrialState.FINISHED, epochs=4.0)
    becomes(desk, 0, state=TrialState.PAUSED, epochs=1.0)
    becomes(desk, 0, state=TrialState.FAILED, epochs=3.0)
    desk.book.write()
    assert {line.trial.number: line.done for line in desk.database.lines()} == {0: 2, 1: None, 2: 1}
    assert desk.book.epochs == 7.0


def test_a_state_from_which_others_go_on_is_never_outgrown(desk):
    parent, other = state_of(0, 1), state_of(1, 1)
    desk.book.add(suggestion(0.1, parent=parent, in_place=True))
    desk.book.add(suggestion(0.2, parent=other))  # takes tensors of it alone, and at once
    desk.book.outgrow(parent)
    desk.book.outgrow(other)
    desk.book.write()
    assert desk.database.superseded() == [other]


def test_what_was_entered_only_does_not_run_and_is_not_proposed_again(desk):
    desk.book.enter(suggestion(0.1))
    desk.book.add(suggestion(0.2), "rerank")
    assert list(desk.book.waiting) == [1]
    assert desk.book.searched == 0
    assert desk.book.keys == {suggestion(0.1).key}


def test_another_book_of_the_database_goes_on_where_this_one_stands(tmp_path):
    with TrialDatabase(tmp_path) as database:
        before = Desk(database)
        for x in (0.1, 0.2, 0.3, 0.4):
            before.book.add(suggestion(x, parent=state_of(9, 1), in_place=x == 0.4))
        becomes(before, 0, state=TrialState.FINISHED, epochs=2.0, results=({"score": 1},) * 2)
        becomes(before, 1, state=TrialState.PAUSED, epochs=1.0, results=({"score": 1},))
        becomes(before, 2, state=TrialState.RUNNING)
        before.book.write()
        after = Desk(database)
        after.book.restore()
        assert list(after.book.waiting) == [2, 3]
        assert [case.trial.state for case in after.book.cases.values()] == [
            TrialState.FINISHED,
            TrialState.PAUSED,
            TrialState.WAITING,
            TrialState.WAITING,
        ]
        assert [case.kept for case in after.book.cases.values()] == [0, 1, 0, 0]
        assert (after.book.searched, after.book.epochs) == (4, 3.0)
        assert after.book.keys == before.book.keys
        after.book.outgrow(state_of(9, 1))
        becomes(after, 1, state=TrialState.FINISHED)
        after.book.write()
        assert database.superseded() == []
        assert [line.done for line in database.lines()] == [1, 2, None, None]


def test_a_trial_is_numbered_after_the_last_though_some_were_taken_out(tmp_path):
    with TrialDatabase(tmp_path) as database:
        desk = Desk(database)
        for x in (0.1, 0.2, 0.3):
            desk.book.add(suggestion(x))
        del desk.book.cases[1]
        assert desk.book.enter(suggestion(0.4)).trial.number == 3


def test_states_are_written_when_it_is_time_and_something_has_changed(desk):
    def written():
        return desk.database.fact("searcher") is not None

    desk.book.add(suggestion(0.1))
    desk.clock.now = 4.0
    desk.book.write()
    assert not written()
    desk.clock.now = 6.0
    desk.book.write()
    assert not written()  # nothing has changed
    becomes(desk, 0, state=TrialState.RUNNING)
    desk.book.write()
    assert written()


@pytest.mark.parametrize("state", [TrialState.FINISHED, TrialState.PAUSED])
def test_a_trial_that_is_over_or_paused_holds_its_reports_once(desk, state):
    desk.book.add(suggestion(0.1))
    case = desk.book.cases[0]
    reports = tuple({"score": n / 10} for n in range(3))
    for seq, metrics in enumerate(reports):
        assert case.says_new(seq, metrics)
        case.report(seq, metrics)
    held = case.results
    desk.book.change(case, case.trial.but(state=state, results=reports))
    assert case.results == held == dict(enumerate(reports))
    assert case.results is not held
    assert not case.says_new(2, {"score": 0.2})
    assert case.says_new(3, {"score": 0.3})
    case.report(3, {"score": 0.3})
    assert [*case.results] == [0, 1, 2, 3]


def test_what_a_paused_trial_reports_again_is_looked_up_without_a_copy_of_all(desk, monkeypatch):
    """One that left no State begins anew, and may report very often: that took the square of it."""
    desk.book.add(suggestion(0.1))
    case = desk.book.cases[0]
    reports = tuple({"score": n / 10} for n in range(3))
    desk.book.change(case, case.trial.but(state=TrialState.PAUSED, results=reports))
    case.kept = 3
    monkeypatch.setattr(Case, "results", property(lambda _: pytest.fail("all of them")))
    assert [case.says_new(seq, {"score": 0.7}) for seq in range(4)] == [False, False, False, True]


def test_of_a_trial_that_lacks_a_report_places_are_kept(desk):
    desk.book.add(suggestion(0.1))
    case = desk.book.cases[0]
    case.report(3, {"score": 0.3})
    desk.book.change(
        case, case.trial.but(state=TrialState.FINISHED, results=tuple(case.results.values()))
    )
    assert [*case.results] == [3]
