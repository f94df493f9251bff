"""The loop of a campaign with an executor in virtual time: no Ray, no torch at work."""

import random
import sqlite3
from collections import Counter
from dataclasses import replace

import pytest

from elastix.config import Budget
from elastix.errors import EveryTrialFailed, Full, NeverReported, OtherCode, SearchError
from elastix.events import TrialEnded, TrialLost, TrialReported, TrialStarted
from elastix.search import campaign_loop
from elastix.search.executors.executor import Ended, EndedKind, WorkReport
from elastix.search.rungs import Asha, Median, Verdict
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import TrialDatabase, TrialRow
from tests import virtual
from tests.search_parts import Drawing
from tests.virtual import Rig, Virtual, climbs, finishes


def test_as_many_trials_as_the_budget_says(tmp_path):
    rig = Rig(tmp_path, slots=3)
    trials = rig.run(Budget(trials=10))
    assert [trial.number for trial in trials] == list(range(10))
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    assert sorted(rig.executor.ran) == list(range(10))
    assert sorted(line.done for line in rig.lines) == list(range(1, 11))
    assert sorted(rig.searcher.told) == list(range(10))
    assert all(trial.losses == (-trial.config["x"],) for trial in trials)
    assert len(rig.of(TrialStarted)) == len(rig.of(TrialEnded)) == 10


GOOD = [{"x": 0.25, "depth": 2}, {"x": 0.5, "depth": 1}, {"x": 0.75, "depth": 3}]


def test_what_is_enqueued_is_tried_first_and_the_searcher_learns_of_it(tmp_path):
    rig = Rig(tmp_path, slots=2)
    trials = rig.run(Budget(trials=5), enqueued=GOOD)
    assert [trial.config for trial in trials[:3]] == GOOD
    assert rig.searcher.asked == 2
    assert sorted(rig.searcher.told) == list(range(5))


def test_what_is_enqueued_again_is_not_tried_again(tmp_path):
    rig = Rig(tmp_path)
    rig.run(Budget(trials=2), enqueued=GOOD)
    trials = rig.run(Budget(trials=5), enqueued=[*GOOD, GOOD[0]])
    assert [trial.config for trial in trials[:3]] == GOOD
    assert len({trial.suggestion.key for trial in trials}) == 5


def test_what_is_enqueued_counts_for_the_budget(tmp_path):
    rig = Rig(tmp_path)
    assert [trial.config for trial in rig.run(Budget(trials=2), enqueued=GOOD)] == GOOD[:2]
    assert rig.searcher.asked == 0


def test_what_is_enqueued_is_tried_where_the_searcher_has_nothing(tmp_path):
    rig = Rig(tmp_path, searcher=lambda: Drawing(limit=0))
    assert [trial.config for trial in rig.run(Budget(trials=9), enqueued=GOOD)] == GOOD


SAME = Suggestion({"x": 0.5, "depth": 1})


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (lambda n: [SAME] * n, "the same configurations again and again"),
        (lambda n: [Suggestion({"x": 0.1 * place, "depth": 1}) for place in range(9)], "9 of them"),
        (lambda n: [dict(SAME.config)] * n, "'depth': 1"),
        (lambda n: None, "None"),
        (lambda n: [Suggestion({"x": {1}, "depth": 1})], "{1}"),
    ],
)
def test_a_searcher_that_breaks_its_word_ends_the_campaign_and_is_told_what_is_wrong(
    tmp_path, asked, text
):
    rig = Rig(tmp_path, searcher=Drawing)
    good = len(rig.run(Budget(trials=3)))
    rig.make_searcher = lambda: Careless(asked)
    with pytest.raises(SearchError, match=r"Careless\.ask") as caught:
        rig.run(Budget(trials=8), same=False)
    assert text in str(caught.value)
    assert good <= len(rig.lines) <= 4, "what was right of it, and no more"


def test_a_searcher_that_repeats_itself_by_chance_comes_to_the_end(tmp_path):
    rng = random.Random(1)

    def drawn(n):
        return [Suggestion({"x": rng.randint(0, 4) / 4, "depth": 1}) for _ in range(n)]

    rig = Rig(tmp_path, searcher=lambda: Careless(drawn))
    assert {trial.config["x"] for trial in rig.run(Budget(trials=5))} == {0, 0.25, 0.5, 0.75, 1}


