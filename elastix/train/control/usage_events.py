"""What workers have measured of themselves, gathered into one event every few seconds. Pure."""

from collections.abc import Collection, Mapping

from elastix.events import WorkersMeasured

_EVERY_S = 5.0
_WORKERS_A_SECOND = 20  # in the journal: of very many workers there is a point less often


class Measures:
    """Keeps the latest of each worker until it is time."""

    def __init__(self) -> None:
        self._latest: dict[int, Mapping[str, float]] = {}
        self._told: float | None = None

    def hear(self, worker: int, values: Mapping[str, float]) -> None:
        """A worker has measured itself."""
        self._latest[worker] = values

    def due(self, members: Collection[int], step: int, now: float) -> WorkersMeasured | None:
        """What members have measured since the last time, if it is time and there is anything."""
        if self._told is None:
            self._told = now
        if now - self._told < max(_EVERY_S, len(members) / _WORKERS_A_SECOND):
            return None
        self._told = now
        found = {worker: v for worker, v in self._latest.items() if worker in members}
        self._latest.clear()
        return WorkersMeasured(step=step, workers=found) if found else None
