"""Every searcher by the one suite, and what is particular to each."""

import subprocess
import sys

import pytest
from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer

import elastix
from elastix.errors import ConfigError
from elastix.search.searchers.evolution import Evolution
from elastix.search.searchers.random import Random
from elastix.search.space import Space
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.testing.searcher_contract import (
    SearcherContract,
    architecture,
    bowl,
    drive,
    failed,
    finished,
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


class TestDeepHyper(SearcherContract):
    rounds = 24

    def make(self):
        return elastix.DeepHyper(initial=8)

    def test_a_lie_keeps_pending_points_apart(self):
        """DeepHyper itself proposes what is pending again and again until it is told of it."""
        space = Space([Categorical("a", list("uvwxy")), Integer("b", (0, 9))])
        searcher = self.started(space)
        drive(searcher, lambda config: (abs(config["b"] - 7) + (config["a"] != "w"),), 12)
        for _ in range(8):
            (proposed,) = searcher._propose(1)
            assert searcher.known.is_new(proposed)
            assert searcher.ask(1)[0].config == proposed
        assert len(searcher.state_dict()["pending"]) == 8

    def test_trials_that_take_long_are_worth_a_longer_thought(self):
        assert elastix.DeepHyper().acq_optimizer == "sampling"
        assert elastix.DeepHyper(trial_s=600).acq_optimizer == "mixedga"
        assert elastix.DeepHyper(trial_s=600, acq_optimizer="sampling").acq_optimizer == "sampling"
        with pytest.raises(ConfigError, match="acq_optimizer"):
            elastix.DeepHyper(acq_optimizer="best")

    def test_the_long_thought_works(self):
        searcher = elastix.DeepHyper(initial=6, acq_optimizer="mixedga")
        searcher.start(smooth())
        for trial in drive(searcher, bowl, 8):
            smooth().check(trial.config)


class TestOptuna(SearcherContract):
    def make(self):
        pytest.importorskip("optuna")
        return elastix.Optuna(n_startup_trials=8)

    def test_an_objective_of_ones_own(self):
        optuna = pytest.importorskip("optuna")
        from elastix.search.searchers.optuna import suggest

        space = architecture()
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        for _ in range(20):
            space.check(suggest(study.ask(), space))


@pytest.mark.parametrize("name", ["Random", "Evolution", "DeepHyper", "Optuna"])
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
        "elastix.Evolution, elastix.Random\n"
        "print([name for name in ('ray', 'deephyper', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
