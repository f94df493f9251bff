"""Loggers that a user hands to ElasticTrainer: readers of events, beside the run.

A Logger has two methods. The Feed calls them in a thread of its own, so that a slow one holds up
nothing, and drops one that raises: a run does not fail for its diary. Pure; the loggers
themselves stand in tensorboard, mlflow and wandb.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from elastix.events import (
    Event,
    GenerationFormed,
    Recovered,
    Reported,
    Resumed,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLost,
)

_log = logging.getLogger(__name__)


class Logger(Protocol):
    """Writes a run's events down somewhere. Its methods are called in one thread."""

    def log(self, event: Event) -> None:
        """Take note of an event; the first of a run is RunStarted. May block."""
        ...

    def close(self) -> None:
        """Nothing more will come: what was noted must be safe when this returns."""
        ...


class Feed:
    """Hands events to loggers, in order, in a thread of its own; without any it does nothing."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loggers", daemon=True)
        if self._loggers:
            self._thread.start()

    def show(self, event: Event) -> None:
        """Queue an event. Never blocks."""
        if self._loggers:
            self._events.put(event)

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait until the loggers have everything; give up on one that takes longer."""
        if not self._thread.is_alive():
            return
        self._events.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            names = ", ".join(type(logger).__name__ for logger in self._loggers)
            _log.warning(
                "loggers=%s did not end within timeout_s=%g; left behind", names, timeout_s
            )

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            for logger in tuple(self._loggers):
                self._call(logger, lambda logger=logger, event=event: logger.log(event))  # type: ignore[misc]
        for logger in tuple(self._loggers):
            self._call(logger, logger.close)

    def _call(self, logger: Logger, method: Callable[[], None]) -> None:
        try:
            method()
        except Exception as error:  # noqa: BLE001 - the border to code that may raise anything
            self._loggers.remove(logger)
            name = type(logger).__name__
            _log.warning("logger=%s raised %r; the run goes on without it", name, error)


class Scalars:
    """What of an event is a number worth a curve.

    Attributes:
        step: the last committed step, at which the numbers stand.
    """

    def __init__(self, every_s: float = 1.0) -> None:
        self.step = 0
        self._every_s = every_s
        self._since: float | None = None
        self._samples = 0
        self._lost = 0

    def read(self, event: Event) -> dict[str, float]:
        """Curves to go on with, by name: the user's as they are, elastix's under `elastix/`."""
        match event:
            case Reported():
                self.step = max(self.step, event.step)
                return {k: float(v) for k, v in event.metrics.items() if isinstance(v, int | float)}
            case StepCommitted():
                return self._commit(event)
            case Resumed():
                self.step, self._since = event.step, None
            case GenerationFormed():
                return {
                    "elastix/world_size": float(len(event.members)),
                    "elastix/generation": float(event.generation),
                }
            case WorkerLost():
                self._lost += 1
                return {"elastix/workers_lost": float(self._lost)}
            case Recovered():
                return {"elastix/recovery_s": event.stall_s}
            case WorkerJoined():
                return {"elastix/join_s": event.copy_s}
            case StateStored():
                return {
                    "elastix/checkpoint_s": event.store_s,
                    "elastix/stored_bytes": float(event.stored_bytes),
                }
        return {}

    def _commit(self, event: StepCommitted) -> dict[str, float]:
        """The rate, at most every so often: a curve of every step would cost more than it tells."""
        self.step = event.step
        if self._since is None:
            self._since, self._samples = event.t, 0
            return {}
        self._samples += sum(batch.samples for batch in event.batches)
        elapsed = event.t - self._since
        if elapsed < self._every_s:
            return {}
        rate = self._samples / elapsed
        self._since, self._samples = event.t, 0
        return {"elastix/samples_per_second": rate}
