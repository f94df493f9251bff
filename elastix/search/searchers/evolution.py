"""Aging evolution. Children know their parent, and no configuration is proposed twice.

The population consists of the youngest scored trials. For each child, `sample` of them are drawn at
random, the best of these becomes the parent, and one mutation makes the child, which can inherit
from the parent's stored model. A trial that was paused at a rung or stopped early is among them: it
is as young as the latest that is known of it, and worse than all that have come further. With
several objectives, "best" means NSGA-II rank, and the population consists of the best trials and
not of the youngest, so that the ends of the Pareto front do not age out.

Source: Real et al., Regularized Evolution for Image Classifier Architecture Search, AAAI'19;
Deb et al., NSGA-II, 2002; pareto.furthest. Refusing repeats alone halves the regret on small
tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ConfigSpace import ConfigurationSpace
from numpy.random import RandomState

from elastix.arguments import checked
from elastix.errors import ConfigError
from elastix.search.pareto import furthest
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Suggestion, Trial

_TRIES = 20
_POPULATION = 32
_SAMPLE = 8


class _HasLosses(Protocol):
    @property
    def losses(self) -> Sequence[float]: ...
    @property
    def reach(self) -> int | None: ...


_Scored = TypeVar("_Scored", bound=_HasLosses)


def survivors(living: list[_Scored], population: int) -> list[_Scored]:
    """The members (oldest first) that stay in the population; see the module's docstring."""
    if len(living) <= population:
        return living
    if len(living[0].losses) == 1:
        return living[-population:]
    return [living[place] for place in sorted(ranked(living)[:population])]


def ranked(living: Sequence[_Scored]) -> list[int]:
    """Their places, best first."""
    return furthest([each.losses for each in living], [each.reach for each in living])


class TournamentSizes:
    """The sizes of a population and of its tournaments: as given, or by the campaign's budget."""

    def __init__(self, population: int | None, sample: int | None) -> None:
        self._population = population
        self._sample = sample
        self._expected: int | None = None

    def expect(self, trials: int | None) -> None:
        """Set the expected number of trials, for the default population. None means unknown."""
        self._expected = trials

    @property
    def population(self) -> int:
        """Size of the population."""
        if self._population is not None:
            return self._population
        if self._expected is None:
            return max(_POPULATION, self._sample or 0)
        return max(2, self._sample or 0, min(_POPULATION, self._expected // 3))

    @property
    def sample(self) -> int:
        """How many members are drawn for a mutation; the best of them becomes its parent."""
        return self._sample or max(1, min(_SAMPLE, self.population // 2))


@checked
class Evolution(TournamentSizes):
    """Aging evolution.

    Args:
        population: size of the population, and number of random configurations at the start. By
            default a third of the campaign's budget of trials, at least 2 and at most 32; 32 if
            the budget does not limit trials.
        sample: how many are drawn for each child; the best of them becomes its parent. By default
            half of the population, at most 8.
    """

    history = HistoryOnceStarted()
    proposes_parents = True
    hears_of_paused = True

    def __init__(self, population: int | None = None, sample: int | None = None) -> None:
        for given in (population, sample):
            if given is not None and given < 1:
                raise ConfigError(
                    f"Evolution(population={population!r}, sample={sample!r}): whole numbers >= 1. "
                    "Nothing was started."
                )
        if population is not None and sample is not None and sample > population:
            raise ConfigError(
                f"Evolution(population={population}, sample={sample}): 1 <= sample <= population. "
                "Nothing was started."
            )
        super().__init__(population, sample)
        self._living: list[Trial] = []
        self._begun = False  # there have been enough for a child; a larger budget changes nothing

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
        if not self._begun or not self._living:  # all that were at a rung may have failed since
            return None
        size = min(self.sample, len(self._living))
        for _ in range(_TRIES):
            places = rng.choice(len(self._living), size=size, replace=False).tolist()
            drawn = [self._living[place] for place in places]
            parent = drawn[ranked(drawn)[0]]
            config = self.history.space.mutate(parent.config, rng)
            if config is not None and self.history.is_new(config):
                return Suggestion(config, parent.ref, parent.number)
        return None

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. A trial that failed, or is of another space, does not become a parent."""
        self.history.tell(trials)
        valid = self.history.space.is_valid
        told = {trial.number: trial for trial in trials}  # of the same one the latest
        self._living = [trial for trial in self._living if trial.number not in told]
        self._living += [trial for trial in told.values() if trial.scored and valid(trial.config)]
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