class Careless(Drawing):
    def __init__(self, asked):
        super().__init__()
        self.careless = asked

    def ask(self, n=1):
        return self.careless(n)


def test_more_trials_go_on_and_run_nothing_twice(tmp_path):
    rig = Rig(tmp_path)
    first = rig.run(Budget(trials=6))
    more = rig.run(Budget(trials=9))
    assert more[:6] == first
    assert sorted(rig.executor.ran) == [6, 7, 8]
    assert len({trial.suggestion.key for trial in more}) == 9
    assert rig.run(Budget(trials=9)) == more
    assert rig.executor.ran == []


@pytest.mark.parametrize("same", [True, False], ids=["same searcher", "another one"])
def test_a_searcher_that_takes_over_is_told_everything_once(tmp_path, same):
    rig = Rig(tmp_path)
    rig.run(Budget(trials=5))
    rig.run(Budget(trials=8), same=same)
    if same:  # it knows the first five from its state
        assert sorted(rig.searcher.told) == [5, 6, 7]
    else:
        assert rig.searcher.told[:5] == [0, 1, 2, 3, 4]
        assert sorted(rig.searcher.told) == list(range(8))


def test_what_was_proposed_before_a_crash_is_not_tried_again(tmp_path):
    """Another searcher with the same seed begins with the very same suggestions."""
    rig = Rig(tmp_path)
    first = rig.run(Budget(trials=5))
    more = rig.run(Budget(trials=10), same=False)
    keys = Counter(trial.suggestion.key for trial in more)
    assert set(keys.values()) == {1}
    assert more[:5] == first


def test_trials_that_were_running_at_a_crash_start_again(tmp_path):
    rig = Rig(tmp_path, slots=2)
    suggestion = Suggestion({"x": 0.5, "depth": 1})
    with TrialDatabase(tmp_path) as database:
        database.commit([TrialRow(Trial(0, suggestion, TrialState.RUNNING, started_s=1.0))])
    trials = rig.run(Budget(trials=3))
    assert rig.executor.ran[0] == 0
    assert trials[0].state is TrialState.FINISHED
    assert len(trials) == 3


def test_the_space_may_be_exhausted_first(tmp_path):
    rig = Rig(tmp_path, searcher=lambda: Drawing(limit=4))
    assert len(rig.run(Budget(trials=10))) == 4


def test_a_train_function_that_raises_costs_its_own_trial_only(tmp_path):
    def play(work):
        if work.config["depth"] == 2:
            return [], {"kind": "raised", "summary": "ValueError: two", "traceback": "in train"}
        return finishes(work)

    rig = Rig(tmp_path, play, give_up_after=99)
    trials = rig.run(Budget(trials=12))
    failed = [trial for trial in trials if trial.config["depth"] == 2]
    assert failed
    for trial in trials:
        assert (trial.state is TrialState.FAILED) == (trial.config["depth"] == 2)
    assert all(trial.traceback == "in train" and not trial.losses for trial in failed)
    assert Counter(rig.executor.ran) == Counter(range(12)), "nothing is retried"
    assert {e.message for e in rig.of(TrialEnded) if e.state == "failed"} == {"ValueError: two"}


def test_retries_are_made_when_asked_for(tmp_path):
    tries = Counter()

    def play(work):
        tries[work.number] += 1
        return finishes(work) if tries[work.number] == 3 else ([{"score": 0.1}], "raised")

    rig = Rig(tmp_path, play, retries=2)
    trials = rig.run(Budget(trials=2))
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    assert all(trial.results == ({"score": trial.config["x"]},) for trial in trials)
    assert tries == {0: 3, 1: 3}


def test_when_every_trial_fails_it_stops_early_with_the_first_traceback(tmp_path):
    def play(work):
        trace = f"Traceback of {work.number}"
        return [], {"kind": "raised", "summary": "boom", "traceback": trace}

    rig = Rig(tmp_path, play, slots=1)
    with pytest.raises(EveryTrialFailed, match="Traceback of 0") as caught:
        rig.run(Budget(trials=100))
    assert caught.value.traceback == "Traceback of 0"
    assert [line.trial.state for line in rig.lines] == [TrialState.FAILED] * 5


