"""What every Searcher must do, as tests. Inherit SearcherContract and say how one is made.

    class TestMine(SearcherContract):
        def make(self):
            return MySearcher()

`learns = False` for one that makes nothing of results; `rounds` is how many trials a test of
learning may spend.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ConfigSpace import Categorical, ConfigurationSpace, EqualsCondition, Float, Integer

from elastix.errors import EmptySpace, SearchError
from elastix.search.space import Blocks, Space
from elastix.search.trial import (
    Config,
    Objectives,
    Searcher,
    Suggestion,
    Trial,
    TrialState,
    config_key,
)

Score = Callable[[Config], tuple[float, ...]]


def small() -> Space:
    """24 configurations."""
    return Space([Categorical("a", ["x", "y", "z"]), Integer("b", (0, 7))])


def smooth() -> Space:
    """Numbers and a choice, for which `bowl` is best at a=0.7, n=12, kind=good."""
    return Space(
        [Float("a", (0.0, 1.0)), Integer("n", (1, 20)), Categorical("kind", ["good", "bad"])]
    )


def bowl(config: Config) -> tuple[float, ...]:
    """Lower is better."""
    kind = 0.0 if config["kind"] == "good" else 0.5
    return ((config["a"] - 0.7) ** 2 + ((config["n"] - 12) / 20) ** 2 + kind,)


def architecture() -> Space:
    """Block sequences with a condition in the block."""
    block = ConfigurationSpace(
        space=[Categorical("op", ["conv", "pool"]), Categorical("k", [1, 3, 5], ordered=True)]
    )
    block.add(EqualsCondition(block["k"], block["op"], "conv"))
    return Space([Float("lr", (1e-4, 1e-1), log=True)], Blocks("body", block, min=1, max=4))


def finished(suggestion: Suggestion, number: int, losses: Sequence[float]) -> Trial:
    """A trial that ran to its end."""
    return Trial(number, suggestion, TrialState.FINISHED, tuple(losses))


def failed(suggestion: Suggestion, number: int) -> Trial:
    """A trial that raised."""
    return Trial(number, suggestion, TrialState.FAILED, traceback="ValueError")


def paused(suggestion: Suggestion, number: int, losses: Sequence[float], reports: int) -> Trial:
    """A trial that has come to a rung."""
    return Trial(number, suggestion, TrialState.PAUSED, tuple(losses), ({},) * reports)


def drive(searcher: Searcher, score: Score, rounds: int, first: int = 0) -> list[Trial]:
    """Ask for one, tell it, and so on."""
    trials = []
    for number in range(first, first + rounds):
        (suggestion,) = searcher.ask(1)
        trials.append(finished(suggestion, number, score(suggestion.config)))
        searcher.tell(trials[-1:])
    return trials


def keys(found: Sequence[Suggestion | Trial]) -> list[str]:
    """Of their configurations."""
    return [config_key(each.config) for each in found]


class SearcherContract:
    """Inherit it; override `make`."""

    learns = True
    rounds = 40

    def make(self) -> Searcher:
        """A searcher, not started. Every call with the same arguments."""
        raise NotImplementedError

    def started(self, space: Space, objectives: int = 1, seed: int = 0) -> Searcher:
        """One that has its space."""
        searcher = self.make()
        searcher.start(space, objectives=objectives, seed=seed)
        return searcher

    def test_it_is_a_searcher(self) -> None:
        assert isinstance(self.make(), Searcher)

    def test_asking_before_the_start_says_so(self) -> None:
        with pytest.raises(SearchError, match="start"):
            self.make().ask(1)

    def test_a_space_without_a_valid_configuration(self) -> None:
        with pytest.raises(EmptySpace):
            self.make().start(ConfigurationSpace())

    # ------------------------------------------------------------------- duplicates, pending points

    def test_a_small_space_is_proposed_whole_and_then_no_more(self) -> None:
        searcher = self.started(small())
        trials = drive(searcher, lambda config: (float(config["b"]),), 20)
        rest = searcher.ask(10)
        assert len(rest) == 4
        assert sorted(keys(trials) + keys(rest)) == sorted(
            config_key({"a": a, "b": b}) for a in "xyz" for b in range(8)
        )
        assert searcher.ask(3) == []
        searcher.tell([finished(s, 20 + i, (0.0,)) for i, s in enumerate(rest)])
        assert searcher.ask(1) == []

    def test_pending_points_are_not_proposed_again(self) -> None:
        searcher = self.started(smooth())
        trials = drive(searcher, bowl, 10)
        pending = [searcher.ask(1)[0] for _ in range(5)] + searcher.ask(3)
        assert len(pending) == 8
        assert len(set(keys(pending) + keys(trials))) == 18
        searcher.tell([finished(s, 10 + i, bowl(s.config)) for i, s in enumerate(pending[::-1])])
        (further,) = searcher.ask(1)
        assert config_key(further.config) not in set(keys(pending) + keys(trials))

    def test_what_was_told_without_being_asked_is_known(self) -> None:
        searcher = self.started(small())
        told: list[Config] = [{"a": a, "b": b} for a in "xy" for b in range(8)]
        searcher.tell([finished(Suggestion(c), i, (float(c["b"]),)) for i, c in enumerate(told)])
        asked = searcher.ask(24)
        assert sorted(keys(asked)) == sorted(config_key({"a": "z", "b": b}) for b in range(8))

    def test_a_trial_of_another_space_does_no_harm(self) -> None:
        searcher = self.started(smooth())
        strange: list[Config] = [
            {"a": 9.0, "n": 3, "kind": "good"},
            {"else": 1},
            {"a": 0.5, "n": 2},
        ]
        searcher.tell([finished(Suggestion(c), i, (-5.0,)) for i, c in enumerate(strange)])
        for trial in drive(searcher, bowl, self.rounds // 2, first=3):
            smooth().check(trial.config)

    # ------------------------------------------------------------------------------------- failures

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_failures_are_survived_and_not_repeated(self, loss: float) -> None:
        searcher = self.started(smooth())
        found: list[Trial] = []
        for number in range(self.rounds // 2):
            (suggestion,) = searcher.ask(1)
            outcome = [
                finished(suggestion, number, bowl(suggestion.config)),
                failed(suggestion, number),
                finished(suggestion, number, (loss,)),
            ][number % 3]
            searcher.tell([outcome])
            found.append(outcome)
        assert len(set(keys(found))) == len(found)

    def test_a_campaign_in_which_all_fail(self) -> None:
        searcher = self.started(smooth())
        for number in range(10):
            searcher.tell([failed(searcher.ask(1)[0], number)])
        assert len(searcher.ask(2)) == 2

    def test_a_wrong_number_of_losses_is_refused(self) -> None:
        searcher = self.started(smooth())
        (suggestion,) = searcher.ask(1)
        with pytest.raises(SearchError, match="2 losses"):
            searcher.tell([finished(suggestion, 0, (1.0, 2.0))])

    # ----------------------------------------------------------------------------- trials at rungs

    def hearing(self, space: Space, seed: int = 0, objectives: int = 1) -> Searcher:
        """One that is told of trials at rungs, or the test is skipped."""
        searcher = self.started(space, objectives, seed)
        if not getattr(searcher, "hears_of_paused", False):
            pytest.skip("it hears of final trials alone")
        return searcher

    def climb(self, searcher: Searcher, rounds: int, grow: float = 10.0) -> list[Trial]:
        """The best third goes on from the first rung, the best ninth to the end; nobody else.

        Losses of further rungs are higher by `grow`, so they must not be compared across rungs.
        """
        trials: list[Trial] = []
        for number in range(rounds):
            (suggestion,) = searcher.ask(1)
            (loss,) = bowl(suggestion.config)
            trial = paused(suggestion, number, (loss,), 1)
            searcher.tell([trial])
            better = sum(other.losses[0] % grow < loss for other in trials)
            if better <= len(trials) // 3:
                trial = paused(suggestion, number, (loss + grow,), 3)
                searcher.tell([trial])
            if better <= len(trials) // 9:
                trial = finished(suggestion, number, (loss + 2 * grow,))
                searcher.tell([trial])
            trials.append(trial)
        return trials

    def test_it_learns_from_trials_that_do_not_end(self) -> None:
        early = late = 0.0
        for seed in range(3):
            searcher = self.hearing(smooth(), seed)
            losses = []
            for number in range(self.rounds):
                (suggestion,) = searcher.ask(1)
                losses.append(bowl(suggestion.config)[0])
                searcher.tell([paused(suggestion, number, losses[-1:], 1)])
            early, late = early + sum(losses[:10]), late + sum(losses[-10:])
        assert late < 0.7 * early, (early, late)

    def test_losses_of_different_rungs_are_not_compared(self) -> None:
        early = late = 0.0
        for seed in range(3):
            trials = self.climb(self.hearing(smooth(), seed), self.rounds)
            assert len(set(keys(trials))) == self.rounds
            losses = [bowl(trial.config)[0] for trial in trials]
            early, late = early + sum(losses[:10]), late + sum(losses[-10:])
        assert late < 0.7 * early, (early, late)

    def test_several_objectives_at_rungs(self) -> None:
        """As with one: it learns of trials that do not end, and compares none across rungs."""
        early = late = 0.0
        for seed in range(3):
            searcher = self.hearing(smooth(), seed, objectives=2)
            found: list[float] = []
            for number in range(self.rounds):
                (suggestion,) = searcher.ask(1)
                losses = bowl(suggestion.config)[0], suggestion.config["n"] / 20
                searcher.tell([paused(suggestion, number, losses, 1)])
                if sum(losses) <= sorted([*found, sum(losses)])[len(found) // 3]:
                    higher = losses[0] + 10.0, losses[1] + 10.0
                    searcher.tell([paused(suggestion, number, higher, 3)])
                found.append(sum(losses))
            early, late = early + sum(found[:10]), late + sum(found[-10:])
        assert late < 0.8 * early, (early, late)

    def test_of_a_trial_the_latest_counts(self) -> None:
        """Told one by one or together, and whether or not its rungs were told of."""
        bad = {"a": 0.0, "n": 1, "kind": "bad"}
        first = paused(Suggestion(bad), 0, (-100.0,), 1)
        for last in (failed(Suggestion(bad), 0), paused(Suggestion(bad), 0, (math.nan,), 3)):
            for tellings in ([[first], [last]], [[first, last]], [[last]]):
                searcher = self.hearing(smooth())
                told = drive(searcher, bowl, self.rounds // 2, first=1)
                for trials in tellings:
                    searcher.tell(trials)
                (asked,) = searcher.ask(1)
                assert asked.parent_number != 0
                assert config_key(asked.config) not in keys(told)

    def test_all_that_were_at_a_rung_may_fail_later(self) -> None:
        searcher = self.hearing(smooth())
        asked = searcher.ask(self.rounds // 2)
        searcher.tell([paused(each, n, bowl(each.config), 1) for n, each in enumerate(asked)])
        searcher.tell([failed(each, n) for n, each in enumerate(asked)])
        further = searcher.ask(2)
        assert len({*keys(asked), *keys(further)}) == len(asked) + 2

    def test_a_saved_state_knows_of_trials_at_rungs(self) -> None:
        searcher = self.hearing(smooth(), seed=3)
        self.climb(searcher, self.rounds // 2)
        (pending,) = searcher.ask(1)
        searcher.tell([paused(pending, 90, (0.5,), 1)])
        saved = json.loads(json.dumps(searcher.state_dict(), allow_nan=False))
        other = self.started(smooth(), seed=99)
        other.load_state_dict(saved)
        assert json.dumps(other.state_dict()) == json.dumps(saved)
        assert searcher.ask(2) == other.ask(2)
        for each in (searcher, other):
            each.tell([paused(pending, 90, (0.4,), 3)])
            each.tell([finished(pending, 90, (0.3,))])
        assert searcher.ask(2) == other.ask(2)

    # ------------------------------------------------------------------------- seeds, saved states

    def test_the_seed_decides(self) -> None:
        rounds = self.rounds // 2
        first = drive(self.started(smooth(), seed=1), bowl, rounds)
        assert keys(first) == keys(drive(self.started(smooth(), seed=1), bowl, rounds))
        assert keys(first) != keys(drive(self.started(smooth(), seed=2), bowl, rounds))

    @pytest.mark.parametrize("make_space", [smooth, architecture])
    def test_a_saved_state_goes_on_where_the_other_would(
        self, make_space: Callable[[], Space]
    ) -> None:
        def score(config: Config) -> tuple[float, ...]:
            return (len(config_key(config)) % 17 + len(config) / 10,)

        searcher = self.started(make_space(), seed=3)
        drive(searcher, score, self.rounds // 2)
        searcher.tell([failed(searcher.ask(1)[0], self.rounds // 2)])
        pending = searcher.ask(2)
        saved = json.loads(json.dumps(searcher.state_dict()))
        other = self.started(make_space(), seed=99)
        other.load_state_dict(saved)
        assert json.dumps(other.state_dict()) == json.dumps(saved)
        ours, theirs = searcher.ask(2), other.ask(2)
        assert ours == theirs
        assert not set(keys(pending)) & set(keys(theirs))
        for each in (searcher, other):
            told = [*pending, *ours]
            each.tell([finished(s, 50 + i, score(s.config)) for i, s in enumerate(told)])
        assert keys(searcher.ask(2)) == keys(other.ask(2))

    # ------------------------------------------------------------------------------------- learning

    def test_more_and_less_are_the_same_at_the_door(self) -> None:
        up, down = Objectives.of("score", "max"), Objectives.of("score", "min")

        def accuracy(config: Config) -> tuple[float, ...]:
            return up.losses({"score": -bowl(config)[0]})

        def error(config: Config) -> tuple[float, ...]:
            return down.losses({"score": bowl(config)[0]})

        rounds = self.rounds // 2
        maximised = drive(self.started(smooth()), accuracy, rounds)
        assert keys(maximised) == keys(drive(self.started(smooth()), error, rounds))

    def test_it_learns_what_is_better(self) -> None:
        if not self.learns:
            pytest.skip("it makes nothing of results")
        early = late = 0.0
        for seed in range(3):
            losses = [
                t.losses[0] for t in drive(self.started(smooth(), seed=seed), bowl, self.rounds)
            ]
            early, late = early + sum(losses[:10]), late + sum(losses[-10:])
        assert late < 0.6 * early, (early, late)

    def test_two_objectives(self) -> None:
        def score(config: Config) -> tuple[float, ...]:
            return bowl(config)[0], config["n"] / 20

        trials = drive(self.started(smooth(), objectives=2), score, self.rounds)
        assert len(set(keys(trials))) == self.rounds
        if self.learns:
            early = [sum(trial.losses) for trial in trials[:10]]
            late = [sum(trial.losses) for trial in trials[-10:]]
            assert sum(late) < sum(early)

    def test_architectures_are_valid_and_plain(self) -> None:
        space = architecture()

        def score(config: Config) -> tuple[float, ...]:
            return (sum(block["op"] == "pool" for block in config["body"]) - len(config["body"]),)

        for trial in drive(self.started(space), score, self.rounds // 2):
            space.check(trial.config)
            assert json.loads(json.dumps(trial.config)) == trial.config

    def test_nothing_is_left_in_the_current_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "results.csv").write_text("mine")
        drive(self.started(small()), lambda config: (float(config["b"]),), 12)
        assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
        assert (tmp_path / "results.csv").read_text() == "mine"
