"""A run is to end before its train function is through: when it does. Pure.

The State is stored first; the group trains on meanwhile, and what it computes then is computed
again. Whoever interrupts a run does not wait for ever, so this may take only so long; schedulers
kill half a minute after SIGTERM.
"""

STORE_S = 20.0
MOMENT_S = 1.0
"""What is asked twice within it is asked once: by two at the same time, or by one whose programs
each pass on the same Ctrl-C."""


class Interruption:
    """One run's.

    Attributes:
        reason: for the journal; empty while nobody has interrupted the run.
        over: the run ends now.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.over = False
        self._from_step = 0
        self._asked = 0.0
        self._failed = False

    def ask(self, reason: str, step: int, stored: int, now: float) -> None:
        """Interrupt the run after `step`, once its State is stored; asked again, at once.

        Args:
            reason: for the journal.
            step: the last committed one.
            stored: the step of the newest State that is stored; if that is the same, all is done.
            now: seconds.
        """
        if self.reason:
            self.over = self.over or now - self._asked > MOMENT_S
            return
        self.reason, self._from_step, self._asked = reason, step, now
        self.over = stored >= step

    def stored(self, step: int, reason: str) -> None:
        """The State after `step` is stored, for that reason.

        The final State does not end the run, whose train function is about to return. Nor does one
        that is kept for its score alone, which another one may have dropped by now.
        """
        if self._counts(step, reason):
            self.over = True

    def not_stored(self, step: int, reason: str) -> bool:
        """It could not be stored: whether to try once more, at a later step.

        Whoever held it may have died, or changed it while it was copied, as happens once.
        """
        if not self._counts(step, reason):
            return False
        self.over = self._failed
        self._failed = True
        return not self.over

    def _counts(self, step: int, reason: str) -> bool:
        return bool(self.reason) and step >= self._from_step and reason not in ("final", "best")

    def was_away(self, seconds: float, now: float) -> None:
        """Nobody could store anything for so long; what was asked since counts from `now`."""
        self._asked = min(self._asked + seconds, now)

    def look(self, now: float, *, held: bool) -> None:
        """Time has passed. `held`: somebody has the State."""
        if self.reason and not (held and now - self._asked < STORE_S):
            self.over = True