def test_so_few_trials_that_all_fail_are_no_success(tmp_path):
    """In this run, and in one that finds them so."""

    def play(work):
        return [], {"kind": "raised", "summary": "boom", "traceback": f"of {work.number}"}

    rig = Rig(tmp_path, play, slots=1)
    for ran in ([0, 1], []):
        with pytest.raises(
            EveryTrialFailed, match=r"(?s)all 2 trials that ran failed.*of 0"
        ) as caught:
            rig.run(Budget(trials=2))
        assert (caught.value.traceback, rig.executor.ran) == ("of 0", ran)
    assert [trial.state for trial in rig.run(Budget(trials=3), play=finishes)] == [
        *[TrialState.FAILED] * 2,
        TrialState.FINISHED,
    ]


def test_failures_after_a_success_do_not_end_a_campaign(tmp_path):
    def play(work):
        return finishes(work) if work.number == 0 else ([], "raised")

    rig = Rig(tmp_path, play, slots=1)
    assert len(rig.run(Budget(trials=20))) == 20


def test_a_metric_that_is_never_reported_is_said_after_the_first_trial(tmp_path):
    rig = Rig(tmp_path, lambda work: ([{"loss": 1.0, "speed": 3}], "finished"), slots=1)
    with pytest.raises(NeverReported, match=r"'score'.*\['loss', 'speed'\]"):
        rig.run(Budget(trials=100))
    assert [line.trial.state for line in rig.lines] == [TrialState.WAITING]
    trials = rig.run(Budget(trials=3), play=finishes)  # mended
    assert [trial.state for trial in trials] == [TrialState.FINISHED] * 3


def test_a_metric_that_one_trial_does_not_report_fails_that_trial(tmp_path):
    def play(work):
        return finishes(work) if work.number != 1 else ([{"loss": 1.0}], "finished")

    trials = Rig(tmp_path, play, slots=1).run(Budget(trials=3))
    assert [trial.state.value for trial in trials] == ["finished", "failed", "finished"]
    assert "'loss'" in trials[1].traceback


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_finite_number_fails_its_trial(tmp_path, value):
    def play(work):
        return ([{"score": value}], "finished") if work.number == 1 else finishes(work)

    rig = Rig(tmp_path, play)
    trials = rig.run(Budget(trials=4))
    assert trials[1].state is TrialState.FAILED
    assert "not finite" in trials[1].traceback
    assert not trials[1].scored
    assert not any(e.best for e in rig.of(TrialEnded) if e.trial == 1)


def test_a_lost_worker_costs_nothing_but_time(tmp_path):
    tries = Counter()

    def play(work):
        tries[work.number] += 1
        if work.number == 2 and tries[2] < 3:
            return [{"score": 0.3}, {"score": 0.4}], "lost"
        return finishes(work)

    rig = Rig(tmp_path, play, max_losses=2)
    trials = rig.run(Budget(trials=5))
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    assert trials[2].results == ({"score": trials[2].config["x"]},), "not those of the lost runs"
    assert [event.attempt for event in rig.of(TrialLost)] == [1, 2]


def test_a_trial_that_kills_every_worker_fails(tmp_path):
    rig = Rig(tmp_path, lambda w: finishes(w) if w.number != 2 else ([], "lost"), max_losses=3)
    trials = rig.run(Budget(trials=5))
    assert trials[2].state is TrialState.FAILED
    assert "lost 4 times" in trials[2].traceback
    assert rig.executor.ran.count(2) == 4


def test_work_that_had_not_begun_when_its_worker_died_is_no_loss(tmp_path):
    tries = Counter()

    def play(work):
        tries[work.number] += 1
        return ([], "returned") if tries[work.number] < 6 else finishes(work)

    rig = Rig(tmp_path, play, max_losses=1)
    assert all(trial.state is TrialState.FINISHED for trial in rig.run(Budget(trials=3)))
    assert not rig.of(TrialLost)


