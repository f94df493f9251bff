"""Every searcher by the one suite, and what is particular to each."""

import json
import math
import subprocess
import sys

import pytest
from ConfigSpace import (
    Beta,
    Categorical,
    ConfigurationSpace,
    EqualsCondition,
    Float,
    ForbiddenEqualsClause,
    Integer,
    Normal,
)

import elastix
from elastix.errors import ConfigError
from elastix.search.executors.serial import Local
from elastix.search.searchers import deephyper
from elastix.search.searchers.evolution import Evolution
from elastix.search.searchers.population import Population
from elastix.search.searchers.random import Random
from elastix.search.searchers.screened import ScreenedEvolution
from elastix.search.space import Space
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.testing.searcher_contract import (
    SearcherContract,
    architecture,
    bowl,
    drive,
    failed,
    finished,
    keys,
    paused,
    smooth,
)


class TestRandom(SearcherContract):
    learns = False

    def make(self):
        return Random()


class TestEvolution(SearcherContract):
    rounds = 80

    def make(self):
        return Evolution(population=12, sample=4)

    def test_a_child_carries_its_parent(self):
        searcher = self.started(architecture())
        trials = {}
        for number in range(30):
            (suggestion,) = searcher.ask(1)
            trial = finished(suggestion, number, (float(number % 7),))
            trial = trial.but(ref=elastix.Ref(f"{number:064x}"))
            searcher.tell([trial])
            trials[number] = trial
            if number < 12:
                assert (suggestion.parent, suggestion.parent_number) == (None, None)
            else:
                parent = trials[suggestion.parent_number]
                assert suggestion.parent == parent.ref
                assert number - 12 <= parent.number < number

    def test_the_old_die_however_good_they_were(self):
        searcher = self.started(smooth())
        trials = drive(searcher, lambda config: (0.0,), 1)
        drive(searcher, lambda config: (1.0,), 12, first=1)
        parents = {s.parent_number for s in searcher.ask(20)}
        assert trials[0].number not in parents
        assert len(parents) > 1

    def test_with_two_objectives_the_best_stay(self):
        searcher = self.started(smooth(), objectives=2)
        drive(searcher, lambda config: (0.0, 0.0), 1)
        drive(searcher, lambda config: (1.0, 1.0), 20, first=1)
        parents = [s.parent_number for s in searcher.ask(40)]
        assert parents.count(0) > 5

    def test_the_failed_have_no_children(self):
        searcher = self.started(smooth())
        for number in range(24):
            (suggestion,) = searcher.ask(1)
            odd = number % 2
            searcher.tell(
                [failed(suggestion, number) if odd else finished(suggestion, number, (1.0,))]
            )
        assert {s.parent_number % 2 for s in searcher.ask(20)} == {0}

    @pytest.mark.parametrize("wrong", [{"sample": 0}, {"population": 3, "sample": 4}])
    def test_wrong_sizes(self, wrong):
        with pytest.raises(ConfigError, match="population"):
            Evolution(**wrong)


class TestPopulation(SearcherContract):
    """Outside of a campaign: children of the best that are over."""

    rounds = 80

    def make(self):
        return Population(members=12)


