"""What a worker finds out of a step for the vote on it, and whether the step counts.

The sentinel's part is a digest of what the worker holds (fingerprints); the guard's are the norm of
the reduced gradient and a reported metric (guard). Both look at the steps before, which is part of
the State: a joiner must look where the others look, and judge as they do.

Not here: what travels (vote), and what follows when a step does not count (step_commits).
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from elastix.comm.gradients.reducer import Reducer
from elastix.errors import ConfigError, TrainingUnstable
from elastix.train.replica.fingerprints import Fingerprints
from elastix.train.replica.guard import Alarm, Watch, number, ordered
from elastix.train.replica.link import Settings
from elastix.train.replica.sentinel import Rotation
from elastix.train.replica.tracked_objects import TrackedObjects
from elastix.train.replica.vote import StepVerdict, judge

DONOR = "donor"
"""In the metadata of a State that a worker gives to who comes later: for whose it vouches."""


class StepChecks:
    """One worker's.

    Args:
        settings: which checks are wanted.
        tracked: the worker's objects.

    Attributes:
        fingerprints: where what workers hold is compared in every step, from `prepared` on.
    """

    def __init__(self, settings: Settings, tracked: TrackedObjects) -> None:
        self.fingerprints: Fingerprints | None = None
        self._settings = settings
        self._tracked = tracked
        self._reducer: Reducer | None = None
        self._rotation = Rotation()
        self._watch = Watch(settings.guard) if settings.guard is not None else None
        self._metric: float | None = None  # reported since the last step, and judged with the next
        self._since = time.monotonic()
        self._donor: int | None = None
        self._given = 0  # passes of the rotation before this worker had its State
        self._known: tuple[torch.Tensor, StepVerdict] | None = None  # of the step in hand

    def prepared(self, reducer: Reducer) -> None:
        """The objects are tracked, and their gradients are averaged by `reducer`."""
        self._reducer = reducer
        if self._settings.compares_steps:
            self.fingerprints = Fingerprints(
                self._tracked, lambda: reducer.kept_buffers, self._rotation
            )

    @property
    def compared_whole(self) -> bool:
        """Whether no step that counts was computed from a State that others do not hold.

        So far as workers that hold something else were found in the step in hand, and not before.
        """
        return self._rotation.whole

    def entered(self) -> None:
        """It is in the group, and compared with the others from now on."""
        self._given = self._rotation.passes

    def vouches_for(self, me: int) -> int:
        """Whose State this worker's shows to be right, or wrong: its donor's, if it may be that.

        Until all of it was compared once: one pass may have been under way as it came.
        """
        donor = self._donor
        return me if donor is None or self._rotation.passes >= self._given + 2 else donor

    def reported(self, metrics: Mapping[str, Any]) -> None:
        """`ctx.report` was called. None is no value: nothing is judged.

        Raises:
            ConfigError: what the guard is to judge is no number.
        """
        guard = self._settings.guard
        if guard is None or guard.metric is None or (value := metrics.get(guard.metric)) is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"Guard(metric={guard.metric!r}) and ctx.report({guard.metric}={value!r:.60}), "
                "which is no number that a step could be judged by. The run ends. Report a number "
                "under that name, or let the guard judge another metric."
            )
        self._metric = float(value)

    def vote(self, *, void: bool, alone: bool) -> dict[str, int]:
        """What goes into the vote on the step in hand, as fields of Vote.

        Args:
            void: it will not count in any case.
            alone: nobody holds a State that this worker's could be compared with.
        """
        return {
            "held": self._held(alone),
            "step_us": int(1e6 * (time.monotonic() - self._since)),
            **self._judged(void),
        }

    def _held(self, alone: bool) -> int:
        """Digest of the part of the State whose turn it is."""
        return 0 if self.fingerprints is None or alone else self.fingerprints.take()

    def _judged(self, void: bool) -> dict[str, int]:
        """What the guard wants to know."""
        if self._watch is None or self._reducer is None:
            return {}
        norm = None if void else self._reducer.norm()
        scaler = self._tracked.scaler
        if norm is not None and scaler is not None:  # what is not finite is its affair
            norm = norm / scaler.get_scale() if math.isfinite(norm) else None
        judged = {"norm": norm, "metric": self._metric}
        return {name: ordered(value) for name, value in judged.items() if value is not None}

    def matches(self, held: Mapping[int, int | None]) -> bool | None:
        """Whether this worker, outside of the group, holds what all in it do.

        In the step in hand, before it is taken over.

        Args:
            held: see VoteResult.

        Returns:
            None if it cannot be told.
        """
        if len(held) > 1:  # what is stored is that of one of them, nobody here knows which
            return None
        (theirs,) = held.values()
        if self.fingerprints is None or not theirs:
            return None
        return self.fingerprints.take() == theirs

    def verdict(self, result: torch.Tensor) -> StepVerdict:
        """Whether a step whose vote has this result counts, and why not. Asked twice a step."""
        if self._known is None or self._known[0] is not result:
            self._known = result, judge(result.tolist(), self._watch)
        return self._known[1]

    def over(self, verdict: StepVerdict) -> None:
        """The step of this verdict is over."""
        agreed, self._known = verdict.agreed, None
        self._metric, self._since = None, time.monotonic()
        if self.fingerprints is not None:
            self.fingerprints.over(None if verdict.void else agreed.step_us)
        if self._watch is not None and not verdict.void:
            self._watch.counted(number(agreed.norm), number(agreed.metric))

    def voided(self, step: int, alarm: Alarm, *, again: bool) -> TrainingUnstable | None:
        """The guard has voided a step; the error that ends the run if that was once too often.

        Args:
            step: the number that it would have had.
            alarm: why.
            again: see Watch.voided.
        """
        return self._watch.voided(step, alarm, again=again) if self._watch is not None else None

    def state_dict(self) -> dict[str, Any]:
        """What the checks know of the steps so far, as part of a State's metadata."""
        guard = {"guard": self._watch.state_dict()} if self._watch is not None else {}
        return {"sentinel": self._rotation.state_dict(), **guard}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """As a State's metadata have it; States of runs without a check have nothing of it."""
        self._rotation.load_state_dict(meta.get("sentinel", {}))
        self._donor = meta.get(DONOR)
        self.entered()
        if self._watch is not None:
            self._watch.load_state_dict(meta.get("guard", {}))