def test_time_is_up(tmp_path):
    rig = Rig(tmp_path, lambda work: ([{"score": 0.5}] * 7, "finished"), slots=2)
    trials = rig.run(Budget(time_s=10))
    assert [trial.state.value for trial in trials] == ["finished"] * 2 + ["waiting"] * 2
    assert sorted(rig.executor.halted) == [2, 3]
    assert all(not trial.results for trial in trials[2:])
    trials = rig.run(Budget(time_s=10))
    assert rig.executor.ran[:2] == [2, 3]
    assert trials[3].state is TrialState.FINISHED


def test_epochs_are_used_up(tmp_path):
    rig = Rig(tmp_path, lambda work: ([{"score": 0.5}] * 3, "finished"), slots=1)
    trials = rig.run(Budget(epochs=10))
    assert [trial.epochs for trial in trials] == [3] * 4


def test_trials_that_fail_at_once_use_up_no_epochs_and_do_not_go_on_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign_loop, "_BARREN", 40)

    def play(work):
        return finishes(work) if work.number < 2 else ([], "raised")

    rig = Rig(tmp_path, play)
    for _ in range(2):  # who calls run() again has mended something
        before = len(rig.lines) if hasattr(rig, "lines") else 2
        with pytest.raises(SearchError, match="40 trials have failed before"):
            rig.run(Budget(epochs=10))
        assert before + 40 <= len(rig.lines) <= before + 42
    assert len(rig.run(Budget(epochs=10, trials=200))) == 200
    assert sum(trial.epochs for trial in rig.run(Budget(epochs=10), play=finishes)) == 10


def test_trials_that_fail_while_an_earlier_one_learns_are_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign_loop, "_BARREN", 40)

    def play(work):
        if work.number in (0, 1, 90):
            return [{"score": 0.5}] * (2 if work.number == 0 else 60), "finished"
        return [], "raised"

    trials = Rig(tmp_path, play).run(Budget(epochs=122))
    assert sum(trial.epochs for trial in trials) == 122


def test_trials_that_fail_among_others_that_get_scores_are_no_end(tmp_path, monkeypatch):
    """An executor of a user need not count epochs; the searcher has no further trial one day."""
    monkeypatch.setattr(campaign_loop, "_BARREN", 40)

    class Uncounted(Virtual):
        def poll(self, timeout_s):
            news = super().poll(timeout_s)
            return [replace(n, epochs=0.0) if isinstance(n, Ended) else n for n in news]

    monkeypatch.setattr("tests.virtual.Virtual", Uncounted)

    def play(work):
        return finishes(work) if work.number % 2 == 0 else ([], "raised")

    assert len(Rig(tmp_path, play, lambda: Drawing(limit=120)).run(Budget(epochs=10))) == 120


def test_epochs_of_failed_trials_count_and_those_of_an_attempt_that_is_made_again_do_not(tmp_path):
    tries = Counter()

    def play(work):
        tries[work.number] += 1
        good = work.number == 0 or (work.number == 1 and tries[1] == 2)
        return [{"score": 0.5}] * 3, "finished" if good else "raised"

    trials = Rig(tmp_path, play, slots=1, retries=1).run(Budget(epochs=9))
    assert [(trial.state.value, trial.epochs) for trial in trials] == [
        ("finished", 3),
        ("finished", 3),
        ("failed", 3),
    ]
    assert tries == {0: 1, 1: 2, 2: 2}


def test_epochs_are_counted_on_by_the_next_run(tmp_path):
    """Also those of trials that were paused, which are not counted again when they go on."""
    rig = Rig(tmp_path, climbs(), rungs=lambda: Asha(first=1, eta=3, last=9), slots=1)
    for limit in (20, 60, 75):
        used = sum(trial.epochs for trial in rig.run(Budget(epochs=limit)))
        assert rig.executor.ran
        assert limit <= used < limit + 9  # what was running goes on to its end
        rig.run(Budget(epochs=limit))
        assert rig.executor.ran == []


