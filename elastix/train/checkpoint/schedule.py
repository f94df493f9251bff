"""When a State is due to be stored: the same answer on all workers. Pure, but for a clock.

Steps and reports are the same everywhere; time is not, so rank 0 says in the commit round that
it is up.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastix.config import CheckpointConfig


class Schedule:
    """One worker's.

    Attributes:
        stored_step: of the State that was last taken for storing, or the run began with.
    """

    def __init__(
        self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stored_step = 0
        self._scored_step = 0
        self._config = config
        self._clock = clock
        self._stored_s = clock()
        self._agreed = False
        self._score: tuple[int, float] | None = None  # step, and higher is better

    def stored(self, step: int) -> None:
        """A State of this step is on its way."""
        self.stored_step = step
        if self.score(step) is not None:
            self._scored_step = step
        self._stored_s = self._clock()
        self._agreed = False

    def time_is_up(self) -> bool:
        """What rank 0 says in the commit round."""
        every_s = self._config.every_s
        return every_s is not None and self._clock() - self._stored_s >= every_s

    def agreed(self, due: bool) -> None:
        """What the commit round gave."""
        self._agreed = self._agreed or due

    def reported(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`ctx.report` was called."""
        value = metrics.get(self._config.best or "")
        if isinstance(value, int | float) and not math.isnan(value):
            self._score = (step, float(value if self._config.mode == "max" else -value))

    def score(self, step: int) -> float | None:
        """Of the State of this step; None if nothing was reported for it."""
        return self._score[1] if self._score is not None and self._score[0] == step else None

    def due(self, step: int) -> str:
        """Why to store the State of `step`, at its boundary; "" for not at all."""
        if step == 0:
            return ""
        every = self._config.every_steps
        fresh = step != self.stored_step
        # A batch may take several steps, so the boundary may come after the very multiple.
        if fresh and every is not None and step // every > self.stored_step // every:
            return "every_steps"
        if fresh and self._agreed:
            return "every_s"
        return "best" if self.score(step) is not None and step != self._scored_step else ""