class TestScreenedEvolution(SearcherContract):
    rounds = 24

    def make(self):
        return ScreenedEvolution(population=12, sample=4, candidates=40)

    def test_children_carry_one_of_the_latest_as_parent(self):
        searcher = self.started(architecture())
        trials, children = {}, 0
        for number in range(40):
            (suggestion,) = searcher.ask(1)
            trial = finished(suggestion, number, (float(len(suggestion.config["body"])),))
            trials[number] = trial.but(ref=elastix.Ref(f"{number:064x}"))
            searcher.tell([trials[number]])
            if suggestion.parent_number is not None:
                assert number >= searcher.initial
                assert number - 12 <= suggestion.parent_number < number
                assert suggestion.parent == trials[suggestion.parent_number].ref
                children += 1
        assert children > 10

    def test_a_forest_makes_more_of_the_same_number_of_trials(self):
        plain = screened = 0.0
        for seed in range(4):
            ours, theirs = self.started(smooth(), seed=seed), Evolution(population=12, sample=4)
            theirs.start(smooth(), seed=seed)
            screened += min(trial.losses[0] for trial in drive(ours, bowl, 40))
            plain += min(trial.losses[0] for trial in drive(theirs, bowl, 40))
        assert screened < plain

    def test_a_region_in_which_all_fail_is_avoided(self):
        searcher = self.started(smooth(), seed=1)
        bad = 0
        for number in range(60):
            (suggestion,) = searcher.ask(1)
            fails = suggestion.config["kind"] == "bad"
            bad += fails and number >= 30
            loss = float(number % 3)
            ended = failed(suggestion, number) if fails else finished(suggestion, number, (loss,))
            searcher.tell([ended])
        assert bad < 5

    def test_saved_and_restored_at_every_step_it_goes_on_the_same(self):
        """The forest is not saved: it follows from the observations, told singly or together."""
        ours, theirs = self.started(smooth()), self.started(smooth())
        number = 0
        for count in (1, 3, 9, 1, 1, 2, 5, 1, 1, 1, 4, 1, 1, 1):
            asked = ours.ask(count)
            assert theirs.ask(count) == asked
            told = [finished(s, number + i, bowl(s.config)) for i, s in enumerate(asked)]
            number += count
            ours.tell(told)
            for trial in told:
                theirs.tell([trial])
            saved = json.loads(json.dumps(theirs.state_dict()))
            theirs = self.started(smooth(), seed=5)
            theirs.load_state_dict(saved)

    def test_it_knows_of_the_latest_trials_alone(self, monkeypatch):
        monkeypatch.setattr("elastix.search.searchers.forest._SPAN", 30)
        monkeypatch.setattr("elastix.search.searchers.screened.KEPT", 33)
        searcher = self.started(smooth())
        drive(searcher, bowl, 60)
        saved = json.loads(json.dumps(searcher.state_dict()))
        assert len(saved["observed"]) == 33
        assert len(saved["seen"]) == 60
        other = self.started(smooth(), seed=9)
        other.load_state_dict(saved)
        assert other.ask(3) == searcher.ask(3)

    def test_what_was_scored_counts_however_many_fail_in_between(self, monkeypatch):
        """Where nearly all failed it drew at random for ever: the forest forgets the oldest."""
        monkeypatch.setattr("elastix.search.searchers.forest._SPAN", 30)
        monkeypatch.setattr("elastix.search.searchers.screened.KEPT", 33)
        searcher = ScreenedEvolution(population=4, sample=2, initial=3)
        searcher.start(smooth())
        for number in range(120):
            (asked,) = searcher.ask(1)
            bad = failed(asked, number) if number % 40 else finished(asked, number, (1.0,))
            searcher.tell([bad])
        again = ScreenedEvolution(population=4, sample=2, initial=3)
        again.start(smooth())
        again.load_state_dict(json.loads(json.dumps(searcher.state_dict())))
        assert any(child.parent_number is not None for child in again.ask(8))

    def test_a_larger_budget_does_not_go_back_to_chance(self):
        """As for Evolution: after a search of 6 trials, 4 more were drawn at random."""
        searcher = ScreenedEvolution()
        searcher.expect(6)
        searcher.start(smooth())
        drive(searcher, bowl, 6)
        larger, begun = ScreenedEvolution(), ScreenedEvolution(initial=2)
        for each in (larger, begun):
            each.expect(600)
            each.start(smooth())
            each.load_state_dict(json.loads(json.dumps(searcher.state_dict())))
        assert (larger.initial, begun.initial) == (10, 2)
        assert larger.ask(3) == begun.ask(3)

    def test_one_that_an_earlier_version_has_pickled_goes_on(self):
        """In the file from which `elastix campaign resume` takes a campaign."""
        older = ScreenedEvolution.__new__(ScreenedEvolution)
        older.__setstate__(
            {"population": 24, "sample": 6, "initial": 7, "candidates": 40, "kappa": 1.0}
        )
        ours = ScreenedEvolution(population=24, sample=6, initial=7, candidates=40, kappa=1.0)
        for each in (older, ours):
            each.expect(100)
            each.start(smooth())
        assert keys(drive(older, bowl, 12)) == keys(drive(ours, bowl, 12))

    @pytest.mark.parametrize(
        "wrong",
        [{"sample": 0}, {"population": 3, "sample": 4}, {"initial": 0}, {"candidates": 1},
         {"kappa": -1.0}, {"kappa": math.nan},
         {"population": 9.5}, {"kappa": "much"}],
    )  # fmt: skip
    def test_wrong_sizes(self, wrong):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ScreenedEvolution(**wrong)