def test_epochs_are_counted_once_each(tmp_path, monkeypatch):
    reads = Counter()
    read = Trial.__getattribute__

    def counting(trial, name):
        reads[name] += 1
        return read(trial, name)

    monkeypatch.setattr(Trial, "__getattribute__", counting)
    trials = Rig(tmp_path, slots=1).run(Budget(epochs=200))
    assert len(trials) == 200
    assert 0 < reads["epochs"] < 20 * 200  # a sum over all of them each time: 20,000 and more


def test_a_full_store_ends_the_campaign_and_loses_nothing(tmp_path):
    def play(work):
        if work.number == 3:
            return [{"score": 1.0}], {"kind": "raised", "error": Full("no room")}
        return finishes(work)

    rig = Rig(tmp_path, play)
    with pytest.raises(Full, match="no room"):
        rig.run(Budget(trials=10))
    states = {line.trial.number: line.trial.state for line in rig.lines}
    assert states[3] is TrialState.WAITING
    trials = rig.run(Budget(trials=10), play=finishes)
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    assert 3 in rig.executor.ran
    assert not {0, 1, 2} & set(rig.executor.ran)


def test_a_node_with_other_code_ends_the_campaign_and_no_trial_has_failed_of_it(tmp_path):
    def play(work):
        if work.number == 0:
            error = OtherCode("node n has elastix 9, and the driver has 8")
            return [], {"kind": "raised", "error": error, "summary": str(error)}
        return finishes(work)

    rig = Rig(tmp_path, play, slots=2)
    with pytest.raises(OtherCode, match="node n has elastix 9"):
        rig.run(Budget(trials=6))
    states = {line.trial.number: line.trial.state for line in rig.lines}
    assert states == {0: TrialState.WAITING, 1: TrialState.FINISHED}
    assert 0 not in rig.searcher.told
    trials = rig.run(Budget(trials=6), play=finishes)
    assert [trial.state for trial in trials] == [TrialState.FINISHED] * 6


def test_a_book_that_cannot_be_written_keeps_what_it_has(tmp_path, monkeypatch):
    rig = Rig(tmp_path, slots=1)
    commit, calls = TrialDatabase.commit, []

    def fails_at_times(self, *given, **named):
        calls.append(1)
        if len(calls) >= 6:
            raise Full("no room for the trial database")
        commit(self, *given, **named)

    monkeypatch.setattr(TrialDatabase, "commit", fails_at_times)
    with pytest.raises(Full):
        rig.run(Budget(trials=10))
    monkeypatch.undo()
    with TrialDatabase(tmp_path, read_only=True) as database:
        safe = [line.trial for line in database.lines() if line.done]
    assert safe
    trials = rig.run(Budget(trials=10))
    assert [trials[trial.number] for trial in safe] == safe
    assert not {trial.number for trial in safe} & set(rig.executor.ran)
    assert len({trial.suggestion.key for trial in trials}) == 10


# ---------------------------------------------------------------------------------- rungs


def test_asha_pauses_and_promotes(tmp_path):
    rig = Rig(tmp_path, climbs(), rungs=lambda: Asha(first=1, eta=3, last=9), slots=2)
    trials = rig.run(Budget(trials=27))
    reports = Counter(len(trial.results) for trial in trials)
    assert set(reports) == {1, 3, 9}
    assert reports[9] >= 1
    up = {trial.number for trial in trials if len(trial.results) >= 3}
    ranked = sorted(trials, key=lambda trial: -trial.config["x"])
    assert {trial.number for trial in ranked[:9]} <= up, "the best third of the lowest rung"
    assert len(up) < 18, "and few others, which were among the best when they came"
    finished = [trial for trial in trials if trial.state is TrialState.FINISHED]
    best = max(trials, key=lambda trial: trial.config["x"])
    assert best in finished
    assert all(t.state is TrialState.PAUSED for t in trials if t not in finished)
    assert all(trial.scored for trial in trials)


def test_who_may_go_on_waits_for_a_worker_that_is_being_started(tmp_path, monkeypatch):
    """The only one has gone with the last trial, and the campaign was over without the others."""

    def room(executor):
        started = executor.ran != [0, 1] or executor.live or executor.clock.now > 5
        return executor.slots - len(executor.live) if started else 0

    monkeypatch.setattr(Virtual, "room", property(room))
    rig = Rig(tmp_path, climbs(), rungs=lambda: Asha(first=1, eta=2, last=9), slots=1)
    enqueued = [{"x": 0.9, "depth": 1}, {"x": 0.1, "depth": 1}]
    trials = rig.run(Budget(trials=2), enqueued=enqueued)
    assert rig.executor.ran == [0, 1, 0]
    assert [len(trial.results) for trial in trials] == [2, 1]


