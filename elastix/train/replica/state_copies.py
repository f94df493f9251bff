"""Copies of a worker's State, made while its train function goes on: for the store and for joiners.

What only an optimizer's step changes is copied late (TrackedObjects.late), until `finish` is
called; everything else at once. Not here: how a copy is made (checkpoint.snapshot), when one is due
(checkpoint.schedule), and who stores it (checkpoint.saver).

Invariant: a copy that was torn is never used, and from then on everything is copied at once.
"""

import logging
from collections.abc import Callable, Collection

from elastix.errors import StateError
from elastix.state import State
from elastix.train.checkpoint.assembly import CheckpointId
from elastix.train.checkpoint.saver import Occasion, Saver
from elastix.train.checkpoint.snapshot import Snapshot, Stager
from elastix.train.replica.tracked_objects import TrackedObjects

logger = logging.getLogger(__name__)


class StateCopies:
    """One worker's. For the training thread.

    Args:
        tracked: the worker's objects.
        saver: has copies stored.
    """

    def __init__(self, tracked: TrackedObjects, saver: Saver) -> None:
        self._tracked = tracked
        self._saver = saver
        self._given: Snapshot | None = None
        self._overlaps = True
        self._left: CheckpointId | None = None  # to a shadow

    @property
    def busy(self) -> bool:
        """Whether the next `save` would have to wait for the one before."""
        return self._saver.busy

    @property
    def left_undone(self) -> bool:
        """Whether a State was left to a shadow, and is neither stored nor given up yet."""
        return self._left is not None and not self._saver.heard(self._left)

    def leave(self, mark: CheckpointId) -> None:
        """A shadow stores this one."""
        self._left = mark
        self._saver.listen()

    def save(self, state: State, occasion: Occasion) -> None:
        """Have `state`, views of live tensors, compared and stored; see Saver."""
        if occasion.stored:
            self._left = None
        self._saver.save(state, occasion, self._late(state))

    def give(self, state: State, step: int) -> Callable[[], State]:
        """Copy `state`, views of live tensors, for joiners.

        Returns:
            Gives the copy, from any thread, when it is complete. Raises StateError if it was torn.
        """
        self._given = given = Stager().take(state, step, self._late(state))

        def complete() -> State:
            given.finish()
            if given.torn:
                raise StateError(f"the State cannot be given to a joiner: {given.torn}.")
            return given.state

        return complete

    def _late(self, state: State) -> Collection[str]:
        """What may be copied while the train function goes on."""
        return self._tracked.late(state) if self._overlaps else ()

    def finish(self) -> None:
        """The train function may change what is being captured, from here on."""
        torn = self._saver.finish()
        if self._given is not None:
            self._given.finish()
            torn = torn or self._given.torn
            self._given = None
        if torn and self._overlaps:
            self._overlaps = False
            logger.warning(
                "a snapshot cannot be used: %s. Something changes parameters between the start "
                "of a step and its backward. From now on States are copied at once.",
                torn,
            )