class TestDeepHyper(SearcherContract):
    rounds = 24

    def make(self):
        return elastix.DeepHyper(initial=8)

    @pytest.mark.parametrize("rungs", [False, True])
    def test_weights_of_objectives_count_at_rungs_too(self, rungs):
        """Of `a` and `1 - a` the one that has all the weight gets small."""
        last = []
        for weight in ([1.0, 0.0], [0.0, 1.0]):
            searcher = elastix.DeepHyper(
                initial=8, moo_scalarization_strategy="Linear", moo_scalarization_weight=weight
            )
            searcher.start(smooth(), objectives=2)
            asked = []
            for number in range(24):
                (suggestion,) = searcher.ask(1)
                asked.append(suggestion.config["a"])
                losses = asked[-1], 1 - asked[-1]
                ended = finished(suggestion, number, losses)
                searcher.tell([paused(suggestion, number, losses, 1) if rungs else ended])
            last.append(sum(asked[-10:]) / 10)
        assert last[0] < 0.25, last
        assert last[1] > 0.75, last

    def test_bounds_of_objectives_are_among_the_places_of_trials(self):
        searcher = elastix.DeepHyper(initial=8, moo_lower_bounds=[None, -0.4])
        searcher.start(smooth(), objectives=2)
        first, second, third, fourth = searcher.ask(4)
        searcher.tell([finished(first, 0, (0.5, 0.3)), finished(second, 1, (0.4, 0.6))])
        assert (searcher._losses(), searcher._bounds()) == ([[0.5, 0.3], [0.4, 0.6]], {})
        searcher.tell([paused(third, 2, (0.1, 0.1), 1), failed(fourth, 3)])
        assert searcher._losses() == [[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], None]
        assert searcher._bounds() == {"moo_lower_bounds": [None, 0.0]}  # the first keeps it alone

    def test_bounds_of_objectives_keep_trials_at_rungs_within_them(self):
        searcher = elastix.DeepHyper(
            initial=8,
            moo_lower_bounds=[None, -0.3],
            moo_scalarization_strategy="Linear",
            moo_scalarization_weight=[0.9, 0.1],
        )
        searcher.start(smooth(), objectives=2)
        asked = []
        for number in range(30):  # the first loss falls with `a`, and the second is bounded
            (suggestion,) = searcher.ask(1)
            asked.append(suggestion.config["a"])
            searcher.tell([paused(suggestion, number, (1 - asked[-1], asked[-1]), 1)])
        assert sum(a < 0.4 for a in asked[-10:]) >= 7, asked

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"moo_scalarization_weight": [1.0]}, "moo_scalarization_weight"),
            ({"moo_lower_bounds": [0.1, 0.2, 0.3]}, "moo_lower_bounds"),
            ({"moo_lower_bounds": ["low", 0.2]}, "moo_lower_bounds"),
            ({"moo_scalarization_strategy": "Best"}, "moo_scalarization_strategy"),
            ({"surrogate_model": "tea leaves"}, "surrogate_model"),
            ({"acq_func": "hope"}, "acq_func"),
            ({"colour": "blue"}, "colour"),
            ({"log_dir": "here"}, "log_dir"),
        ],
    )
    def test_options_that_cannot_be_are_refused_before_anything_starts(self, options, named):
        with pytest.raises(ConfigError, match=rf"(?s){named}.*Nothing was started"):
            elastix.DeepHyper(**options).start(smooth(), objectives=2)

    def test_an_object_in_the_place_of_a_strategy_is_refused(self):
        strategy = deephyper.MoScalarFunction.__subclasses__()[0](n_objectives=2)
        with pytest.raises(ConfigError, match="the name of a strategy"):
            elastix.DeepHyper(moo_scalarization_strategy=strategy)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"moo_scalarization_strategy": "Quadratic", "moo_scalarization_weight": [0.3, 0.7]},
            {"moo_scalarization_strategy": "PBI", "moo_lower_bounds": [0.2, None]},
        ],
    )
    @pytest.mark.parametrize("rungs", [elastix.Asha(first=1, eta=2, last=4), elastix.Median()])
    def test_a_campaign_of_several_objectives_with_rungs(self, tmp_path, options, rungs):
        def train(ctx):
            for report in range(4):
                a, n = ctx.config["a"], ctx.config["n"]
                bad = report == 1 and ctx.config["kind"] == "bad" and n > 15
                ctx.report(score=math.nan if bad else a + report, size=n)

        results = elastix.Campaign(
            train,
            space=smooth(),
            searcher=elastix.DeepHyper(initial=6, **options),
            metric=["score", "size"],
            mode=["max", "min"],
            rungs=rungs,
            budget=elastix.Budget(trials=16),
            run=elastix.RunConfig(name="several", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
        ).run()
        assert len(results) == 16
        assert sum(trial.state == "finished" for trial in results) >= 2

    def test_a_lie_keeps_pending_points_apart(self):
        """DeepHyper itself proposes what is pending again and again until it is told of it."""
        space = Space([Categorical("a", list("uvwxy")), Integer("b", (0, 9))])
        searcher = self.started(space)
        drive(searcher, lambda config: (abs(config["b"] - 7) + (config["a"] != "w"),), 12)
        for _ in range(8):
            (proposed,) = searcher._propose(1)
            assert searcher.history.is_new(proposed)
            assert searcher.ask(1)[0].config == proposed
        assert len(searcher.state_dict()["pending"]) == 8

    def test_it_explores_as_much_as_the_library_by_itself(self, monkeypatch, tmp_path):
        """As many results later, the deviation counts as often."""
        made = []

        class Recorded(deephyper.CBO):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                made.append(self)

        searcher = elastix.DeepHyper()
        searcher.start(smooth())
        monkeypatch.setattr(deephyper, "CBO", Recorded)
        trials = drive(searcher, bowl, 10)
        monkeypatch.undo()
        plain = deephyper.CBO(
            deephyper.problem(smooth()),
            log_dir=str(tmp_path),
            checkpoint_history_to_csv=False,
            acq_optimizer="sampling",
        )
        plain._ask(1)
        for trial in trials[:9]:
            plain._num_asked = trial.number + 1
            plain._tell([(dict(trial.config), -trial.losses[0])])
        ours, theirs = (search._opt.acq_func_kwargs["kappa"] for search in (made[-1], plain))
        assert ours == pytest.approx(theirs)

    def test_its_surrogate_is_as_fine_as_that_of_the_library_by_itself(self, monkeypatch, tmp_path):
        """The library makes it finer each time that nothing better was found for a while."""
        made = []

        class Recorded(deephyper.CBO):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                made.append(self)

        def gets_worse(config):  # whatever is proposed
            return (float(next(turns)),)

        turns = iter(range(100))
        searcher = elastix.DeepHyper()
        searcher.start(smooth())
        monkeypatch.setattr(deephyper, "CBO", Recorded)
        trials = drive(searcher, gets_worse, 26)
        monkeypatch.undo()
        plain = deephyper.CBO(
            deephyper.problem(smooth()),
            log_dir=str(tmp_path),
            checkpoint_history_to_csv=False,
            acq_optimizer="sampling",
        )
        for trial in trials[:25]:
            plain._tell([(dict(trial.config), -trial.losses[0])])
        ours, theirs = (
            search._opt.base_estimator_.min_impurity_decrease for search in (made[-1], plain)
        )
        assert ours == pytest.approx(theirs)
        assert theirs < 0.001, "more than once"

    @pytest.mark.parametrize("kind", [Float, Integer])
    @pytest.mark.parametrize("distribution", [Normal(4, 1), Beta(2, 3)])
    def test_what_it_cannot_model_is_refused_before_anything_starts(self, kind, distribution):
        space = ConfigurationSpace()
        space.add(kind("size", (1, 9), distribution=distribution))
        with pytest.raises(ConfigError, match=r"^size is a .*which DeepHyper cannot model"):
            elastix.DeepHyper().start(space)

    @pytest.mark.parametrize("ordered", [False, True])
    @pytest.mark.parametrize("choices", [[16, "auto"], [0.5, "x", None], [True, "maybe"], [3, "3"]])
    def test_text_among_numbers_is_refused_before_anything_starts(self, choices, ordered):
        space = ConfigurationSpace(space=[Categorical("size", choices, ordered=ordered)])
        with pytest.raises(ConfigError, match=r"^size has text and numbers .*DeepHyper"):
            elastix.DeepHyper().start(space)

    @pytest.mark.parametrize("ordered", [False, True])
    @pytest.mark.parametrize("choices", [[1, 2.5, 3], [2, True, 0.5], [None, 1, 2.5], ["a", None]])
    def test_values_are_the_very_choices_of_the_space(self, choices, ordered):
        searcher = elastix.DeepHyper(initial=1)
        searcher.start(
            ConfigurationSpace(
                space=[Categorical("size", choices, ordered=ordered), Integer("n", (1, 2))]
            )
        )
        found = []
        for number in range(2 * len(choices)):
            (asked,) = searcher.ask(1)
            found.append((repr(asked.config["size"]), asked.config["n"]))
            searcher.tell([Trial(number, asked, TrialState.FINISHED, (float(number),))])
        assert set(found) == {(repr(choice), n) for choice in choices for n in (1, 2)}
        assert searcher.ask(1) == []

    @pytest.mark.parametrize("n", [1, 3])
    def test_inactive_values_that_it_would_refuse_itself_end_nothing(self, n):
        kind = Categorical("kind", ["without", "with"])
        rate = Float("rate", (0.03, 3.0), log=True)  # 10 ** log10(0.03) is less than 0.03
        many = Integer("many", (1, 9))
        space = ConfigurationSpace(space=[kind, rate, many])
        space.add(EqualsCondition(rate, kind, "with"), EqualsCondition(many, kind, "with"))
        space.add(ForbiddenEqualsClause(many, 1), Integer("width", (1, 1000)))
        searcher = deephyper.DeepHyper(initial=4)
        searcher.start(space)
        trials = drive(searcher, lambda c: (c["width"] + 1e4 * (c["kind"] == "with"),), 6)
        assert {trial.config["kind"] for trial in trials} == {"without", "with"}
        proposed = searcher._propose(n)
        assert [config["kind"] for config in proposed] == ["without"] * n

    def test_where_its_genetic_search_cannot_do_without_inactive_values_it_draws_samples(self):
        kind, many = Categorical("kind", ["without", "with"]), Integer("many", (1, 9))
        space = ConfigurationSpace(space=[kind, many, Integer("width", (1, 1000))])
        space.add(EqualsCondition(many, kind, "with"), ForbiddenEqualsClause(many, 1))
        searcher = deephyper.DeepHyper(initial=4, acq_optimizer="mixedga")
        searcher.start(space)
        drive(searcher, lambda c: (c["width"] + 1e4 * (c["kind"] == "with"),), 6)
        assert len(searcher._propose(1)) == 1

    def test_trials_that_take_long_are_worth_a_longer_thought(self):
        assert elastix.DeepHyper().acq_optimizer == "sampling"
        assert elastix.DeepHyper(trial_s=600).acq_optimizer == "mixedga"
        assert elastix.DeepHyper(trial_s=600, acq_optimizer="sampling").acq_optimizer == "sampling"
        with pytest.raises(ConfigError, match="acq_optimizer"):
            elastix.DeepHyper(acq_optimizer="best")

    def test_the_long_thought_works(self):
        searcher = elastix.DeepHyper(initial=6, acq_optimizer="mixedga")
        searcher.start(smooth())
        for trial in drive(searcher, bowl, 7):  # of which the last is thought of
            smooth().check(trial.config)


class TestOptuna(SearcherContract):
    def make(self):
        pytest.importorskip("optuna")
        return elastix.Optuna(n_startup_trials=8)

    def test_restored_it_does_not_wait_for_what_it_has_been_told(self):
        """Among few configurations TPE draws known ones, which are in its state as well."""
        places = [Categorical(name, range(4)) for name in "ab"]
        ours, theirs = (self.started(ConfigurationSpace(space=places)) for _ in range(2))
        asked = ours.ask(12)
        theirs.load_state_dict(json.loads(json.dumps(ours.state_dict())))
        told = [finished(s, i, (float(s.config["a"]),)) for i, s in enumerate(asked)]
        for searcher in (ours, theirs):
            searcher.tell(told)
        assert len(ours.state_dict()["log"]) > len(asked), "none was drawn twice"
        assert theirs.state_dict() == ours.state_dict()
        assert theirs.ask(2) == ours.ask(2)

    def test_what_is_pending_weighs_the_same_when_the_state_is_read_again(self):
        """Optuna had noted values of layers that the pending configurations do not have."""
        options = {"n_startup_trials": 4, "multivariate": True, "group": True}
        ours, theirs = (elastix.Optuna(**options) for _ in range(2))
        for searcher in (ours, theirs):
            searcher.start(architecture(), seed=3)
        for number in range(20):
            _pending, one, other = ours.ask(3)
            told = ((2 * number, one), (2 * number + 1, other))
            ours.tell([finished(each, n, (len(str(each.config)),)) for n, each in told])
        theirs.load_state_dict(json.loads(json.dumps(ours.state_dict())))
        assert theirs.ask(8) == ours.ask(8)

    def test_one_that_an_earlier_version_has_started_goes_on(self):
        """Tune pickles one that was given its space: Search(space=..., metric=..., mode=...)."""
        searcher = self.started(smooth())
        del searcher.__dict__["_drawn"]
        assert len(searcher.ask(2)) == 2

    @pytest.mark.parametrize("options", [{}, {"n_startup_trials": 4, "constant_liar": False}])
    def test_at_first_it_draws_what_the_space_says_is_likely(self, options):
        likely = [
            Float("momentum", (0, 1), distribution=Normal(0.9, 0.02)),
            Categorical("kind", ["a", "b"], weights=[0.999, 0.001]),
        ]
        searcher = elastix.Optuna(**options)
        searcher.start(ConfigurationSpace(space=likely), seed=3)
        first = [each.config for each in searcher.ask(options.get("n_startup_trials", 10))]
        assert all(config["momentum"] > 0.8 and config["kind"] == "a" for config in first)
        known = [
            Trial(n, Suggestion(config), TrialState.FINISHED, (float(n),))
            for n, config in enumerate(first)
        ]
        searcher.tell(known)
        later = [each.config["momentum"] for each in searcher.ask(10)]
        assert min(later) < 0.8, "TPE goes by results alone"

    def test_an_objective_of_ones_own(self):
        optuna = pytest.importorskip("optuna")
        from elastix.search.searchers.optuna import suggest

        space = architecture()
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        for _ in range(20):
            space.check(suggest(study.ask(), space))


@pytest.mark.parametrize(
    "name", ["Random", "Evolution", "ScreenedEvolution", "DeepHyper", "Optuna"]
)
def test_a_bare_configuration_space_will_do(name):
    searcher = getattr(elastix, name)()
    searcher.start(ConfigurationSpace(space=[Categorical("x", [1, 2, 3])]))
    assert {s.config["x"] for s in searcher.ask(5)} == {1, 2, 3}


def test_another_searcher_takes_over():
    first = Random()
    first.start(smooth())
    trials = drive(first, bowl, 40)
    second = Evolution(population=20, sample=10)
    second.start(smooth())
    second.tell(trials)
    children = second.ask(10)
    assert all(child.parent_number is not None for child in children)


def test_a_wider_space_continues():
    searcher = Evolution(population=4, sample=2)
    searcher.start(smooth().plus(Float("momentum", (0.0, 0.9))))
    old = [
        Trial(i, Suggestion(s.config), TrialState.FINISHED, (0.0,))
        for i, s in enumerate(_sampled(6))
    ]
    searcher.tell(old)
    assert all("momentum" in suggestion.config for suggestion in searcher.ask(8))


def _sampled(count):
    searcher = Random()
    searcher.start(smooth())
    return searcher.ask(count)


def test_libraries_are_imported_when_asked_for():
    code = (
        "import sys, elastix, elastix.search.space, elastix.search.rungs\n"
        "elastix.Evolution, elastix.Random, elastix.ScreenedEvolution\n"
        "found = [n for n in ('ray', 'deephyper', 'optuna', 'sklearn') if n in sys.modules]\n"
        "print(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"n_trials": 3}, "unexpected keyword argument 'n_trials'. Nothing"),
        ({"multivariate": False, "group": True}, "``multivariate`` is enabled. Nothing"),
        ({"seed": 3}, r"RunConfig\(seed="),
        ({"constraints_func": lambda trial: (trial.params["x"],)}, r"Give Space\(\.\.\., valid="),
    ],
)
def test_options_that_optuna_does_not_take_are_refused_at_once(options, told):
    """They came to light when it was asked for the first time, as an error of Python's."""
    with pytest.raises(ConfigError, match=told):
        elastix.Optuna(**options)
