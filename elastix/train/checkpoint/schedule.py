"""When a State is due to be stored or compared: the same on all workers. Pure, but for a clock.

Steps and reports are the same everywhere. Time is not, nor is who has seen whom join; of these
rank 0 says in the commit round that something is due.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from elastix.comm.protocol.inbox import Inbox
from elastix.config import CheckpointConfig
from elastix.events import comparable


class Schedule:
    """One worker's.

    Args:
        config: what the user wants.
        inbox: of the worker, which is told if all are to go: then a State is wanted soon.
        clock: seconds.

    Attributes:
        stored_step: of the State that was last taken for storing, or the run began with.
        compare: somebody has joined since replicas were compared.
        shadowed: a shadow follows, and stores what is due at this boundary.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stored_step = 0
        self.compare = False
        self.shadowed = False
        self._inbox = inbox or Inbox()
        self._scored_step = 0
        self._kept = True  # the State of `stored_step`, whatever its score
        self._config = config
        self._clock = clock
        self._stored_s = clock()
        self._agreed = False
        self._compare_agreed = False
        self._peers: frozenset[int] = frozenset()  # the group at the last boundary
        self._score: tuple[int, float] | None = None  # step, and higher is better

    def stored(self, step: int, reason: str = "") -> None:
        """A State of this step is on its way; one that is taken for its score may not be kept."""
        self._kept = reason != "best" or (self._kept and step == self.stored_step)
        self.stored_step = step
        if reason != "best":
            self._inbox.stores = False
        if self.score(step) is not None:
            self._scored_step = step
        self._stored_s = self._clock()
        self._agreed = False

    def lacks(self, step: int) -> bool:
        """Whether no State of this step was stored, but perhaps for its score."""
        return step != self.stored_step or not self._kept

    def time_is_up(self) -> bool:
        """What rank 0 says in the commit round."""
        every_s = self._config.every_s
        return self._inbox.stores or (
            every_s is not None and self._clock() - self._stored_s >= every_s
        )

    def agreed(self, store: bool, compare: bool, shadowed: bool) -> None:
        """What the commit round gave: whether to do so at the next boundary."""
        self.shadowed = shadowed
        self._agreed = self._agreed or store
        self._compare_agreed = self._compare_agreed or compare

    def grouped(self, step: int, members: Collection[int]) -> None:
        """These are the group, at the boundary of a step.

        If somebody has joined, replicas are to be compared at the next boundary but one or so. Not
        at this one: the newcomer has just been given what the others hold. Founders of a fresh run
        have nothing to compare yet.
        """
        before, self._peers = self._peers, frozenset(members)
        self.compare = self.compare or (step > 0 and bool(self._peers - before))

    def compares_now(self) -> bool:
        """Whether a comparison was agreed on since this was last asked."""
        agreed, self._compare_agreed = self._compare_agreed, False
        return agreed

    def compared(self) -> None:
        """A State is on its way with which the others' can be compared."""
        self.compare = False

    def reported(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`ctx.report` was called."""
        value = comparable(metrics.get(self._config.best or ""))
        if value is not None:
            self._score = (step, value if self._config.mode == "max" else -value)

    def score(self, step: int) -> float | None:
        """Of the State of this step; None if nothing was reported for it."""
        return self._score[1] if self._score is not None and self._score[0] == step else None

    def due(self, step: int) -> str:
        """Why to store the State of `step`, at its boundary; "" for not at all."""
        every = self._config.every_steps
        fresh = step != self.stored_step
        # A batch may take several steps, so the boundary may come after the very multiple.
        if fresh and every is not None and step // every > self.stored_step // every:
            return "every_steps"
        if fresh and self._agreed:
            return "notice" if self._inbox.stores else "every_s"
        return "best" if self.score(step) is not None and step != self._scored_step else ""
