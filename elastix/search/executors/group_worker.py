"""A trial that is an elastic group of workers: a Ray actor that looks after one such run at a time.

The run is that of an ElasticTrainer, with its controller and workers; it survives its own losses
by forward recovery. Not here: what becomes of the trial when this actor dies (pool).
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import ray

from elastix.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from elastix.data.audit import Audit, audit
from elastix.errors import (
    ConfigError,
    ControllerLost,
    ElastixError,
    QuorumLost,
    StoreError,
    TooManyFailures,
    WorkerFailed,
)
from elastix.events import Event, Reported, WorkersMeasured
from elastix.observe.event_text import last_error
from elastix.observe.journal import read, read_only
from elastix.search.executors.executor import Ended, EndedKind, TrainFunction, Work
from elastix.search.executors.in_process import Findings
from elastix.search.executors.pool_worker import PoolWorker, Reports
from elastix.search.executors.trial_memory import out_of_memory
from elastix.search.model_sources import TrialModelSource
from elastix.train.on_ray.room import fit_on_nodes
from elastix.train.on_ray.trainer import ElasticTrainer

_LOOK_S = 1.0


def journal_of(work: Work, store: str) -> Path:
    """Where the run of a trial tells what happens."""
    return RunConfig(name=work.name, store=store).directory / "journal.jsonl"


class GroupWorker(PoolWorker):
    """It occupies no CPU; the workers of its groups do.

    Args:
        number, train: see PoolWorker.
        scaling, checkpoint, failure: as for ElasticTrainer.
        store: directory below which each group keeps its journal.
    """

    def __init__(
        self,
        number: int,
        train: bytes,
        scaling: ScalingConfig,
        checkpoint: CheckpointConfig,
        failure: FailureConfig,
        store: str,
    ) -> None:
        super().__init__(number, train)
        self._how = (scaling, checkpoint, failure, store)

    def _carry_out(self, work: Work, halted: Callable[[], bool], avoided: Collection[str]) -> Ended:
        train: TrainFunction = ray.cloudpickle.loads(self._train)
        scaling, _, failure, _ = self._how
        until = time.monotonic() + failure.start_timeout_s
        while not halted() and time.monotonic() < until and not _fits(scaling, avoided):
            time.sleep(_LOOK_S)  # a node is gone, and another may come
        if halted():
            return Ended(number=work.number, kind=EndedKind.HALTED)
        run = _Run(work, self._reports, halted)
        return run.carry_out(train, *self._how, worker=f"worker {self._number}", avoided=avoided)


class _Run:
    """One trial."""

    def __init__(self, work: Work, reports: Reports, halted: Callable[[], bool]) -> None:
        self._work = work
        self._found = Findings(work.number, reports.tell)
        self._halted = halted
        self._epochs = 0.0
        self._peak = 0.0
        self._began = False

    def carry_out(
        self,
        train: TrainFunction,
        scaling: ScalingConfig,
        checkpoint: CheckpointConfig,
        failure: FailureConfig,
        store: str,
        *,
        worker: str,
        avoided: Collection[str] = (),
    ) -> Ended:
        work, journal = self._work, journal_of(self._work, store)
        started_s, began = time.time(), time.monotonic()
        kind, trace = EndedKind.FINISHED, ""
        error: ElastixError | None = None
        try:
            trainer = ElasticTrainer(
                train,
                config=deepcopy(work.config),  # the model is stored with that of its source
                scaling=scaling,
                run=RunConfig(name=work.name, store=store, seed=work.seed),
                checkpoint=checkpoint,
                failure=failure,
                quiet=True,
            )
            source = work.model_source
            trial = trainer.as_trial(
                source.for_group() if isinstance(source, TrialModelSource) else source,
                work.until_reports,
                self._watch,
                order_seed=work.order_seed,
                avoided=avoided,
            )
            result = trial.fit()
            self._add_up(journal, result.audit)
            kind = EndedKind.PAUSED if self._found.reason == "paused" else EndedKind.FINISHED
        except KeyboardInterrupt:
            kind = EndedKind.HALTED
        except WorkerFailed as raised:
            starved = out_of_memory(_summary(raised))
            kind = EndedKind.STARVED if starved else EndedKind.RAISED
            trace, error = raised.traceback, raised
        except QuorumLost as raised:
            kind, error = EndedKind.LOST if self._began else EndedKind.RETURNED, raised
        except (ControllerLost, TooManyFailures) as raised:
            kind, error = EndedKind.LOST, raised
        except ConfigError as raised:
            placed = self._began or _fits(scaling, avoided)
            kind, error = EndedKind.RAISED if placed else EndedKind.RETURNED, raised
        except ElastixError as raised:
            kind, error = EndedKind.RAISED, raised
        if kind in (EndedKind.HALTED, EndedKind.RAISED):
            with suppress(StoreError):  # it may not have begun
                self._add_up(journal, audit(read(journal)))
        return Ended(
            number=work.number,
            kind=kind,
            results=self._found.results,
            ref=self._found.ref if kind in (EndedKind.FINISHED, EndedKind.PAUSED) else None,
            epochs=self._epochs,
            inherited=self._found.inherited,
            ignored=self._found.ignored,
            error=error if isinstance(error, ConfigError) or not trace else None,
            summary=_summary(error),
            traceback=trace,
            started_s=started_s,
            finished_s=started_s + time.monotonic() - began,  # clocks are set
            worker=worker,
            peak_bytes=int(self._peak),
        )

    def _add_up(self, journal: Path, account: Audit) -> None:
        """Its reports and its passes over the data, those of earlier runs of the trial as well."""
        self._found.results |= _before(journal, self._found.results)
        self._epochs = _epochs(account) or float(len(self._found.results))

    def _watch(self, events: Sequence[Event]) -> None:
        self._began = self._began or bool(events)
        for event in events:
            self._found.hear(event)
            if isinstance(event, WorkersMeasured):  # now and then, so it may miss the very peak
                held = [row.get("memory", 0.0) for row in event.workers.values()]
                self._peak = max(self._peak, *held)
        if self._halted():
            raise KeyboardInterrupt


def _fits(scaling: ScalingConfig, avoided: Collection[str]) -> bool:
    return fit_on_nodes(scaling, avoided) >= scaling.min_workers


def _before(
    journal: Path, results: Mapping[int, Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """Reports that came before these: of earlier runs of a trial that has gone on from their State.

    Of one that was made again the later counts.
    """
    first = min(results, default=None)
    if first == 0:
        return {}
    told = read_only(journal, Reported)
    return {
        event.seq: event.metrics
        for event in told
        if isinstance(event, Reported) and (first is None or event.seq < first)
    }


def _epochs(account: Audit) -> float:
    """Passes over the data of the first loader, over all parts of the run."""
    return next((loader.samples / loader.length for loader in account.loaders), 0.0)


def _summary(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, WorkerFailed):
        return last_error(error.traceback) or str(error)
    return str(error)
