"""A run is to end before its train function is through: when it does. Pure.

The State is stored first, so that nothing has to be computed again. Whoever interrupts a run does
not wait for ever, so this may take only so long; schedulers kill half a minute after SIGTERM.
"""

STORE_S = 20.0


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
        self._until = float("inf")

    def ask(self, reason: str, step: int, now: float) -> None:
        """Interrupt the run after `step`, once its State is stored; asked again, at once."""
        self.over = bool(self.reason)
        if not self.reason:
            self.reason, self._from_step, self._until = reason, step, now + STORE_S

    def stored(self, step: int, reason: str) -> None:
        """The State after `step` is stored, or could not be, for that reason.

        The final State does not end the run, whose train function is about to return. Nor does one
        that is kept for its score alone, which another one may have dropped by now.
        """
        if self.reason and step >= self._from_step and reason not in ("final", "best"):
            self.over = True

    def look(self, now: float, *, held: bool) -> None:
        """Time has passed. `held`: somebody has the State."""
        if self.reason and not (held and now < self._until):
            self.over = True
