"""Evolution in which a random forest selects among many candidates for each proposal.

As in aging evolution, the population consists of the youngest trials, and tournaments choose the
parents. But each proposal is the best of many candidates: half of them are mutations of parents
(every third of these is mutated twice), and half are random. Candidates are compared by a random
forest that has learned the ranks of earlier trials, so the scale of the loss does not matter. It
uses the mean minus some standard deviations, because uncertain candidates are worth trying.

Children know their parents, so models are inherited as with Evolution. Random ones have no parent.

Source: Real et al., AAAI'19 (evolution); Hutter et al., SMAC, 2011 (random forests that choose
among neighbours of the good and random configurations); White et al., BANANAS, AAAI'21
(mutations, chosen by a model).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ConfigSpace import ConfigurationSpace
from numpy.random import RandomState

from elastix.arguments import checked
from elastix.errors import ConfigError
from elastix.search.searchers.evolution import TournamentSizes, ranked, survivors
from elastix.search.searchers.forest import KEPT, Encoding, Forest, Rows
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Config, Suggestion, Trial
from elastix.state import Ref

_INITIAL = 10
_TWICE = 1 / 3
_PENDING = 100  # the latest: what was proposed long ago resembles candidates of now the least


class _Observed(NamedTuple):
    """What is kept of a trial. JSON writes it as a list. No losses: it failed. See Trial.reach."""

    config: Config
    losses: Sequence[float]
    ref: Ref | None
    number: int
    reach: int | None = None


@checked
class ScreenedEvolution(TournamentSizes):
    """Evolution in which a random forest selects the most promising of many candidates.

    An `ask` and a `tell` together take about ten milliseconds, for any number of trials, compared
    with one for Evolution. Where many workers run trials of less than a second, take Evolution.

    Args:
        population: size of the population: the latest trials with a score, or with several
            objectives the best ones. By default a third of the campaign's budget of trials, at
            least 2 and at most 32; 32 if the budget does not limit trials.
        sample: how many members are drawn for each mutation; the best becomes the parent. By
            default half of the population, at most 8.
        initial: configurations are random until so many have a score. By default 10, or as many as
            the population has if that is fewer.
        candidates: how many candidates the forest chooses from; half of them are mutations.
        kappa: how many standard deviations are subtracted from the mean. More explores more.
    """

    history = HistoryOnceStarted()
    proposes_parents = True
    hears_of_paused = True

    def __init__(
        self,
        population: int | None = None,
        sample: int | None = None,
        initial: int | None = None,
        candidates: int = 80,
        kappa: float = 1.5,
    ) -> None:
        sizes = [size for size in (population, sample, initial) if size is not None]
        fits = population is None or sample is None or sample <= population
        if min(sizes, default=1) < 1 or not fits or candidates < 2 or kappa < 0:
            raise ConfigError(
                f"ScreenedEvolution(population={population!r}, sample={sample!r}, "
                f"initial={initial!r}, candidates={candidates!r}, kappa={kappa!r}): 1 <= sample "
                "<= population, initial >= 1, candidates >= 2 and kappa >= 0. Nothing was started."
            )
        super().__init__(population, sample)
        self._initial = initial
        self.candidates = candidates
        self.kappa = kappa

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """As it was pickled, by an earlier version too: there all sizes were always given."""
        sizes = {name: state[name] for name in ("population", "sample", "initial") if name in state}
        given = {f"_{name}": size for name, size in sizes.items()}
        rest = {name: value for name, value in state.items() if name not in sizes}
        self.__dict__.update({"_expected": None, **rest, **given})

    @property
    def initial(self) -> int:
        """Number of random configurations at the start."""
        return self._initial or min(_INITIAL, self.population)

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher."""
        self.history = SearchHistory.begin(space, objectives, seed)
        self._encoding = Encoding(self.history.space)
        self._forget()
        self._learn([])

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher."""
        return self.history.ask(n, self._screened)

    def _screened(self, rng: RandomState) -> Suggestion | None:
        """The candidate that looks best; None while too little is known, or if none is new."""
        if not self._begun or not self._ranked:  # all that were at a rung may have failed since
            return None
        mutations = self.candidates // 2
        candidates = [self._child(rng) for _ in range(mutations)]
        fresh = self.history.space.samples(self.candidates - mutations, rng)
        candidates += [Suggestion(config) for config in fresh]
        new: dict[str, Suggestion] = {}
        for candidate in candidates:
            if candidate is not None and candidate.key not in self.history.seen:
                new.setdefault(candidate.key, candidate)
        if not new:
            return None
        self._forest.grow(self._rows, self._observed, self._told)
        rows = self._encoding.rows([candidate.config for candidate in new.values()])
        lower = self._forest.lower(rows, self._pending(), self.kappa)
        return list(new.values())[int(np.argmin(lower))]

    def _child(self, rng: RandomState) -> Suggestion | None:
        drawn = rng.choice(len(self._ranked), min(self.sample, len(self._ranked)), replace=False)
        parent = self._ranked[min(drawn)]
        config = self.history.space.mutate(parent.config, rng)
        if config is not None and rng.random_sample() < _TWICE:
            config = self.history.space.mutate(config, rng)
        return None if config is None else Suggestion(config, parent.ref, parent.number)

    def _pending(self) -> Rows:
        latest = list(self.history.pending.values())[-_PENDING:]
        return self._encoding.rows([each.config for each in latest])

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. A failed trial does not become a parent, and is ranked last."""
        self.history.tell(trials)
        valid = self.history.space.is_valid
        self._learn(
            [
                _Observed(t.config, t.losses if t.scored else (), t.ref, t.number, t.reach)
                for t in trials
                if valid(t.config)
            ]
        )

    def _forget(self) -> None:
        self._observed: list[_Observed] = []
        self._living: list[_Observed] = []
        self._told = 0
        self._rows = self._encoding.rows([])
        self._forest = Forest(self.history.seed)
        self._scored: set[int] = set()  # numbers; complete until enough is known for a child
        self._begun = False  # it is; a larger budget changes nothing

    def _learn(self, observed: Sequence[_Observed]) -> None:
        """The forest learns from the latest; who lives is decided as in Evolution."""
        self._told += len(observed)
        self._observed = [*self._observed, *observed][-KEPT:]
        rows = self._encoding.rows([each.config for each in observed])
        self._rows = np.concatenate([self._rows, rows])[-KEPT:]
        if not self._begun:
            self._scored.update(each.number for each in observed if each.losses)
            self._begun = len(self._scored) >= self.initial
        told = {each.number: each for each in observed}  # of the same one the latest
        self._living = [each for each in self._living if each.number not in told]
        self._living += [each for each in told.values() if each.losses]
        self._living = survivors(self._living, self.population)
        self._ranked = [self._living[place] for place in ranked(self._living)]

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return {
            **self.history.state_dict(),
            "observed": [list(each) for each in self._observed],
            "living": [list(each) for each in self._living],
            "told": self._told,
            "begun": self._begun,
            "scored": sorted(self._scored),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
        self._forget()
        self._learn([_Observed(*values) for values in state_dict["observed"]])
        self._begun = state_dict.get("begun", self._begun)
        self._scored = set(state_dict.get("scored", self._scored))  # earlier versions have none
        self._told = state_dict["told"]
        self._living = [_Observed(*values) for values in state_dict["living"]]
        self._learn([])
