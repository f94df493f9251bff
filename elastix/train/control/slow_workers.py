"""Which findings of slow workers are worth a line: those that last, and not over and over. Pure."""

from collections.abc import Mapping

_AGAIN_STEPS = 20  # a finding covers as many: found once more after them it is no accident
_SLOWER = 1.25  # times what was told last: worth another line
_QUIET_S = 60.0  # between two lines on one worker


class SlowNews:
    """Remembers since when workers are slow, and what was told of them."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}  # worker to the step at which it was found first
        self._told: dict[int, tuple[float, float]] = {}  # worker to factor and time

    def worth_telling(self, found: Mapping[int, float], step: int, now: float) -> dict[int, float]:
        """Of the workers that are slow at `step`, those to be told of, with their factors."""
        self._since = {worker: self._since.get(worker, step) for worker in found}
        news = {}
        for worker, factor in found.items():
            before, when = self._told.get(worker, (0.0, -_QUIET_S))
            lasts = step - self._since[worker] >= _AGAIN_STEPS
            if lasts and factor >= _SLOWER * before and now - when >= _QUIET_S:
                news[worker] = factor
                self._told[worker] = (factor, now)
        return news
