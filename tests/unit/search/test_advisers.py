"""What a searcher hears of trials at rungs, and that a killed campaign goes on as another would."""

import json
import math
import random
from collections import Counter
from itertools import product

import pytest

import elastix
from elastix.config import Budget
from elastix.errors import ConfigError, SearchError
from elastix.search.advisers import Advisers
from elastix.search.executors.executor import WorkReport
from elastix.search.executors.serial import Local
from elastix.search.rungs import Asha, Median, Verdict
from elastix.search.searchers.deephyper import DeepHyper
from elastix.search.searchers.evolution import Evolution
from elastix.search.searchers.optuna import Optuna
from elastix.search.searchers.random import Random
from elastix.search.searchers.screened import ScreenedEvolution
from elastix.search.trial import TrialState
from elastix.search.trial_database import TrialDatabase
from tests.search_parts import SPACE, Drawing
from tests.virtual import Rig, Virtual, climbs, state_of

LAST = 9


def asha():
    return Asha(first=1, eta=3, last=LAST)


class Listening(Drawing):
    """Remembers what it was told, across its saved states."""

    hears_of_paused = True

    def start(self, space, **given):
        super().start(space, **given)
        self.heard = []

    def tell(self, trials):
        super().tell(trials)
        self.heard += [[t.number, t.state.value, t.reach, list(t.losses), t.ref] for t in trials]

    def state_dict(self):
        return {**super().state_dict(), "heard": self.heard}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.heard = state_dict["heard"]


def curve(work):
    """Scores that rise from report to report; some fail at a rung, some are no number at one."""
    stop = min(LAST, work.until_reports or LAST)
    x, kind = work.config["x"], "paused" if stop < LAST else "finished"
    scores = [x + level / 10 for level in range(1, stop + 1)]
    if stop == LAST and x > 0.9:
        return [{"score": score} for score in scores[:5]], "raised"
    if 0.6 < x < 0.7 and stop >= 3:
        scores[2:] = [math.nan] * (stop - 2)
    return [{"score": score} for score in scores], kind


def test_a_searcher_that_wants_to_hears_of_every_rung_once_and_in_order(tmp_path):
    rig = Rig(tmp_path, curve, searcher=Listening, rungs=asha, slots=3, give_up_after=99)
    trials = rig.run(Budget(trials=30))
    heard = rig.searcher.heard
    assert len({(number, reach) for number, _, reach, *_ in heard}) == len(heard), "told twice"
    for trial in trials:
        of_it = [entry for entry in heard if entry[0] == trial.number]
        levels = [level for level in (1, 3) if level <= len(trial.results)]
        paused = [
            [trial.number, "paused", level, [-trial.results[level - 1]["score"]]]
            for level in levels
        ]
        refs = [state_of(trial.number, level) for level in levels]
        final = [entry for entry in of_it if entry[1] != "paused"]
        assert str([entry[:4] for entry in of_it if entry[1] == "paused"]) == str(paused)  # NaN too
        assert [entry[4] for entry in of_it if entry[1] == "paused"] == refs
        assert [entry[1] for entry in final] == [trial.state.value] * trial.state.is_final
        assert of_it[len(paused) :] == final, "the end came last"
    assert Counter(entry[1] for entry in heard)["paused"] > 30


def test_others_hear_of_final_trials_alone(tmp_path):
    rig = Rig(tmp_path, curve, rungs=asha, slots=3, give_up_after=99)
    trials = rig.run(Budget(trials=30))
    assert sorted(rig.searcher.told) == [t.number for t in trials if t.state.is_final]


def test_children_have_paused_parents_and_their_state_of_that_rung(tmp_path):
    rig = Rig(
        tmp_path,
        curve,
        searcher=lambda: Evolution(population=4, sample=2),
        rungs=asha,
        slots=1,
        give_up_after=99,
    )
    trials = rig.run(Budget(trials=30))
    children = [trial for trial in trials if trial.suggestion.parent_number is not None]
    assert len(children) > 20, "with final ones alone it would begin with the tenth trial or later"
    for child in children:
        parent = trials[child.suggestion.parent_number]
        stood = {state_of(parent.number, level) for level in (1, 3, LAST)}
        assert child.suggestion.parent in stood
        assert not all(math.isnan(result["score"]) for result in parent.results)


class Crash(BaseException):
    pass


