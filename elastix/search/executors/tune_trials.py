"""The same work as trials of Ray Tune: for people whose dashboards and storage are Tune's.

Tune has a loop of its own, so it runs in a thread and draws work from a queue as if it were asked
to search. Slower than the pool: Tune looks at its trials a few times a second. Not here: Tune's
users who want an elastix searcher (elastix.tune).
"""

import base64
import logging
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.result import AUTO_RESULT_KEYS, DEBUG_METRICS, DONE, SHOULD_CHECKPOINT
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher

from elastix.config import ScalingConfig, refuse_crew, refuse_memory
from elastix.errors import ConfigError, SearchError
from elastix.search.executors.executor import Ended, EndedKind, TrainFunction, Work, WorkReport
from elastix.search.executors.in_process import execute
from elastix.search.executors.pool_worker import interrupted, packed, sendable
from elastix.search.executors.store_access import StoreAccess
from elastix.search.model_sources import StoreOpener
from elastix.train.on_ray.find_ray import hold_ray, let_go_of_ray
from elastix.train.on_ray.given_device import given_device
from elastix.train.on_ray.pickled_train import pickle_train
from elastix.train.on_ray.room import check_capacity, fit_on_nodes
from elastix.train.record.provenance import Installation, installation, other_code

logger = logging.getLogger(__name__)

_WORK = "elastix_work"
_ENDED = "elastix_ended"
_JOIN_S = 60.0
_ENDING_S = 60.0  # that a train function may take which Tune has stopped
_OF_TUNE = frozenset((DONE, SHOULD_CHECKPOINT, *AUTO_RESULT_KEYS, *DEBUG_METRICS))
"""Results by which Tune does something: by `done` it ends the trial."""

News = WorkReport | Ended


class Tune:
    """Trials of one worker each, run by Ray Tune.

    Args:
        scaling: what a trial occupies; one worker.
        parallel: trials at once; None: as many as the cluster has room for.
        storage_path: where Tune keeps its experiment; its own default.
        name: of the experiment.
    """

    def __init__(
        self,
        *,
        scaling: ScalingConfig | None = None,
        parallel: int | None = None,
        storage_path: str | None = None,
        name: str = "elastix",
    ) -> None:
        self._scaling = scaling or ScalingConfig()
        refuse_crew(self._scaling, "trials under Ray Tune")
        refuse_memory(self._scaling, "trials under Ray Tune")
        if self._scaling.max_workers > 1:
            raise ConfigError(
                f"num_workers={self._scaling.num_workers}: under Ray Tune a trial is one worker. "
                "Nothing was started. Use the default executor for trials that are groups."
            )
        self._parallel = parallel
        self._storage = storage_path
        self._name = name
        self._thread: threading.Thread | None = None
        self._owns_ray = False
        self._access = StoreAccess()
        self._begin_anew()

    def __reduce__(self) -> tuple[Any, ...]:
        """As the call that made it: a campaign is kept with its executor, to go on with it."""
        again = partial(
            type(self),
            scaling=self._scaling,
            parallel=self._parallel,
            storage_path=self._storage,
            name=self._name,
        )
        return again, ()

    def _begin_anew(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._queue = _Queue(self._news)
        self._under_way = 0
        self._error: BaseException | None = None

    def open(self, train: TrainFunction) -> None:
        """See Executor."""
        pickled = pickle_train(train)
        self._begin_anew()  # an earlier campaign, or run of it, has closed this one
        self._owns_ray = hold_ray()
        try:
            check_capacity(self._scaling)
        except ConfigError:
            self.close()
            raise
        self._slots = self._parallel or max(1, fit_on_nodes(self._scaling))
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_trainable, train=pickled, driver=installation()),
                self._scaling.resources_per_worker,
            ),
            tune_config=tune.TuneConfig(
                search_alg=ConcurrencyLimiter(self._queue, self._slots),
                scheduler=_Halting(self._queue),
                num_samples=-1,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=self._name, storage_path=_absolute(self._storage), verbose=0
            ),
        )
        self._thread = threading.Thread(target=self._run, args=(tuner,), name="tune", daemon=True)
        self._thread.start()

    def _run(self, tuner: tune.Tuner) -> None:
        try:
            tuner.fit()
        except Exception as error:  # noqa: BLE001 - the border of the thread: poll reports it
            self._error = error

    def reach(self, store: str) -> StoreOpener:
        """See Executor."""
        return self._access.reach(store)

    @property
    def room(self) -> int:
        """See Executor."""
        return self._slots - self._under_way

    def submit(self, work: Work) -> None:
        """See Executor."""
        self._under_way += 1
        self._queue.put(work)

    def poll(self, timeout_s: float) -> Sequence[News]:
        """See Executor."""
        self._access.look()
        happened: list[News] = []
        try:
            happened.append(self._news.get(timeout=max(0.001, timeout_s)))
            while True:
                happened.append(self._news.get_nowait())
        except queue.Empty:
            pass
        self._under_way -= sum(isinstance(news, Ended) for news in happened)
        dead = self._thread is not None and not self._thread.is_alive()
        if dead and not happened:
            raise SearchError(
                f"Ray Tune ended by itself: {self._error}. The campaign was stopped; its finished "
                "trials are kept. Call run() again to go on."
            )
        return happened

    def halt(self, number: int) -> None:
        """At its next report: Tune knows no other moment."""
        self._queue.halted.add(number)

    def close(self) -> None:
        """See Executor. Waits for trials that do not report, up to a minute."""
        self._queue.finish()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        self._access.close()
        if self._owns_ray:
            self._owns_ray = False
            let_go_of_ray()


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).resolve())