def test_asha_goes_on_after_a_restart(tmp_path):
    play = climbs()
    rig = Rig(tmp_path, play, rungs=lambda: Asha(first=1, eta=3, last=9), slots=2)
    first = rig.run(Budget(trials=9))
    more = rig.run(Budget(trials=27))
    ranked = sorted(more, key=lambda trial: -trial.config["x"])
    assert all(len(trial.results) >= 3 for trial in ranked[:9])
    for before, after in zip(first, more, strict=False):
        assert len(after.results) >= len(before.results)
        assert before.state is TrialState.PAUSED or before == after


def test_median_stops_what_is_worse_than_most(tmp_path):
    def play(work):
        return [{"score": work.config["x"]}] * 6, "finished"

    rig = Rig(tmp_path, play, rungs=lambda: Median(grace=1, others=3), slots=3)
    trials = rig.run(Budget(trials=20))
    stopped = [trial for trial in trials if trial.state is TrialState.STOPPED]
    assert stopped
    assert all(1 < len(trial.results) < 6 and trial.scored for trial in stopped)
    best = max(trials, key=lambda trial: trial.config["x"])
    assert best.state is TrialState.FINISHED


class Scripted(Virtual):
    """Says one thing after the other: a group is lost, and the next goes on from its State."""

    scores = (0.25, 0.5, 0.75, 1.0)

    def __init__(self, *given):
        super().__init__(*given)
        reports = [
            WorkReport(number=0, seq=seq, metrics={"score": score})
            for seq, score in enumerate(self.scores)
        ]
        results = {report.seq: report.metrics for report in reports}
        lost = Ended(number=0, kind=EndedKind.LOST, worker="w")
        over = Ended(number=0, kind=EndedKind.FINISHED, results=results)
        self.script = [*reports[:2], lost, *reports[2:], over]

    def poll(self, timeout_s):
        news = self.script.pop(0)
        if isinstance(news, Ended):
            del self.live[news.number]
        return [news]


def test_a_trial_that_goes_on_from_its_own_state_is_judged_by_how_far_it_has_come(
    tmp_path, monkeypatch
):
    """Its later reports had counted as its first, and others were compared with these."""
    heard = []

    def report(self, number, level, losses):
        heard.append((level, losses))
        return Verdict.CONTINUE

    monkeypatch.setattr(virtual, "Virtual", Scripted)
    monkeypatch.setattr(Median, "report", report)
    (trial,) = Rig(tmp_path, rungs=Median, slots=1).run(Budget(trials=1))
    assert [found["score"] for found in trial.results] == list(Scripted.scores)
    assert set(heard) == {(seq + 1, (-score,)) for seq, score in enumerate(Scripted.scores)}


def test_the_median_rule_goes_on_after_a_restart_from_the_reports_in_the_book(
    tmp_path, monkeypatch
):
    def play(work):
        return [{"score": work.config["x"]}] * 6, "finished"

    commit, written = TrialDatabase.commit, []

    def noting(database, lines, facts=None, *others, **named):
        written.append(facts or {})
        commit(database, lines, facts, *others, **named)

    monkeypatch.setattr(TrialDatabase, "commit", noting)
    rigs = [
        Rig(tmp_path / name, play, rungs=lambda: Median(grace=1, others=3), slots=1)
        for name in ("whole", "halves")
    ]
    whole = rigs[0].run(Budget(trials=20))
    rigs[1].run(Budget(trials=10))
    halves = rigs[1].run(Budget(trials=20))
    assert [(t.state, t.results) for t in halves] == [(t.state, t.results) for t in whole]
    assert [t.state for t in whole[10:13]].count(TrialState.STOPPED) > 0
    assert not any("rungs" in facts for facts in written)  # it grows with every report


