"""A random forest that predicts the rank of a configuration; the surrogate of screened.py.

Pure: the forest is a function of the seed and of the observations in order, so it is never saved.
Most of the cost of an `ask` is growing it. Two things limit that cost: a tree is grown from at most
`_DRAWS` observations, and after each observation only a quarter of the trees is grown again; the
others are one to three observations old.

The encoding: numbers are scaled to 0..1 (logarithmically if the space says so), unordered choices
are one-hot, and inactive hyperparameters are -1.

Source: Geurts et al., Extremely randomized trees, 2006.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from ConfigSpace import Constant
from ConfigSpace.hyperparameters import CategoricalHyperparameter
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray

from elastix.search.config_values import choices
from elastix.search.pareto import Losses
from elastix.search.space import Space
from elastix.search.trial import Config

Rows = NDArray[np.float32]

_TREES = 60
_EVERY = 4
_DRAWS = 256
_SPAN = 1000

KEPT = _SPAN + _EVERY
"""How many of the latest observations a forest can be asked to learn from."""


class ObservedTrial(Protocol):
    """What came of a trial."""

    @property
    def losses(self) -> Losses:
        """Empty: it failed, and is ranked last."""
        ...

    @property
    def number(self) -> int:
        """Which trial it is."""
        ...

    @property
    def reach(self) -> int | None:
        """How far it has come; see Trial.reach."""
        ...


class Encoding:
    """Encodes configurations of a space as rows of numbers."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._parameters = {n: h for n, h in space.flat.items() if not isinstance(h, Constant)}
        self._places = {
            name: {choice: place for place, choice in enumerate(listed)}
            for name, parameter in self._parameters.items()
            if (listed := choices(parameter)) is not None
        }

    def rows(self, configs: Sequence[Config]) -> Rows:
        """One row per configuration; all rows have the same width."""
        flats = [self._space.to_flat(config) for config in configs]
        columns: list[NDArray[Any]] = []
        for name, parameter in self._parameters.items():
            active = [i for i, flat in enumerate(flats) if name in flat]
            found = [flats[i][name] for i in active]
            places = self._places.get(name)
            column = np.full(len(flats), -1.0)
            if found:
                column[active] = (
                    parameter.to_vector(np.array(found))
                    if places is None
                    else [places[value] for value in found]
                )
            if isinstance(parameter, CategoricalHyperparameter) and len(parameter.choices) > 2:
                columns += [column == place for place in range(len(parameter.choices))]
            else:
                columns.append(column)
        if not columns:
            return np.zeros((len(flats), 1), dtype=np.float32)
        return np.column_stack(columns).astype(np.float32)


class Forest:
    """Predicts the rank of a configuration among those observed, from 0 (best) to 1 (worst)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._trees: list[tuple[int, Any]] = [(0, None)] * _TREES  # observations, tree

    def grow(self, rows: Rows, observed: Sequence[ObservedTrial], count: int) -> None:
        """Grow a quarter of the trees from the latest observations.

        Args:
            rows: encoded configurations: the last `KEPT`, or all if there are fewer.
            observed: what came of each. A trial that is there more than once counts as it was last.
            count: the number of all observations so far, at least one.
        """
        import sklearn  # half a second to import
        from sklearn.tree import ExtraTreeRegressor

        gone = count - len(observed)
        known_at: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        with sklearn.config_context(skip_parameter_validation=True):
            for number, (known, _) in enumerate(self._trees):
                until = max(1, count - (count - number) % _EVERY)
                if known == until:
                    continue
                if until not in known_at:
                    span = range(max(0, until - gone - _SPAN), until - gone)
                    latest = sorted({observed[place].number: place for place in span}.values())
                    found = [observed[place] for place in latest]
                    target = ranks([each.losses for each in found], [each.reach for each in found])
                    known_at[until] = np.array(latest), target
                latest_places, target = known_at[until]
                rng = RandomState(MT19937(SeedSequence([self._seed, until, number + 1])))
                draws = rng.randint(0, len(target), min(len(target), _DRAWS))
                tree = ExtraTreeRegressor(random_state=rng)
                tree.fit(rows[latest_places[draws]], target[draws], check_input=False)
                self._trees[number] = until, tree.tree_

    def lower(self, rows: Rows, pending: Rows, kappa: float) -> NDArray[np.float64]:
        """Lower confidence bound: the mean over the trees minus `kappa` standard deviations.

        A tree in which a pending configuration falls into the same leaf has nothing new to learn
        there, so the deviation is multiplied by the fraction of the other trees.
        """
        values = np.empty((_TREES, len(rows)))
        known = np.zeros(len(rows))
        for number, (_, tree) in enumerate(self._trees):
            leaves = tree.apply(rows)
            values[number] = tree.value[leaves, 0, 0]
            if len(pending):
                known += np.isin(leaves, tree.apply(pending))
        lower: NDArray[np.float64] = values.mean(0) - kappa * values.std(0) * (1 - known / _TREES)
        return lower


def ranks(
    losses: Sequence[Losses], reach: Sequence[int | None] | None = None
) -> NDArray[np.float64]:
    """What fraction of the others is better than each: 0 for the best, 1 for failed trials.

    With several losses, the fraction that dominates it. Whoever has come further is better than all
    that have not; see pareto.furthest.

    Source: Fonseca & Fleming, Genetic algorithms for multiobjective optimization, 1993.
    """
    beaten = np.full(len(losses), float(len(losses)))
    further = 0
    reached = [-1 if each is None else each for each in reach or [None] * len(losses)]
    for group in sorted(set(reached), key=lambda each: (each >= 0, -each)):  # -1: to the end
        here = [p for p, each in enumerate(losses) if each and reached[p] == group]
        if not here:
            continue
        values = np.array([losses[place] for place in here])
        if values.shape[1] == 1:
            beaten[here] = further + np.searchsorted(np.sort(values[:, 0]), values[:, 0])
        else:
            never_worse = np.all(values[:, None] <= values[None], axis=2)
            beaten[here] = further + (never_worse & ~never_worse.T).sum(axis=0)
        further += len(here)
    return beaten / len(losses)
