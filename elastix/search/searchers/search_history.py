"""What a searcher has proposed and been told, so that nothing is proposed twice.

Pure. Every searcher has one; none inherits from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.random import RandomState

from elastix.errors import SearchError
from elastix.search.config_values import generator
from elastix.search.space import Space, as_space
from elastix.search.trial import Config, Suggestion, Trial, config_key

_TRIES = 100


@dataclass
class SearchHistory:
    """Keys of all configurations that were proposed or told, and the pending suggestions.

    Attributes:
        space: the search space.
        seed: the seed of all random choices. The k-th proposal has a random generator of its own,
            so a saved state only needs the count.
        objectives: the number of losses of a trial.
    """

    space: Space
    seed: int = 0
    objectives: int = 1
    count: int = 0
    seen: set[str] = field(default_factory=set)
    pending: dict[str, Suggestion] = field(default_factory=dict)

    @classmethod
    def begin(cls, space: Any, objectives: int, seed: int) -> "SearchHistory":  # noqa: ANN401 - checked
        """An empty history of a space, which may also be a plain ConfigurationSpace."""
        return cls(as_space(space), seed, objectives)

    def rng(self) -> RandomState:
        """The random generator for the next proposal."""
        self.count += 1
        return generator(self.seed, self.count)

    def is_new(self, config: Config) -> bool:
        """Whether the configuration was neither proposed nor told before."""
        return config_key(config) not in self.seen

    def ask(
        self, n: int, make: Callable[[RandomState], Suggestion | None] = lambda rng: None
    ) -> list[Suggestion]:
        """Up to `n` suggestions, which are pending from now on; fewer if the space is exhausted.

        Args:
            n: how many.
            make: makes the next one with the given generator; None asks for a random one.
        """
        found: list[Suggestion] = []
        for _ in range(n):
            rng = self.rng()
            suggestion = make(rng)
            if suggestion is None:
                config = self.fresh(rng)
                if config is None:
                    break
                suggestion = Suggestion(config)
            found.append(self.propose(suggestion))
        return found

    def propose(self, suggestion: Suggestion) -> Suggestion:
        """Remember a suggestion as pending."""
        self.seen.add(suggestion.key)
        self.pending[suggestion.key] = suggestion
        return suggestion

    def tell(self, trials: Sequence[Trial]) -> None:
        """Remember trials; they are no longer pending.

        Raises:
            SearchError: a trial's number of losses is not the number of objectives.
        """
        for trial in trials:
            if trial.scored and len(trial.losses) != self.objectives:
                raise SearchError(
                    f"trial {trial.number} has {len(trial.losses)} losses, the searcher was "
                    f"started for {self.objectives}. It was not learned from."
                )
            self.seen.add(trial.suggestion.key)
            self.pending.pop(trial.suggestion.key, None)

    def fresh(self, rng: RandomState) -> Config | None:
        """A random new configuration; None if the space is exhausted.

        If the space's distributions keep giving known configurations, because nearly all of their
        weight is on a few, it is drawn uniformly instead.
        """
        for turn in range(2 * _TRIES):
            config = self.space.sample(rng, evenly=turn >= _TRIES)
            if self.is_new(config):
                return config
        rest = list(self.space.unseen(self.seen))
        return rest[int(rng.randint(0, len(rest)))] if rest else None

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "seed": self.seed,
            "count": self.count,
            "seen": sorted(self.seen),
            "pending": [suggestion.to_json() for suggestion in self.pending.values()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse."""
        self.seed, self.count = state_dict["seed"], state_dict["count"]
        self.seen = set(state_dict["seen"])
        pending = [Suggestion(**values) for values in state_dict["pending"]]
        self.pending = {suggestion.key: suggestion for suggestion in pending}


class HistoryOnceStarted:
    """The SearchHistory of a searcher, which exists from `start` on.

    A descriptor: asking for it earlier is the caller's mistake and says so.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, searcher: object, owner: type) -> SearchHistory:
        history = getattr(searcher, self._name, None)
        if history is None:
            raise SearchError(
                f"this {owner.__name__} has no space yet. Nothing was done. Call "
                "start(space, objectives=..., seed=...) first."
            )
        return history  # type: ignore[no-any-return]

    def __set__(self, searcher: object, history: SearchHistory) -> None:
        setattr(searcher, self._name, history)