def test_reports_are_passed_on_once_each(tmp_path):
    rig = Rig(tmp_path, lambda work: ([{"score": s / 10} for s in range(5)], "finished"))
    rig.run(Budget(trials=3))
    said = Counter((event.trial, event.seq) for event in rig.of(TrialReported))
    assert said == {(trial, seq): 1 for trial in range(3) for seq in range(5)}


def test_numbers_that_are_not_equal_to_themselves_are_passed_on_once_too(tmp_path):
    def reports():
        return [{"score": s / 10, "loss": float("nan")} for s in range(5)]

    def play(work):
        return reports(), {"kind": "finished", "results": dict(enumerate(reports()))}

    rig = Rig(tmp_path, play)
    rig.run(Budget(trials=2))
    said = Counter((event.trial, event.seq) for event in rig.of(TrialReported))
    assert said == {(trial, seq): 1 for trial in range(2) for seq in range(5)}


def test_what_a_group_reports_anew_counts_and_not_what_it_had_said_before(tmp_path):
    """All its workers were lost, and it went back: the score was that of a step it had undone."""

    def play(work):
        told = [{"score": 0.1}, {"score": 0.9, "note": "void"}, {"score": 0.8}, {"score": 0.0}]
        return told, {"kind": "finished", "results": {0: told[0], 1: {"score": 0.3}}}

    rig = Rig(tmp_path, play)
    (trial,) = rig.run(Budget(trials=1))
    assert trial.results == ({"score": 0.1}, {"score": 0.3})
    assert (trial.losses, trial.metrics) == ((-0.3,), {"score": 0.3})
    (ended,) = rig.of(TrialEnded)
    assert ended.values == {"score": 0.3}


def test_what_begins_anew_without_a_state_reports_once(tmp_path):
    """Rungs have judged it by its first report, whatever it says there the second time."""
    runs = Counter()

    def play(work):
        runs[work.number] += 1
        stop = work.until_reports or 3
        reports = [{"score": work.config["x"] + runs[work.number]}] * stop
        kind = "paused" if work.until_reports else "finished"
        return reports, {"kind": kind, "ref": None}

    trials = Rig(tmp_path, play, rungs=lambda: Asha(first=1, eta=2, last=3)).run(Budget(trials=8))
    gone_on = [trial for trial in trials if len(trial.results) > 1]
    assert gone_on
    for trial in gone_on:
        run = [round(found["score"] - trial.config["x"]) for found in trial.results]
        assert run == sorted(run)
        assert run[:2] == [1, 2]


# ---------------------------------------------------------------------------------- rerank


def test_the_best_are_run_again_from_scratch(tmp_path):
    rig = Rig(tmp_path, rerank=3)
    trials = rig.run(Budget(trials=10))
    assert len(trials) == 13
    searched, again = trials[:10], trials[10:]
    best = sorted(searched, key=lambda trial: -trial.config["x"])[:3]
    assert [trial.config for trial in again] == [trial.config for trial in best]
    assert [trial.suggestion.parent_number for trial in again] == [t.number for t in best]
    assert [role for role, _ in rig.works].count("rerank") == 3
    assert not {10, 11, 12} & set(rig.searcher.told)
    for kind in (TrialStarted, TrialEnded):
        assert {e.trial for e in rig.of(kind) if e.role == "rerank"} == {10, 11, 12}
    assert rig.run(Budget(trials=10)) == trials, "once is enough"
    assert rig.known == 10, "controls are no trials of the budget"


def test_those_who_are_the_best_after_more_trials_are_run_again_too(tmp_path):
    rig = Rig(tmp_path, rerank=2)
    rig.run(Budget(trials=4))
    lines = rig.run(Budget(trials=20)) and rig.lines
    searched = [line.trial for line in lines if line.role == "search"]
    again = [line.trial.suggestion.parent_number for line in lines if line.role == "rerank"]
    best = sorted(searched, key=lambda trial: -trial.config["x"])[:2]
    assert {trial.number for trial in best} <= set(again)
    assert len(again) == len(set(again))


# ------------------------------------------------------------------- crashes at any moment


class Crash(BaseException):
    pass


