"""What `fit` does on Ray once there is something left to do: a controller, and what is heard of it.

Not here: settings, and whether there is anything to do (trainer); room for workers (room).
"""

import contextlib
import logging
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastix.config import RestoreConfig
from elastix.errors import Conflict, ControllerLost, ElastixError, Interrupted, WorkerFailed
from elastix.events import Event, RunStarted
from elastix.interrupts import exit_codes_kept
from elastix.observe import journal
from elastix.observe.console import Console
from elastix.observe.excepthook import told
from elastix.observe.loggers import LoggerThread
from elastix.observe.progress import Progress
from elastix.observe.ray_death_messages import Deaths, GroupDeaths
from elastix.observe.run_lock import DRIVER_LOCK, Lock, holder
from elastix.observe.timeline import merge
from elastix.store import Store
from elastix.train.on_ray import takeover
from elastix.train.on_ray.actor_classes import as_actor
from elastix.train.on_ray.controller import Controller, Followed, RunRequest
from elastix.train.on_ray.crew_controller import CrewController
from elastix.train.on_ray.driver_view import DriverView, ask_to_stop, is_over
from elastix.train.on_ray.find_ray import hold_ray, let_go_of_ray
from elastix.train.on_ray.pickled_train import pickle_train
from elastix.train.on_ray.room import check_capacity, give_back, reserve
from elastix.train.on_ray.run_settings import RunSettings, TrainFunction, Watch
from elastix.train.record.finished import history, same
from elastix.train.record.pickled_function import TRAIN, digest, keep_code
from elastix.train.record.provenance import origin, versions
from elastix.train.record.result import Result
from elastix.train.replica.profiler import FOLDER

logger = logging.getLogger(__name__)
_HEARD_S = 300.0  # a controller that has died is started anew by Ray
_HEARS_S = 10.0  # another driver that its run has ended
_NO_STEP = (
    "run %r took no step: it had come to the end of its epochs before, when it was called with "
    "another config, seed or train function. What is new here has trained nothing. Choose another "
    "name to train with it from the beginning, or more epochs to go on."
)


