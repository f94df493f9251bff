"""The best trial of a campaign as its events tell it: by what each trial has come to last.

A trial may end several times: it pauses at rungs, and goes on, and may be worse in the end. Pure.
"""

import math
from collections.abc import Mapping

from elastix.events import CampaignStarted, TrialEnded


class BestTrial:
    """Reads CampaignStarted and TrialEnded.

    Attributes:
        event: the latest of the best trial; with several objectives, of the latest that came to be
            on the front. None as long as there is none.
    """

    def __init__(self) -> None:
        self.event: TrialEnded | None = None
        self._objectives: Mapping[str, str] = {}
        self._latest: dict[int, TrialEnded] = {}

    def begin(self, event: CampaignStarted) -> None:
        """It says what is optimised."""
        self._objectives = event.objectives

    def end(self, event: TrialEnded) -> None:
        """A trial is over, or has come to a rung."""
        before = self.event
        self._latest.pop(event.trial, None)
        self._latest[event.trial] = event
        if before is not None and before.trial == event.trial and not event.best:
            scored = [each for each in self._latest.values() if self._counts(each)]
            self.event = min(reversed(scored), key=self._loss, default=None)
        elif event.best:
            self.event = event

    def latest_of(self, trial: int) -> TrialEnded | None:
        """What was heard of it last; None if nothing was."""
        return self._latest.get(trial)

    def values_of(self, trial: int) -> Mapping[str, float]:
        """What it has come to; nothing for one without a score, or that nobody has heard of."""
        event = self._latest.get(trial)
        return event.values if event is not None else {}

    def _counts(self, event: TrialEnded) -> bool:
        """With several objectives the flag alone says who was on the front."""
        return event.state != "failed" and (event.best if self._several else bool(event.values))

    @property
    def _several(self) -> bool:
        return len(self._objectives) != 1

    def _loss(self, event: TrialEnded) -> float:
        """Equal for all where the front decides: then it is the latest of them."""
        if self._several:
            return 0.0
        ((name, mode),) = self._objectives.items()
        value = event.values.get(name, math.nan)
        loss = value if mode == "min" else -value
        return math.inf if math.isnan(loss) else loss