def _trainable(config: Mapping[str, Any], train: bytes, driver: Installation) -> None:
    """On the worker: run the work that stands in the configuration."""
    work: Work = _unpack(config[_WORK])
    context = tune.get_context()
    stopped: list[threading.Timer] = []
    # Before it gives the process to the next trial Tune waits for this thread, for two seconds. If
    # that is not through then, Tune drops the next trial without a word to whoever waits for it.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = f"{2 * _ENDING_S:.0f}"

    def tell(progress: WorkReport) -> None:
        if stopped:
            return
        shown = {k: v for k, v in progress.metrics.items() if k not in _OF_TUNE}
        values = {k: v for k, v in shown.items() if isinstance(v, int | float)}
        try:
            tune.report({**values, "elastix_seq": progress.seq, "elastix_all": _pack(progress)})
        except SystemExit:  # by which Tune stops it
            stopped.append(threading.Timer(_ENDING_S, os._exit, (1,)))
            stopped[-1].daemon = True
            stopped[-1].start()
            raise

    worker = f"tune trial {context.get_trial_id()}"
    refused = other_code(driver, installation(), f"host {socket.gethostname()} (of {worker})")
    if refused is None:
        function = interrupted(ray.cloudpickle.loads(train))
        ended = execute(
            function,
            work,
            worker=worker,
            tell=tell,
            device=given_device(),
            halted=lambda: bool(stopped),
        )
        ended = sendable(ended)
    else:
        kind, why = EndedKind.RAISED, str(refused)
        ended = Ended(number=work.number, kind=kind, error=refused, summary=why, worker=worker)
    for timer in stopped:
        timer.cancel()
    try:
        if stopped:  # nobody hears anything of it
            raise SystemExit(0)
        tune.report({_ENDED: _pack(ended), "elastix_seq": -1})
    finally:
        if ended.spent:  # Tune has heard of it, and would give this process its next trial
            logger.warning("%s ends its process, for which its GPU does nothing any more", worker)
            os._exit(1)


def _pack(value: Work | News) -> str:
    return base64.b64encode(packed(value)).decode()


def _unpack(text: str) -> Any:  # noqa: ANN401 - ours
    return pickle.loads(base64.b64decode(text))


class _Queue(Searcher):
    """What Tune takes for a searcher. Its methods are called in Tune's thread."""

    def __init__(self, news: "queue.SimpleQueue[News]") -> None:
        super().__init__(metric="elastix_seq", mode="max")
        self.halted: set[int] = set()
        self._news = news
        self._waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._works: dict[str, Work] = {}
        self._told: dict[str, dict[int, Mapping[str, Any]]] = {}
        self._finished = False

    def __deepcopy__(self, memo: object) -> "_Queue":
        """Tune copies its searcher; there is one queue."""
        return self

    def __reduce__(self) -> tuple[type[Searcher], tuple[str, str]]:
        """Tune keeps its searcher on disk, to restore an experiment; the campaign does that."""
        return Searcher, ("elastix_seq", "max")

    def put(self, work: Work) -> None:
        self.halted.discard(work.number)  # it was meant for a run that had just ended
        self._waiting.put(work)

    def finish(self) -> None:
        self._finished = True

    def number(self, trial: str) -> int | None:
        """Of the work that a trial of Tune's runs."""
        work = self._works.get(trial)
        return work.number if work else None

    @property
    def finished(self) -> bool:
        return self._finished

    def suggest(self, trial_id: str) -> Any:  # noqa: ANN401 - a mapping, or Tune's FINISHED
        if self._finished:
            return Searcher.FINISHED
        try:
            work = self._waiting.get_nowait()
        except queue.Empty:
            time.sleep(0.001)  # Tune asks again at once
            return None
        self._works[trial_id] = work
        return {_WORK: _pack(work), **{str(k): v for k, v in work.config.items()}}

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        if trial_id in self._works:
            self._hear(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        if trial_id in self._works and not self._hear(trial_id, result or {}):
            work = self._works.pop(trial_id)
            halted = work.number in self.halted and not error
            self.halted.discard(work.number)
            told = self._told.pop(trial_id, {})
            results = told if halted else {}
            self._news.put(
                Ended(
                    number=work.number,
                    kind=EndedKind.HALTED if halted else EndedKind.LOST,
                    results=results,
                    epochs=1.0 + max(results, default=-1),  # one a report, as far as is known
                    summary="Tune gave no result",
                    worker=f"tune trial {trial_id}",
                )
            )

    def _hear(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Pass on what a result holds; whether that was the end."""
        if _ENDED in result:
            self.halted.discard(self._works.pop(trial_id).number)
            self._told.pop(trial_id, None)
            self._news.put(_unpack(result[_ENDED]))
            return True
        if "elastix_all" in result:
            progress: WorkReport = _unpack(result["elastix_all"])
            told = self._told.setdefault(trial_id, {})
            if progress.seq not in told:  # Tune gives the last result again at the end
                told[progress.seq] = progress.metrics
                self._news.put(progress)
        return False

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the campaign keeps the database."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """See save."""


class _Halting(FIFOScheduler):
    """Stops trials whose work is to be halted."""

    def __init__(self, works: _Queue) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._works = works

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:  # noqa: ANN401
        del tune_controller
        number = self._works.number(trial.trial_id)
        if _ENDED in result:  # it ends by itself, and so does its process if that is spent
            return str(TrialScheduler.CONTINUE)
        if self._works.finished or number in self._works.halted:
            return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE)
