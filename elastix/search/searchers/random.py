"""Random search without repeats: the baseline, and more than that if trials inherit."""

from collections.abc import Mapping, Sequence
from typing import Any

from ConfigSpace import ConfigurationSpace

from elastix.arguments import checked
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Suggestion, Trial


@checked
class Random:
    """Draws configurations from the space's distributions, none of them twice."""

    history = HistoryOnceStarted()
    proposes_parents = False

    def __init__(self) -> None:
        pass

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher."""
        self.history = SearchHistory.begin(space, objectives, seed)

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher."""
        return self.history.ask(n)

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher. The trial is no longer pending; its result is not used."""
        self.history.tell(trials)

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return self.history.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