class Launch:
    """One `fit`, to its end.

    Args:
        train: the train function.
        asked: how it is to run.
        opening: what the journal is to say of it, without origin and versions.

    Raises:
        ConfigError: the train function cannot be pickled.
    """

    def __init__(self, train: TrainFunction, asked: RunSettings, opening: RunStarted) -> None:
        self._train = pickle_train(train)
        self._asked = asked
        self._opening = opening
        self._directory = asked.directory
        self._id = run_id(asked)
        self._owns = False

    def fit(self) -> Result:
        """See ElasticTrainer.fit."""
        with contextlib.ExitStack() as held:
            refusal: Conflict | None = None
            try:
                self._own(held)
            except Conflict as conflict:
                if not self._asked.run.detached:
                    raise
                refusal = conflict  # unless it can be attached to
            if not self._asked.run.detached and self._asked.watch is None:  # a trial's is open
                with Store(self._asked.run.store):
                    pass  # it can be written, or says why not before anything is started
            if hold_ray():
                held.callback(let_go_of_ray)
            controller = self._attach()
            if controller is not None:
                going_on = history(self._directory).run
                if going_on is not None and not same(going_on, self._opening):
                    logger.warning(
                        "run %r goes on as it was started, with another config, seed or train "
                        "function than this call has. stop() it first to train with these.",
                        self._asked.run.name,
                    )
                return self._follow(controller, history(self._directory, attached=True))
            if refusal is not None:
                self._own(held, _HEARS_S)  # its run has ended since, or it is refused once more
            avoided = self._asked.avoided
            most = check_capacity(self._asked.scaling, avoided)
            takeover.sweep(self._id)
            self._directory.mkdir(parents=True, exist_ok=True)
            keep_code(self._directory / TRAIN, self._train)
            lifetime: Literal["detached"] | None = "detached" if self._asked.run.detached else None
            timeout_s = self._asked.failure.start_timeout_s
            groups, size = reserve(
                self._id, self._asked.scaling, most, timeout_s, lifetime, avoided
            )
            try:
                before = history(self._directory)
                using = {**versions(), "ray": ray.__version__}
                opening = replace(self._opening, origin=origin(), versions=using)
                controller = self._start(opening, groups, size)
                through = before.step if self._was_another(before) else None
                result = self._follow(controller, before)
                if before.step == through:
                    logger.warning(_NO_STEP, self._asked.run.name)
                return result
            finally:
                # Ctrl-C may have come once the controller was there, and before it was known here.
                if not self._asked.run.detached or (
                    controller is None and takeover.find_controller(self._id) is None
                ):
                    give_back(groups)

    def _was_another(self, before: Progress) -> bool:
        """Whether this name is of a run that has ended well and was called with something else.

        A RestoreConfig asks for steps that were taken before; a trial takes those it is told to.
        """
        asked, run = self._asked, before.run
        if asked.watch is not None or asked.restore != RestoreConfig() or run is None:
            return False
        return before.outcome == "finished" and not same(run, self._opening)

    def _own(self, held: contextlib.ExitStack, patience_s: float = 0.0) -> None:
        """Make this the one process that trains the run, as long as `held` is.

        Whoever writes the journal has a lock as well (observe.journal), so a detached run is owned
        when its driver has gone. The controller of one that is not detached dies with its driver,
        and whoever comes next waits for that.

        Raises:
            Conflict: another process is at this run; names it.
        """
        what = f"run {self._asked.run.name!r} of this store is being trained"
        if not self._owns:
            # A trial has one owner at a time.
            patience_s = takeover.LET_GO_S if self._asked.watch else patience_s
            lock = Lock(self._directory / DRIVER_LOCK, what, patience_s=patience_s)
            held.enter_context(lock)
            self._owns = True
        writer = holder(journal.lock_of(self._directory / "journal.jsonl"))
        if writer is not None and writer.stays:
            raise Conflict(
                f"{what}, detached, by {writer}. Nothing was started. Attach to it with "
                "RunConfig(detached=True), stop it, or choose another name."
            )

    def _attach(self) -> Any | None:  # noqa: ANN401 - a handle
        """The controller of this run, if it is detached and going on.

        One whose run is over stays for some seconds, to tell whoever follows it how that ended. Who
        comes now would take that for the outcome of what it has asked for itself. So would who
        comes while it is being stopped, and waits.
        """
        if not self._asked.run.detached:
            return None
        controller = takeover.find_controller(self._id)
        if controller is None or is_over(controller):
            return None
        logger.info("attached run=%s", self._asked.run.name)
        return controller

    def _start(
        self,
        opening: RunStarted,
        groups: tuple[PlacementGroup, ...],
        size: int,
    ) -> Any:  # noqa: ANN401 - a handle
        """Start the controller; it starts the workers."""
        plan = RunRequest(
            code=digest(self._train),
            config=self._asked.config,
            scaling=self._asked.scaling,
            run=replace(self._asked.run, store=str(self._directory.parents[1])),
            checkpoint=self._asked.checkpoint,
            restore=self._asked.restore,
            failure=self._asked.failure,
            exchange=self._asked.exchange,
            profile=self._asked.profile,
            metrics=self._asked.metrics,
            opening=opening,
            placement=groups,
            size=size,
            directory=self._directory,
            model_source=self._asked.model_source,
            until_reports=self._asked.until_reports,
            order_seed=self._asked.order_seed,
            avoided=self._asked.avoided,
        )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        lead = CrewController if self._asked.scaling.crew else Controller
        options: dict[str, Any] = {"lifetime": "detached"} if self._asked.run.detached else {}
        return (
            as_actor(lead, workers=4, store=4, driver=3)
            .options(
                num_cpus=0,
                scheduling_strategy=here,
                name=takeover.controller_name(plan.run_id),
                namespace=takeover.NAMESPACE,
                max_restarts=-1,
                **options,
            )
            .remote(plan)
        )

    def _listen(self, feed: LoggerThread, deaths: Deaths) -> Watch:
        """What hears of events beside the console."""
        group = GroupDeaths(deaths)

        def watch(events: Sequence[Event]) -> None:
            for event in events:
                feed.show(event)
                group.hear(event)
            if self._asked.watch is not None:
                self._asked.watch(events)

        return watch

    def _follow(self, controller: Any, before: Progress) -> Result:  # noqa: ANN401
        """Show what happens until the run is over, and say how it ended."""
        detached = self._asked.run.detached
        feed, guard = LoggerThread(self._asked.loggers), self._asked.failure.guard
        with (
            Deaths() as deaths,
            Console(
                self._asked.run.name,
                self._asked.run.store,
                quiet=self._asked.quiet,
                progress=before,
                best=self._asked.checkpoint.best,
                judged=guard.metric if guard is not None else None,
            ) as console,
        ):
            view = DriverView(controller, console, self._listen(feed, deaths))
            try:
                with exit_codes_kept():
                    ended = view.follow()
            except (KeyboardInterrupt, SystemExit) as asked:  # Ctrl-C or SIGTERM
                stopped: Followed | None = None
                if not detached:
                    with contextlib.suppress(KeyboardInterrupt):  # once more: it is not waited for
                        stopped = view.stop(_reason(asked))
                if stopped is None:
                    console.interrupted(goes_on=detached)
                elif stopped.error is not None:  # Interrupted, or it has failed meanwhile
                    self._tell(console, stopped.error)
                else:
                    self._finish(console, stopped)
                asked.__context__ = None
                raise told(asked) from None
            finally:
                if not detached:
                    ray.kill(controller)
                feed.close()
                if self._asked.profile is not None:
                    merge(self._directory / FOLDER, journal.read(self._directory / "journal.jsonl"))
            if ended.error is not None:
                self._tell(console, ended.error)
                raise ended.error if self._asked.quiet else told(ended.error)
            return self._finish(console, ended)

    def _tell(self, console: Console, error: ElastixError) -> None:
        """Say what has ended the run early."""
        if isinstance(error, Interrupted):
            console.interrupted()
            return
        console.failed(error)
        if isinstance(error, WorkerFailed):
            error.shown = not self._asked.quiet

    def _finish(self, console: Console, ended: Followed) -> Result:
        """Say what has come of the run."""
        result = Result.of(self._directory, ended.losses)
        console.finished(result.ref, result.metrics, result.audit)
        return result


def _reason(asked: KeyboardInterrupt | SystemExit) -> str:
    """What ends the run, for its journal. A handler of SIGTERM raises SystemExit."""
    if isinstance(asked, KeyboardInterrupt):
        return "Ctrl-C"
    by_signal = asked.code in (signal.SIGTERM, 128 + signal.SIGTERM)  # Ray's handler, and ours
    return "SIGTERM" if by_signal else f"the program ended ({asked.code})"


def run_id(asked: RunSettings) -> str:
    """See takeover.run_id."""
    return takeover.run_id(str(asked.directory.parents[1]), asked.run.name)


def end(asked: RunSettings) -> None:
    """See ElasticTrainer.stop."""
    controller = takeover.find_controller(run_id(asked))
    if controller is None:
        return
    try:
        heard = ask_to_stop(controller, "stopped", _HEARD_S)
    except ray.exceptions.ActorDiedError:
        return
    if not heard:
        raise ControllerLost(
            f"the controller of run {asked.run.name!r} did not answer within {_HEARD_S:.0f} s, and "
            "may not have heard that it is to stop. Call stop() again, and look at Ray's logs for "
            "why it does not answer."
        )
