"""Loggers that a user hands to ElasticTrainer or Campaign: readers of events, beside the run.

A Logger has two methods. LoggerThread calls them in a thread of its own, so a slow one holds up
nothing, and drops one that raises: a run does not fail for its diary. Records turns events into
what trackers of experiments keep; those stand in tensorboard, mlflow and wandb. Pure.
"""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    Event,
    GenerationFormed,
    Recovered,
    ReplicasDiverged,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
    StepVoided,
    StoreMeasured,
    TrialEnded,
    TrialReported,
    TrialStarted,
    WorkerJoined,
    WorkerLost,
    WorkersMeasured,
)

_log = logging.getLogger(__name__)
_WHOLE = -1  # the record of the run or the campaign itself, beside those of trials


class Logger(Protocol):
    """Writes events down somewhere. Its methods are called in one thread."""

    def log(self, event: Event) -> None:
        """Take note of an event; the first is RunStarted or CampaignStarted. May block."""
        ...

    def close(self) -> None:
        """Nothing more will come: what was noted must be safe when this returns."""
        ...


class LoggerThread:
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
        self._lost = self._diverged = self._voided = self._left_out = 0

    def read(self, event: Event) -> dict[str, float]:  # noqa: C901 - a case per event
        """Curves to go on with, by name: the user's as they are, elastix's under `elastix/`."""
        match event:
            case Reported():
                self.step = max(self.step, event.step)
                return _numbers(event.metrics)
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
            case ReplicasDiverged():
                self._diverged += len(event.apart)
                return {"elastix/workers_diverged": float(self._diverged)}
            case StepVoided():
                self._voided += 1
                return {"elastix/steps_voided": float(self._voided)}
            case SamplesLeftOut():
                self._left_out += sum(stop - start for start, stop in event.spans)
                return {"elastix/samples_left_out": float(self._left_out)}
            case WorkersMeasured() if event.workers:
                return _usage(event)
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
        if self._since is None or event.t < self._since:  # the clock was set back
            self._since, self._samples = event.t, 0
            return {}
        self._samples += sum(batch.samples for batch in event.batches)
        elapsed = event.t - self._since
        if elapsed < self._every_s:
            return {}
        rate = self._samples / elapsed
        self._since, self._samples = event.t, 0
        return {"elastix/samples_per_second": rate}


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What a record begins with.

    Attributes:
        name: of the run, the trial or the campaign.
        config: what was given to the train function; of a campaign, how it searches.
        settings: elastix's own: the seed, and how the run was scaled.
        versions: of the libraries.
        campaign: of a trial; None for a run, and for the campaign itself.
    """

    name: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    campaign: str | None = None


class Record(Protocol):
    """What a tracker of experiments keeps of one run, one trial or one campaign."""

    def write(self, values: Mapping[str, float | str], step: int, t: float) -> None:
        """Add a point at `step` to each curve; t in seconds since 1970."""
        ...

    def go_back(self, step: int) -> None:
        """What was written of steps after `step` is void: the run goes on from there."""
        ...

    def end(self, outcome: str, message: str, values: Mapping[str, float]) -> None:
        """It is over, or paused. `values` are those of a trial's objectives."""
        ...


class Records(ABC):
    """The base of a Logger: a Record of each run, of each trial, and of the campaign they are in.

    A trial is a record of its own, as a run is; `ctx.report` gives its curves, its reports are
    the steps. The campaign's own record has the best value so far over the trials that ended.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._scalars = Scalars()
        self._campaign = ""
        self._ended = 0  # trials

    @abstractmethod
    def begin(self, heading: Heading) -> Record:
        """Begin a record, or go on with the one of that name."""

    def log(self, event: Event) -> None:
        """See Logger."""
        match event:
            case RunStarted():
                settings = {"seed": event.seed, "scaling": event.scaling}
                self._scalars = Scalars()
                self._begin(
                    _WHOLE,
                    Heading(
                        name=event.name,
                        config=event.config,
                        settings=settings,
                        versions=event.versions,
                    ),
                )
            case CampaignStarted():
                self._campaign, self._ended = event.name, event.known
                config = {
                    "objectives": event.objectives,
                    "searcher": event.searcher,
                    "inherit": event.inherit,
                    "budget": event.budget,
                }
                self._begin(
                    _WHOLE, Heading(name=event.name, config=config, versions=event.versions)
                )
            case TrialStarted():
                self._begin(
                    event.trial,
                    Heading(name=event.name, config=event.config, campaign=self._campaign),
                )
            case TrialReported():
                said: dict[str, float | str] = dict(_numbers(event.metrics))
                said |= _texts(event.metrics)
                self._write(event.trial, said, event.seq + 1, event.t)
            case TrialEnded():
                self._end_trial(event)
            case StoreMeasured():
                found = {"elastix/store_bytes": float(event.physical_bytes)}
                self._write(_WHOLE, found, self._ended, event.t)
            case CampaignEnded() | RunEnded():
                self._end(_WHOLE, event.outcome, event.message, {})
            case _:
                self._read(event)

    def close(self) -> None:
        """See Logger."""
        for key in tuple(self._records):
            self._end(key, "interrupted", "", {})

    def _read(self, event: Event) -> None:
        """An event of a run."""
        if isinstance(event, Resumed) and _WHOLE in self._records:
            self._records[_WHOLE].go_back(event.step)
        values: dict[str, float | str] = dict(self._scalars.read(event))
        if isinstance(event, Reported):
            values |= _texts(event.metrics)
        self._write(_WHOLE, values, self._scalars.step, event.t)

    def _end_trial(self, event: TrialEnded) -> None:
        own = {
            "elastix/epochs": event.epochs,
            "elastix/lineage_epochs": event.lineage_epochs,
            "elastix/inherited": event.inherited,
            "elastix/seconds": event.seconds,
        }
        self._write(event.trial, own, max(1, round(event.epochs)), event.t)
        self._end(event.trial, event.state, event.message, event.values)
        if event.state in ("paused", "refused"):
            return
        self._ended += 1
        if event.best:
            best = {f"best/{name}": value for name, value in event.values.items()}
            self._write(_WHOLE, best, self._ended, event.t)

    def _begin(self, key: int, heading: Heading) -> None:
        if key not in self._records:  # else it starts again: its worker was lost
            self._records[key] = self.begin(heading)

    def _write(self, key: int, values: Mapping[str, float | str], step: int, t: float) -> None:
        record = self._records.get(key)
        if record is not None and values:
            record.write(values, step, t)

    def _end(self, key: int, outcome: str, message: str, values: Mapping[str, float]) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            record.end(outcome, message, values)


def _usage(event: WorkersMeasured) -> dict[str, float]:
    """The mean over the workers, and the most memory of one."""
    rows = event.workers.values()
    memory = max(row.get("memory", 0.0) for row in rows)
    cores = sum(row.get("cpu", 0.0) for row in rows) / len(rows)
    return {"elastix/cpu_cores": cores, "elastix/memory_bytes": memory}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}


def _texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    return {name: v for name, v in metrics.items() if isinstance(v, str)}
