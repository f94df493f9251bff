"""Population based training: configurations change while models are trained.

A few trials, the members, are trained side by side and pause after every so many reports. When all
have paused, the worst of them are stopped, and each makes room for a child of one of the best: it
goes on from the very State of its parent (weights, optimizer, place in data and schedules) with a
configuration that was changed in one or two places. So the line of parents of a member is the
schedule of its hyperparameters, and the database and the store have it.

If the best loss does not fall for some selections, hyperparameters are drawn anew for all, each
on the State of one of the best, and from then on selections come half as often.

Pure: who goes on depends on the seed and on what the paused members have reported, never on which
of them came first. Nothing is kept but a few counts, so a campaign that is killed selects the same
again.

Source: Jaderberg et al., Population Based Training of Neural Networks, 2017 (truncation
selection); Chebykin et al., Iterated Population Based Training with Task-Agnostic Restarts,
arXiv 2511.09190 (restarts with a longer interval; here weights are kept as they are, and
hyperparameters are drawn from the space and not by Bayesian optimisation).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ConfigSpace import ConfigurationSpace
from numpy.random import RandomState

from elastix.arguments import checked, require
from elastix.search.pareto import Front, order
from elastix.search.searchers.search_history import HistoryOnceStarted, SearchHistory
from elastix.search.space import Space
from elastix.search.trial import Config, Selection, Suggestion, Trial

_TRIES = 20
_AGAIN = 0.5  # of the children have a second change


@checked
class Population:
    """Population based training with restarts.

    The train function calls `ctx.inherit(model)` before `prepare`, takes its batches from
    `ctx.loader`, and reports the metric every epoch or so. A member ends when the function does.
    When all have ended and the budget allows more, a population begins again at the beginning,
    with weights of the best.

    Args:
        members: how many are trained side by side. With more members than workers no worker waits
            for the slowest member.
        interval: how many reports lie between two selections, at first.
        share: of the members, which share is replaced at a selection. As many of the best become
            parents.
        patience: after so many selections without a better loss, hyperparameters are drawn anew
            and the interval doubles.

    Raises:
        ConfigError: impossible numbers.
    """

    history = HistoryOnceStarted()
    proposes_parents = True

    def __init__(
        self, members: int = 8, interval: int = 1, share: float = 0.25, patience: int = 5
    ) -> None:
        require(
            min(members, interval, patience) >= 1 and 0 <= share <= 0.5,
            f"Population(members={members!r}, interval={interval!r}, share={share!r}, "
            f"patience={patience!r}): whole numbers >= 1, and a share of 0 to 0.5. Nothing was "
            "started.",
        )
        self.members = members
        self.share = share
        self.patience = patience
        self._first_interval = interval
        self._forget()

    def _forget(self) -> None:
        self._restarts = 0
        self._stale = 0  # selections without a better loss
        self._best = Front()
        self._lost = 0  # members that failed since the last selection
        self._over: list[Trial] = []  # the latest with a score

    @property
    def interval(self) -> int:
        """See Selects."""
        return int(self._first_interval * 2**self._restarts)

    def start(
        self, space: Space | ConfigurationSpace, *, objectives: int = 1, seed: int = 0
    ) -> None:
        """See Searcher."""
        self.history = SearchHistory.begin(space, objectives, seed)
        self._forget()

    # ------------------------------------------------------------------ in a campaign

    def select(self, paused: Sequence[Trial], most: int) -> Selection:
        """See Selects."""
        ranked = [paused[place] for place in order([trial.losses for trial in paused])]
        lost, self._lost = self._lost, 0
        if not ranked:
            return Selection(children=self.ask(min(self.members, most)))
        few = self._few(len(ranked))
        parents = [trial for trial in ranked if trial.scored][: max(1, few)]
        anew = bool(parents) and most > 0 and self._stagnates(ranked)
        if anew:
            self._restarts += 1
            self._stale = 0
            few = len(ranked)

        def make(rng: RandomState) -> Suggestion | None:
            return self._on_one_of(parents, rng, anew=anew)

        children = self.history.ask(min(most, few + lost), make)
        over = ranked[len(ranked) - min(few, len(children)) :]
        return Selection(
            on=sorted({trial.number for trial in paused} - {trial.number for trial in over}),
            over=sorted(trial.number for trial in over),
            children=children,
        )

    def _few(self, members: int) -> int:
        """How many are replaced, and by children of how many."""
        return max(1, int(members * self.share)) if self.share and members > 1 else 0

    def _stagnates(self, ranked: Sequence[Trial]) -> bool:
        """Take in what is the best now; whether it has been no better for long enough."""
        better = [self._best.add(trial.losses) for trial in ranked if trial.scored]
        self._stale = 0 if any(better) else self._stale + 1
        return self._stale >= self.patience

    def _on_one_of(
        self, parents: Sequence[Trial], rng: RandomState, *, anew: bool
    ) -> Suggestion | None:
        """Another configuration on the State of one of these. The same one may be on another."""
        for _ in range(_TRIES if parents else 0):
            parent = parents[int(rng.randint(0, len(parents)))]
            config = self.history.space.sample(rng) if anew else self._changed(parent.config, rng)
            if config is None:
                continue
            child = Suggestion(config, parent.ref, parent.number, in_place=parent.ref is not None)
            if child.key not in self.history.seen and config != parent.config:
                return child
        return None

    def _changed(self, config: Config, rng: RandomState) -> Config | None:
        """In one place or two."""
        space = self.history.space
        if not space.is_valid(config):
            return None
        changed = space.mutate(config, rng)
        if changed is not None and rng.random_sample() < _AGAIN:
            return space.mutate(changed, rng) or changed
        return changed

    # ------------------------------------------------------------------ as any searcher

    def ask(self, n: int = 1) -> list[Suggestion]:
        """See Searcher. Random ones at first, then children of the best that are over."""
        return self.history.ask(n, self._after)

    def _after(self, rng: RandomState) -> Suggestion | None:
        if len(self._over) < self.members:
            return None
        ranked = [self._over[i] for i in order([trial.losses for trial in self._over])]
        for _ in range(_TRIES):
            parent = ranked[int(rng.randint(0, max(1, self._few(len(ranked)))))]
            config = self._changed(parent.config, rng)
            if config is not None and self.history.is_new(config):
                return Suggestion(config, parent.ref, parent.number)
        return None

    def tell(self, trials: Sequence[Trial]) -> None:
        """See Searcher."""
        self.history.tell(trials)
        self._lost += sum(not trial.scored for trial in trials)
        valid = self.history.space.is_valid
        self._over += [trial for trial in trials if trial.scored and valid(trial.config)]
        self._over = self._over[-2 * self.members :]

    def state_dict(self) -> dict[str, Any]:
        """See Searcher."""
        return {
            **self.history.state_dict(),
            "restarts": self._restarts,
            "stale": self._stale,
            "lost": self._lost,
            "best": [list(map(float, losses)) for losses in self._best.losses],
            "over": [trial.to_json() for trial in self._over],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See Searcher."""
        self.history.load_state_dict(state_dict)
        self._restarts, self._stale = state_dict["restarts"], state_dict["stale"]
        self._lost = state_dict["lost"]
        self._best = Front(state_dict["best"])
        self._over = [Trial.from_json(values) for values in state_dict["over"]]
