"""The samples that a step is about: what all loaders drew for it, or for the last step that drew.

A batch may be good for several steps: a critic's and a generator's, the epochs of PPO, the closures
of LBFGS. All of them are weighed by the shares of that batch. Pure; the loaders draw, and the owner
says when a step counts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from elastix.data.loader import Loader


class Window:
    """One for all loaders: batches of several loaders that were drawn for one step count together.

    It is part of the State, since a worker may join between two steps on one batch.
    """

    def __init__(self) -> None:
        self._last: Counter[int] = Counter()

    def shares(self, loaders: Sequence[Loader]) -> Counter[int]:
        """Samples of each worker in the step in hand; none if no loader ever drew."""
        return _drawn(loaders) or self._last

    def close(self, loaders: Sequence[Loader]) -> None:
        """The step counts. Call it before the loaders commit."""
        self._last = self.shares(loaders)

    def forget(self) -> None:
        """The workers that drew are not those of now."""
        self._last = Counter()

    def state_dict(self) -> dict[str, Any]:
        """The shares by worker."""
        return {str(worker): samples for worker, samples in self._last.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As it was."""
        self._last = Counter({int(worker): samples for worker, samples in state_dict.items()})


def _drawn(loaders: Sequence[Loader]) -> Counter[int]:
    drawn: Counter[int] = Counter()
    for loader in loaders:
        drawn.update(loader.shares())
    return drawn
