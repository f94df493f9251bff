"""Aging evolution that keeps the parent and never proposes a configuration twice.

The youngest `population` of scored trials live. For each child some of them are drawn, the best
of these is the parent, and one mutation makes the child, which carries the parent's stored model.
With several objectives "best" is by NSGA-II rank, and it is the best that live, not the youngest,
or the ends of the front would age away.

Source: Real et al., Regularized Evolution for Image Classifier Architecture Search, AAAI'19;
Deb et al., NSGA-II, 2002. Refusing repeats alone halves the regret on small tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ConfigSpace import ConfigurationSpace
from numpy.random import RandomState

from elastix.errors import ConfigError
from elastix.search.pareto import order
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Suggestion, Trial

_TRIES = 20
_POPULATION = 32
_SAMPLE = 8


class _HasLosses(Protocol):
    @property
    def losses(self) -> Sequence[float]: ...


_Scored = TypeVar("_Scored", bound=_HasLosses)


def survivors(living: list[_Scored], population: int) -> list[_Scored]:
    """Who of the living, the youngest last, stays alive: see the module."""
    if len(living) <= population:
        return living
    if len(living[0].losses) == 1:
        return living[-population:]
    best = order([each.losses for each in living])[:population]
    return [living[place] for place in sorted(best)]


class Evolution:
    """Aging evolution.

    Args:
        population: how many live; as many random ones come first. By default a third of the trials
            that a campaign's budget allows, 2 at least and 32 at most; 32 where nobody says how
            many there will be.
        sample: how many are drawn for each child, the best of which is its parent. By default half
            of the population, 8 at most.
    """

    history = HistoryOnceStarted()
    proposes_parents = True

    def __init__(self, population: int | None = None, sample: int | None = None) -> None:
        for given in (population, sample):
            if given is not None and (type(given) is not int or given < 1):
                raise ConfigError(
                    f"Evolution(population={population!r}, sample={sample!r}): whole numbers >= 1. "
                    "Nothing was started."
                )
        if population is not None and sample is not None and sample > population:
            raise ConfigError(
                f"Evolution(population={population}, sample={sample}): 1 <= sample <= population. "
                "Nothing was started."
            )
        self._population = population
        self._sample = sample
        self._expected: int | None = None
        self._living: list[Trial] = []
        self._begun = False  # there have been enough for a child; a larger budget changes nothing

    def expect(self, trials: int | None) -> None:
        """Take in how many trials there will be, for the default population. None: nobody knows."""
        self._expected = trials

    @property
    def population(self) -> int:
        """How many live."""
        if self._population is not None:
            return self._population
        if self._expected is None:
            return max(_POPULATION, self._sample or 0)
        return max(2, self._sample or 0, min(_POPULATION, self._expected // 3))

    @property
    def sample(self) -> int:
        """How many are drawn for each child."""
        return self._sample or max(1, min(_SAMPLE, self.population // 2))

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher."""
        self.history = SearchHistory.begin(space, objectives, seed)

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher."""
        return self.history.ask(n, self._child)

    def _child(self, rng: RandomState) -> Suggestion | None:
        """A new mutation of one of the best; None while too few live, or if none was found."""
        if not self._begun:
            return None
        size = min(self.sample, len(self._living))
        for _ in range(_TRIES):
            drawn = rng.choice(len(self._living), size=size, replace=False).tolist()
            parent = self._living[drawn[order([self._living[i].losses for i in drawn])[0]]]
            config = self.history.space.mutate(parent.config, rng)
            if config is not None and self.history.is_new(config):
                return Suggestion(config, parent.ref, parent.number)
        return None

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. A failed trial has no children, nor has one of another space."""
        self.history.tell(trials)
        valid = self.history.space.is_valid
        self._living += [trial for trial in trials if trial.scored and valid(trial.config)]
        self._begun = self._begun or len(self._living) >= self.population
        self._living = survivors(self._living, self.population)

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        living = [trial.to_json() for trial in self._living]
        return {**self.history.state_dict(), "living": living, "begun": self._begun}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
        self._living = [Trial.from_json(values) for values in state_dict["living"]]
        self._begun = state_dict.get("begun", len(self._living) >= self.population)