def story(rig):
    """All that a campaign has decided, without times."""
    return [
        (
            line.trial.number,
            json.dumps(line.trial.suggestion.to_json()),
            line.trial.state,
            str(line.trial.results),
            line.trial.ref,
            line.done,
        )
        for line in rig.lines
    ]


def adviser_states(rig):
    states = rig.loop._advisers.states(0)
    return [states[name]["state"] for name in states]


SEARCHERS = {
    "evolution": lambda: Evolution(population=4, sample=2),
    "random": Random,
    "listening": Listening,
    "screened": ScreenedEvolution,
    "optuna": Optuna,
    "deephyper": DeepHyper,
}
QUICK = ("evolution", "random", "listening")
CUTS = [
    *product(QUICK, range(1, 46, 4)),
    *product(["screened", "optuna"], [18, 31]),
    pytest.param("deephyper", 18, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_campaign_that_is_killed_goes_on_as_if_nothing_had_happened(
    tmp_path, monkeypatch, cut, name
):
    """At any commit, before or after it, again and again; some configurations are enqueued."""
    enqueued = [{"x": 0.75, "depth": 2}, {"x": 0.95, "depth": 1}]
    budget = Budget(trials=24)

    def rig(folder):
        return Rig(folder, curve, SEARCHERS[name], asha, slots=1, give_up_after=99)

    whole = rig(tmp_path / "whole")
    whole.run(budget, enqueued=enqueued)
    commit, left = TrialDatabase.commit, cut

    def torn(self, *given, **named):
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash
        commit(self, *given, **named)
        if left == -cut:  # and once after one
            raise Crash

    monkeypatch.setattr(TrialDatabase, "commit", torn)
    killed, crashes = rig(tmp_path / "killed"), 0
    for _ in range(9):
        try:
            killed.run(budget, enqueued=enqueued)
            break
        except Crash:
            crashes += 1
            if left < 0:
                left = 10**9
    else:
        pytest.fail("it never came to its end")
    monkeypatch.setattr(TrialDatabase, "commit", commit)
    assert crashes >= 1
    assert story(killed) == story(whole)
    assert json.dumps(adviser_states(killed)[1]) == json.dumps(adviser_states(whole)[1]), "rungs"
    if name == "listening":
        assert str(killed.searcher.heard) == str(whole.searcher.heard)
    again = rig(tmp_path / "killed")
    again.run(Budget(trials=40), enqueued=enqueued)
    more = rig(tmp_path / "whole")
    more.run(Budget(trials=40), enqueued=enqueued)
    assert story(again) == story(more)


def test_the_same_with_the_states_written_in_between(tmp_path, monkeypatch):
    monkeypatch.setattr("elastix.search.trial_book._SNAPSHOT_S", 3.0)  # of virtual time
    monkeypatch.setattr("elastix.search.trial_book._SNAPSHOTS_APART", 0)
    for name in (*QUICK, "screened"):
        test_a_campaign_that_is_killed_goes_on_as_if_nothing_had_happened(
            tmp_path / name, monkeypatch, 31, name
        )


def test_another_searcher_is_told_of_paused_trials_too(tmp_path):
    rig = Rig(tmp_path, climbs(LAST), rungs=asha, slots=2)
    before = rig.run(Budget(trials=12))
    rig.make_searcher = Listening
    rig.run(Budget(trials=12), same=False)
    paused = [t.number for t in before if t.state is TrialState.PAUSED]
    assert paused
    told = [entry[0] for entry in rig.searcher.heard if entry[1] == "paused"]
    assert [number for number in told if number in paused][: len(paused)] == paused
    assert len({(entry[0], entry[2]) for entry in rig.searcher.heard}) == len(rig.searcher.heard)


def test_what_was_proposed_and_is_proposed_otherwise_now_is_tried_all_the_same(tmp_path):
    """As of a searcher that does not say the same again, whose trials are others now."""
    searchers = [Evolution(), Evolution()]
    for searcher in searchers:
        searcher.start(SPACE, seed=1)
    with TrialDatabase(tmp_path) as database:
        first, second = (Advisers(searcher, None) for searcher in searchers)
        asked = first.ask(2)
        database.commit([], None, (), first.passed(after_states=False))
        second.restore(database, [], same_searcher=True, same_rungs=True)
    assert [*second.take_lost(1), *second.take_lost(9)] == list(asked)
    assert not second.take_lost(9)
    assert searchers[0].state_dict() == searchers[1].state_dict()


def test_what_is_still_to_be_tried_outlives_another_kill(tmp_path):
    """Some is tried, and then the states are written; the rest of it is not lost."""

    def taken_up(database):
        searcher = Evolution()
        searcher.start(SPACE, seed=1)
        advisers = Advisers(searcher, None)
        advisers.restore(database, [], same_searcher=True, same_rungs=True)
        return advisers

    with TrialDatabase(tmp_path) as database:
        first = taken_up(database)
        asked = first.ask(3)
        database.commit([], None, (), first.passed(after_states=False))
        second = taken_up(database)
        tried = second.take_lost(1)
        passed = second.passed(after_states=True)
        database.commit([], second.states(0), (), passed, forget_passed=True)
        second.written(passed)
        third = taken_up(database)
        assert [*tried, *third.take_lost(9)] == list(asked)
        assert third.states(0) == second.states(0)


class Late(Virtual):
    """A trial's last report comes before its end, as from a worker that still stores its State.

    In every poll one of these ends, so there is room for another while others are still storing.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.storing = []

    def poll(self, timeout_s):
        now = [
            WorkReport(number=number, seq=told, metrics=reports[told])
            for number, (_, reports, _, told) in self.live.items()
            if told + 1 == len(reports) and number not in self.storing
        ]
        later = {number: self.live.pop(number) for number in self.storing[1:]}
        later |= {report.number: self.live.pop(report.number) for report in now}
        news = super().poll(timeout_s)
        self.live |= later
        self.storing = [*self.storing[1:], *(report.number for report in now)]
        return [*news, *now]


@pytest.mark.parametrize("seed", range(5))
def test_a_trial_that_has_reported_at_a_rung_and_still_runs_is_not_run_again(
    tmp_path, monkeypatch, seed
):
    def play(work):
        reports, kind = climbs(LAST)(work)
        return [{"score": random.Random(100 * seed + work.number).random()}] * len(reports), kind

    monkeypatch.setattr("tests.virtual.Virtual", Late)
    rig = Rig(tmp_path, play, rungs=lambda: Asha(first=1, eta=2, last=LAST), slots=4)
    trials = rig.run(Budget(trials=40))  # Virtual refuses work that it has already
    assert len(trials) == 40
    assert {len(trial.results) for trial in trials} >= {1, 2, 4}


def test_the_median_rule_is_told_again_of_reports_and_notes_nothing(tmp_path):
    rig = Rig(tmp_path, lambda w: ([{"score": w.config["x"]}] * 6, "finished"), rungs=Median)
    rig.run(Budget(trials=9))
    with TrialDatabase(tmp_path, read_only=True) as database:
        assert database.passed() == []
        assert database.fact("rungs") is None


@pytest.mark.parametrize("scored", [300, 1])
def test_a_report_costs_the_same_however_many_came_before(tmp_path, scored):
    """A trial is judged by its latest scores, which are not looked for among all its reports."""
    reads = []

    class Report(dict):
        def get(self, name, default=None):
            reads.append(name)
            return super().get(name, default)

        def items(self):
            reads.append("all")
            return super().items()

    def play(work):
        scores = [{"score": work.config["x"]}] * scored
        late = [{"loss": 1.0}] * (303 - scored)  # after the last score
        return [Report(report) for report in (*scores, *late)], "finished"

    rig = Rig(tmp_path, play, rungs=lambda: Median(grace=1, others=9), slots=1)
    (trial,) = rig.run(Budget(trials=1))
    assert trial.losses == (-trial.config["x"],)
    assert 303 <= len(reads) < 20 * 303


@pytest.mark.parametrize("begin", [4, 5])
def test_a_trial_whose_first_score_comes_after_a_rung_is_not_run_twice_at_once(tmp_path, begin):
    """It has passed that rung without one, and is not held there any more."""

    def play(work):
        stop = min(LAST, work.until_reports or LAST)
        score = random.Random(200 + work.number).random()
        first = begin if work.number % 2 else 1
        reports = [{"score": score} if at >= first else {} for at in range(1, stop + 1)]
        return reports, "paused" if stop < LAST else "finished"

    rig = Rig(tmp_path, play, rungs=asha, slots=4)
    trials = rig.run(Budget(trials=40))  # Virtual refuses work that it has already
    assert len(trials) == 40
    launched = Counter(work.number for _, work in rig.works)
    assert all(launched[trial.number] <= 3 for trial in trials), "once a rung, and to the end"


class Halving(Asha):
    """Stops at a rung whom Asha would pause."""

    def report(self, number, level, losses):
        verdict = super().report(number, level, losses)
        if verdict is Verdict.PAUSE:
            self.drop(number)
            return Verdict.STOP
        return verdict


def test_a_trial_that_is_stopped_at_a_rung_where_it_has_paused_is_over(tmp_path):
    rig = Rig(tmp_path, climbs(LAST), searcher=Listening, rungs=lambda: Halving(1, 3, LAST))
    trials = rig.run(Budget(trials=20))
    assert {trial.state for trial in trials} == {TrialState.STOPPED, TrialState.FINISHED}
    assert sorted(n for n, state, *_ in rig.searcher.heard if state == "stopped") == [
        trial.number for trial in trials if trial.state is TrialState.STOPPED
    ]


class Careless(Listening):
    """Changes what it is told, and what it has given."""

    def ask(self, n=1):
        self.given = [*getattr(self, "given", []), *super().ask(n)]
        return self.given[-n:]

    def tell(self, trials):
        super().tell(trials)
        for trial in trials:
            trial.config["x"] = trial.metrics["score"] = 5.0
            for result in trial.results:
                result["score"] = 5.0
        for suggestion in self.given:
            suggestion.config["x"] = 5.0


def test_what_a_searcher_does_to_what_it_is_told_changes_no_trial(tmp_path):
    stories = []
    for searcher in (Listening, Careless):
        rig = Rig(
            tmp_path / searcher.__name__, climbs(LAST), searcher=searcher, rungs=asha, rerank=2
        )
        trials = rig.run(Budget(trials=20))
        assert all(work.config["x"] <= 1 for _, work in rig.works)
        assert all(trial.metrics["score"] == trial.config["x"] for trial in trials)
        stories.append([(t.number, t.config["x"], t.state, t.losses) for t in trials])
    assert stories[0] == stories[1]


@pytest.mark.parametrize("rungs", [Asha(1, 3, 9), Median(), None], ids=["asha", "median", "none"])
@pytest.mark.parametrize("metric", [["m", "n"], "m"], ids=["several", "one"])
def test_a_searcher_that_cannot_hear_of_paused_trials_is_refused_where_trials_pause(
    tmp_path, rungs, metric
):
    def search(searcher):
        return elastix.Campaign(
            lambda ctx: [ctx.report(m=ctx.config["x"], n=1.0) for _ in range(9)],
            space=SPACE,
            searcher=searcher,
            metric=metric,
            rungs=rungs,
            budget=Budget(trials=4),
            run=elastix.RunConfig(name="c", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
        ).run()

    if isinstance(rungs, Asha) and metric != "m":
        with pytest.raises(ConfigError, match=r"Asha.* with Optuna and 2 objectives.*Nothing was"):
            search(elastix.Optuna())
        assert not list(tmp_path.iterdir())
    else:
        assert len(search(elastix.Optuna())) == 4
    assert len(search(elastix.Random())) == 4, "it makes nothing of what it hears"


class Odd(Drawing):
    def __init__(self, fails=""):
        super().__init__()
        self.fails = fails

    def state_dict(self):
        if self.fails == "state_dict":
            raise KeyError("mine")
        return super().state_dict()

    def load_state_dict(self, state_dict):
        if self.fails == "load_state_dict":
            raise KeyError("mine")
        super().load_state_dict(state_dict)


def test_a_state_that_its_searcher_cannot_read_is_told_of_and_costs_nothing(tmp_path):
    rig = Rig(tmp_path, searcher=Odd)
    before = rig.run(Budget(trials=4))
    rig.make_searcher = lambda: Odd("load_state_dict")
    with pytest.raises(
        SearchError, match=r"Odd cannot read the state .* KeyError: 'mine'\. No tri"
    ):
        rig.run(Budget(trials=6))
    assert rig.executor.ran == []
    assert rig.run(Budget(trials=6), same=False)[:4] == before, "told of all, it reads no state"


def test_a_searcher_without_a_state_costs_no_result(tmp_path):
    rig = Rig(tmp_path, searcher=lambda: Odd("state_dict"), rerank=2)
    with pytest.raises(KeyError, match="mine"):
        rig.run(Budget(trials=4))
    assert [line.trial.state for line in rig.lines] == [TrialState.FINISHED] * 6
    assert [line.role for line in rig.lines].count("rerank") == 2