@pytest.mark.parametrize("seed", range(25))
def test_a_crash_at_any_moment_loses_nothing_and_repeats_nothing(tmp_path, monkeypatch, seed):
    """The loop is cut off before or after any commit, and in any poll, again and again."""
    rng = random.Random(seed)
    commit, poll = TrialDatabase.commit, Virtual.poll
    left = rng.randint(1, 12)

    def count():
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash

    def torn_commit(self, *given, **named):
        count()
        commit(self, *given, **named)
        count()

    def torn_poll(self, timeout_s):
        count()
        return poll(self, timeout_s)

    def play(work):
        kind = "raised" if work.config["depth"] == 3 else "finished"
        return [{"score": work.config["x"]}] * work.config["depth"], kind

    monkeypatch.setattr(TrialDatabase, "commit", torn_commit)
    monkeypatch.setattr(Virtual, "poll", torn_poll)
    rig = Rig(tmp_path, play, slots=rng.randint(1, 3), give_up_after=99)
    finals = {}
    for _ in range(200):
        try:
            trials = rig.run(Budget(trials=12))
            break
        except Crash:
            left = rng.randint(1, 12)
        with TrialDatabase(tmp_path, read_only=True) as database:
            now = {line.trial.number: line for line in database.lines() if line.done}
        assert finals.items() <= now.items(), "a final trial was lost or changed"
        assert not set(rig.executor.ran) & set(finals), "a final trial ran again"
        finals = now
    else:
        pytest.fail("it never came to its end")
    assert len(trials) == 12
    assert not set(rig.executor.ran) & set(finals)
    assert len({trial.suggestion.key for trial in trials}) == 12
    assert sorted(line.done for line in rig.lines) == list(range(1, 13))


def test_an_executor_that_gives_up_ends_the_campaign(tmp_path, monkeypatch):
    def gives_up(self, timeout_s):
        raise SearchError("no worker can be had")

    rig = Rig(tmp_path)
    monkeypatch.setattr(Virtual, "poll", gives_up)
    with pytest.raises(SearchError, match="no worker"):
        rig.run(Budget(trials=3))
    assert all(line.trial.state in (TrialState.WAITING, TrialState.RUNNING) for line in rig.lines)


def test_sqlite_is_durable_and_has_one_writer(tmp_path):
    with TrialDatabase(tmp_path) as database:
        assert database._sql.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        assert database._sql.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert isinstance(database._sql, sqlite3.Connection)


HALVING = {
    "asha": lambda: Asha(first=1, eta=3, last=9),
    "another asha": lambda: Asha(first=2, eta=2, last=8),
    "median": Median,
    "none": None,
}


@pytest.mark.parametrize("after", HALVING)
@pytest.mark.parametrize("before", HALVING)
def test_a_campaign_goes_on_with_other_rungs(tmp_path, before, after):
    rig = Rig(tmp_path, climbs(9), slots=3, rungs=HALVING[before])
    first = rig.run(Budget(trials=9))
    rig.rungs = HALVING[after]
    more = rig.run(Budget(trials=15), same_rungs=before == after)
    assert len(more) == 15
    for trial in first:
        if trial.state.is_final:
            assert more[trial.number] == trial
    states = {trial.state for trial in more}
    assert not states & {TrialState.WAITING, TrialState.RUNNING}
    assert TrialState.PAUSED not in states or after != "none"


class Scarce(Virtual):
    """Has memory for one piece of work at a time, and holds the others back."""

    @property
    def held_back(self):
        return sorted(self.live)[1:]

    def poll(self, timeout_s):
        waiting = {number: self.live.pop(number) for number in self.held_back}
        news = super().poll(timeout_s)
        self.live.update(waiting)
        return news


def test_a_trial_that_waits_for_memory_has_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.virtual.Virtual", Scarce)
    rig = Rig(tmp_path, slots=3)
    rig.run(Budget(trials=6))
    running, most = set(), 0
    for event in rig.events:
        if isinstance(event, TrialStarted):
            running.add(event.trial)
        elif isinstance(event, TrialEnded):
            running.remove(event.trial)
        most = max(most, len(running))
    assert most == 1
    assert len(rig.of(TrialStarted)) == 6
