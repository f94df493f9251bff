"""What the loop over the slices of a step changes beside gradients and buffers, where it must not.

Workers compute different slices, and some of them twice. So a scheduler that steps with each slice,
or an average that moves, comes to something else on each worker, and for any number of them.

Not here: parameters (comm.gradients.prepared_tensors).
"""

from collections.abc import Mapping

from elastix.errors import ConfigError
from elastix.state import Stateful
from elastix.train.replica.outlines import Outline, is_still, outline_of


class SliceEffects:
    """On one worker's optimizers (their options), schedulers and whatever else is tracked."""

    def __init__(self) -> None:
        self._outlines: dict[str, Outline] = {}
        self._comparable: dict[str, bool] = {}  # not if each look at the state is a copy, say

    def begin(self, others: Mapping[str, Stateful]) -> None:
        """The loop begins."""
        self._outlines = {}
        for name, other in others.items():
            if not self._comparable.get(name, True):
                continue
            outline = outline_of(name, other)
            if name not in self._comparable:
                self._comparable[name] = is_still(outline, name, other)
            if self._comparable[name]:
                self._outlines[name] = outline

    def check(self, others: Mapping[str, Stateful]) -> None:
        """All slices of this worker are computed.

        Raises:
            ConfigError: something has changed; names it.
        """
        for name, outline in self._outlines.items():
            if not is_still(outline, name, others[name]):
                raise ConfigError(
                    f"{name}, which was prepared or tracked, was changed within the loop over the "
                    "slices of a step: by a scheduler's step, say, or as a counter. Each worker "
                    "computes other slices, and some of them twice, so what that comes to depends "
                    "on who computes what. The step was not taken; the run ends. Change it after "
                    "that loop."
                )
