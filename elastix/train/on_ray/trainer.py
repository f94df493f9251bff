"""ElasticTrainer: the driver's side of a run."""

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastix.arguments import all_able, check_train, checked, given, of_kind, plain
from elastix.config import (
    CheckpointConfig,
    ExchangeConfig,
    FailureConfig,
    ProfileConfig,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
    check_crew,
    check_exchange,
    refuse_crew,
    refuse_memory,
)
from elastix.errors import ConfigError, Conflict, QuorumLost, StoreError, WorkerFailed
from elastix.events import Event, RunStarted
from elastix.observe import journal
from elastix.observe.console import Console
from elastix.observe.excepthook import told
from elastix.observe.loggers import Logger, LoggerThread
from elastix.observe.progress import Progress
from elastix.observe.ray_death_messages import Deaths, GroupDeaths
from elastix.observe.run_lock import DRIVER_LOCK, Lock, holder
from elastix.observe.timeline import merge
from elastix.store import Store
from elastix.train.on_ray import takeover
from elastix.train.on_ray.actor_classes import as_actor
from elastix.train.on_ray.controller import Controller, RunRequest
from elastix.train.on_ray.crew_controller import CrewController, crew_strategy
from elastix.train.on_ray.driver_view import follow, is_over, stop
from elastix.train.on_ray.find_ray import find_or_start_ray
from elastix.train.record.finished import mark, over, same
from elastix.train.record.loaded_script import refuse_while_loading
from elastix.train.record.pickled_function import TRAIN, digest, keep_code
from elastix.train.record.provenance import origin, versions
from elastix.train.record.result import Result
from elastix.train.replica.context import Context
from elastix.train.replica.exactness import check_configs
from elastix.train.replica.model_source import ModelSource
from elastix.train.replica.profiler import FOLDER

TrainFunction = Callable[[Context], None]
Watch = Callable[[Sequence[Event]], None]

logger = logging.getLogger(__name__)
_PATIENCE_S = 5.0
_MOST_BYTES = 64_000  # of 100 KiB, from which on Ray keeps arguments with their owner


@checked
class ElasticTrainer:
    """Trains with a group of workers that may lose and gain members in the middle of a step.

    Args:
        train: runs on every worker, with a Context as its only argument.
        config: JSON values, available as `ctx.config`.
        scaling: how many workers, and the resources of each.
        run: which run this is; the same name and store continue it.
        checkpoint: when States are stored.
        failure: what counts as a failure, and how many are too many.
        exchange: how workers exchange what they have learned.
        restore: where to continue from, if not from the run's last State.
        profile: which steps to write a timeline of; none by default.
        loggers: TensorBoard, MLflow, WandB or your own; they read the run's events in this process.
        metrics: publish the run's metrics at Ray's metrics endpoint.
        quiet: print nothing.

    Raises:
        ConfigError: something given here cannot work.
    """

    def __init__(
        self,
        train: TrainFunction,
        *,
        config: Mapping[str, Any] | None = None,
        scaling: ScalingConfig | None = None,
        run: RunConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        failure: FailureConfig | None = None,
        exchange: ExchangeConfig | None = None,
        restore: RestoreConfig | None = None,
        profile: ProfileConfig | None = None,
        loggers: Sequence[Logger] = (),
        metrics: bool = True,
        quiet: bool = False,
    ) -> None:
        check_train(train, "config")
        self._train = train
        self._config = plain("config", config)
        self._scaling = given("scaling", scaling, ScalingConfig)
        self._run = given("run", run, RunConfig)
        self._checkpoint = given("checkpoint", checkpoint, CheckpointConfig)
        self._failure = given("failure", failure, FailureConfig)
        self._exchange = given("exchange", exchange, ExchangeConfig)
        check_configs(self._run, self._failure, self._exchange)
        refuse_memory(self._scaling, "a run")
        self._restore = given("restore", restore, RestoreConfig)
        self._profile = None if profile is None else of_kind("profile", profile, ProfileConfig)
        check_crew(
            self._scaling,
            self._failure,
            self._checkpoint,
            exact=self._run.exact,
            profile=self._profile,
        )
        check_exchange(self._exchange, self._scaling, self._failure, exact=self._run.exact)
        self._loggers: tuple[Logger, ...] = all_able("loggers", loggers, Logger)
        self._metrics = metrics
        self._quiet = quiet
        self._model_source: ModelSource | None = None
        self._until_reports: int | None = None
        self._watch: Watch | None = None
        self._order_seed: int | None = None

    def as_trial(
        self,
        model_source: ModelSource | None,
        until_reports: int | None,
        watch: "Watch",
        order_seed: int | None = None,
    ) -> Self:
        """Make this a trial of a campaign.

        Args:
            model_source: what the run takes from other models and leaves to them.
            until_reports: pause after so many reports.
            watch: is called about once a second with what has happened since; may raise
                KeyboardInterrupt to end the run.
            order_seed: of the order of samples; the run's own by default.
        """
        refuse_crew(self._scaling, "trials of a campaign")
        self._order_seed = order_seed
        self._model_source, self._until_reports, self._watch = model_source, until_reports, watch
        return self

    def descending(self, model_source: ModelSource) -> Self:
        """Let `ctx.inherit` take tensors from other models, and make these the parents."""
        refuse_crew(self._scaling, "a run that inherits")
        self._model_source = model_source
        return self

    def fit(self) -> Result:
        """Train to the end of the train function, through losses and joins. Blocks.

        If the run is already finished, with the same config, seed and train function, there is
        nothing left to do, and its Result is returned at once.

        Uses the Ray cluster that this process is connected to, or one that it finds; otherwise it
        starts a local one and stops it afterwards.

        Raises:
            ConfigError: the train function cannot be pickled, or the cluster can never place the
                workers; nothing was started.
            WorkerFailed: the train function raised.
            QuorumLost: too few workers were left, and none came in time.
            TooManyFailures: more losses than allowed.
            ControllerLost: the controller was ended for good, or cannot be started.
            Conflict: another process is training this run; names it. Nothing was started.
            KeyboardInterrupt: Ctrl-C; fit() again goes on from the last stored State, or attaches
                to the run if it is detached.
        """
        refuse_while_loading("fit()")
        train = pickle_train(self._train)
        self._check_size()
        directory = self._run.directory.resolve()
        opening = self._opening(train)
        found = self._finished(directory, opening)
        if found is not None:
            return found
        with contextlib.ExitStack() as held:
            refusal: Conflict | None = None
            try:
                self._own(directory, held)
            except Conflict as conflict:
                if not self._run.detached:
                    raise
                refusal = conflict  # unless it can be attached to
            if not ray.is_initialized():
                find_or_start_ray()
                held.callback(ray.shutdown)
            controller = self._attach(directory)
            if controller is not None:
                going_on = _history(directory).run
                if going_on is not None and not same(going_on, opening):
                    logger.warning(
                        "run %r goes on as it was started, with another config, seed or train "
                        "function than this call has. stop() it first to train with these.",
                        self._run.name,
                    )
                return self._follow(controller, directory, _history(directory, attached=True))
            if refusal is not None:
                raise refusal
            room = check_capacity(self._scaling)
            run = self._run_id(directory)
            takeover.sweep(run)
            directory.mkdir(parents=True, exist_ok=True)
            keep_code(directory / TRAIN, train)
            lifetime: Literal["detached"] | None = "detached" if self._run.detached else None
            timeout_s = self._failure.start_timeout_s
            groups, size = _reserve(run, self._scaling, room, timeout_s, lifetime)
            before, opening = _history(directory), replace(opening, origin=origin())
            try:
                controller = self._start(train, opening, directory, groups, size)
                return self._follow(controller, directory, before)
            finally:
                if not self._run.detached:
                    _remove(groups)

    def _own(self, directory: Path, held: contextlib.ExitStack) -> None:
        """Make this the one process that trains the run, as long as `held` is.

        Whoever writes the journal has a lock as well (observe.journal), so a detached run is owned
        when its driver has gone. The controller of one that is not detached dies with its driver,
        and whoever comes next waits for that.

        Raises:
            Conflict: another process is at this run; names it.
        """
        what = f"run {self._run.name!r} of this store is being trained"
        patience_s = takeover.LET_GO_S if self._watch else 0.0  # a trial has one owner at a time
        held.enter_context(Lock(directory / DRIVER_LOCK, what, patience_s=patience_s))
        writer = holder(journal.lock_of(directory / "journal.jsonl"))
        if writer is not None and writer.stays:
            raise Conflict(
                f"{what}, detached, by {writer}. Nothing was started. Attach to it with "
                "RunConfig(detached=True), stop it, or choose another name."
            )

    def stop(self) -> None:
        """End a detached run as soon as can be; `fit` again goes on from the last stored State.

        Does nothing if it is over. Needs the connection to its Ray cluster.
        """
        controller = takeover.find_controller(self._run_id(self._run.directory.resolve()))
        if controller is not None:
            with contextlib.suppress(ray.exceptions.RayActorError):
                ray.get(controller.stop.remote("stopped"))

    def _check_size(self) -> None:
        """Refuse settings with which Ray could not start a controller anew.

        Larger arguments Ray keeps with the process that gave them, which a detached run outlives.
        """
        size = len(ray.cloudpickle.dumps((self._config, self._model_source, self._failure)))
        if self._run.detached and size > _MOST_BYTES:
            raise ConfigError(
                f"config takes {size:,} bytes, and a detached run may have {_MOST_BYTES:,}: its "
                "controller could not be started again once this process is gone. Nothing was "
                "started. Write what is large to a file that all workers reach, and give its path."
            )

    def _run_id(self, directory: Path) -> str:
        return takeover.run_id(str(directory.parents[1]), self._run.name)

    def _attach(self, directory: Path) -> Any | None:  # noqa: ANN401 - a handle
        """The controller of this run, if it is detached and going on.

        One whose run is over stays for some seconds, to tell whoever follows it how that ended. Who
        comes now would take that for the outcome of what it has asked for itself.
        """
        if not self._run.detached:
            return None
        controller = takeover.find_controller(self._run_id(directory))
        if controller is None or is_over(controller):
            return None
        logger.info("attached run=%s", self._run.name)
        return controller

    def _opening(self, train: bytes) -> RunStarted:
        """Without its origin: that is looked for, in other processes, if the run is not over."""
        return RunStarted(
            name=self._run.name,
            seed=self._run.seed,
            order_seed=self._order_seed,
            exact=self._run.exact,
            config=self._config,
            scaling=self._scaling.to_dict(),
            versions={**versions(), "ray": ray.__version__},
            code=mark(train, self._model_source.parents if self._model_source is not None else ()),
            checkpoint=self._checkpoint.to_dict(),
            exchange=self._exchange.to_dict(),
            sentinel=self._failure.sentinel and not (self._scaling.crew or self._exchange.diloco),
        )

    def _finished(self, directory: Path, opening: RunStarted) -> Result | None:
        """What an earlier `fit` left, if there is nothing left to do: no Ray is needed to say so.

        A trial goes on where it was paused, and a RestoreConfig asks for steps to be made again.
        """
        if self._watch is not None or self._restore != RestoreConfig():
            return None
        before = _history(directory)
        if not over(before, opening):
            return None
        result = Result.of(directory, losses=0)
        try:
            with Store(self._run.store, read_only=True) as store:
                store.manifest(result.ref)
        except StoreError:
            return None  # it was retired, or is damaged: training makes another one
        console = Console(self._run.name, self._run.store, quiet=self._quiet, progress=before)
        console.over(result.ref, result.metrics, result.audit)
        return result

    def _start(
        self,
        train: bytes,
        opening: RunStarted,
        directory: Path,
        groups: tuple[PlacementGroup, ...],
        size: int,
    ) -> Any:  # noqa: ANN401 - a handle
        """Start the controller; it starts the workers."""
        plan = RunRequest(
            code=digest(train),
            config=self._config,
            scaling=self._scaling,
            run=replace(self._run, store=str(directory.parents[1])),
            checkpoint=self._checkpoint,
            restore=self._restore,
            failure=self._failure,
            exchange=self._exchange,
            profile=self._profile,
            metrics=self._metrics,
            opening=opening,
            placement=groups,
            size=size,
            directory=directory,
            model_source=self._model_source,
            until_reports=self._until_reports,
            order_seed=self._order_seed,
        )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        lead = CrewController if self._scaling.crew else Controller
        options: dict[str, Any] = {"lifetime": "detached"} if self._run.detached else {}
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
            if self._watch is not None:
                self._watch(events)

        return watch

    def _follow(self, controller: Any, directory: Path, before: Progress) -> Result:  # noqa: ANN401
        """Show what happens until the run is over, and say how it ended."""
        detached = self._run.detached
        feed, guard = LoggerThread(self._loggers), self._failure.guard
        with (
            Deaths() as deaths,
            Console(
                self._run.name,
                self._run.store,
                quiet=self._quiet,
                progress=before,
                best=self._checkpoint.best,
                judged=guard.metric if guard is not None else None,
            ) as console,
        ):
            try:
                ended = follow(controller, console, self._listen(feed, deaths))
            except KeyboardInterrupt:
                if not detached:
                    stop(controller)
                console.interrupted(goes_on=detached)
                raise told(KeyboardInterrupt()) from None
            finally:
                if not detached:
                    ray.kill(controller)
                feed.close()
                if self._profile is not None:
                    merge(directory / FOLDER, journal.read(directory / "journal.jsonl"))
            if ended.error is not None:
                console.failed(ended.error)
                if isinstance(ended.error, WorkerFailed):
                    ended.error.shown = not self._quiet
                raise ended.error if self._quiet else told(ended.error)
            result = Result.of(directory, ended.losses)
            console.finished(result.ref, result.metrics, result.audit)
            return result


def pickle_train(train: TrainFunction) -> bytes:
    """The train function as workers get it.

    Raises:
        ConfigError: it cannot be pickled; names what it holds.
    """
    if culprit := _left_behind(train):
        raise ConfigError(
            f"the train function cannot be sent to workers: it uses {culprit!r}, which functools "
            "caches; that is pickled by its name alone, and workers do not have your script. "
            "Nothing was started. Move it to a module that workers can import, or do not cache it."
        )
    try:
        return bytes(ray.cloudpickle.dumps(train))
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        culprit = _unpicklable(train)
        raise ConfigError(
            f"the train function cannot be sent to workers: {culprit or error}. Nothing was "
            "started. Create such objects inside the function, or pass plain values in config."
        ) from error


def _left_behind(train: TrainFunction) -> str | None:
    """Name the first cached function of the script that the train function refers to."""
    used = inspect.getclosurevars(train) if inspect.isfunction(train) else None
    for name, value in used.globals.items() if used is not None else ():
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            return name
    return None


def _unpicklable(train: TrainFunction) -> str | None:
    """Name the first thing that the function refers to and that cannot be pickled."""
    used = inspect.getclosurevars(train) if inspect.isfunction(train) else None
    if used is None:
        return None
    for kind, values in (("enclosed", used.nonlocals), ("global", used.globals)):
        for name, value in values.items():
            try:
                ray.cloudpickle.dumps(value)
            except (TypeError, AttributeError, ValueError, RuntimeError) as error:
                return f"it uses the {kind} variable {name!r}, a {type(value).__name__}: {error}"
    return None


def check_capacity(scaling: ScalingConfig) -> int:
    """How many workers the cluster could hold if nothing else ran there.

    Raises:
        ConfigError: fewer than the minimum.
    """
    wanted = scaling.resources_per_worker
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = fit_on_nodes(scaling)
    if room >= scaling.min_workers:
        return room
    has = "; ".join(
        ", ".join(f"{node.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU")) for node in nodes
    )
    raise ConfigError(
        f"num_workers={scaling.num_workers} with {wanted} each can never be placed: the cluster "
        f"has room for {room} ({len(nodes)} nodes: {has}). Nothing was started. Ask for fewer "
        "workers, or for a fraction of a CPU or GPU each (cpus_per_worker=0.5)."
    )


def fit_on_nodes(scaling: ScalingConfig) -> int:
    """How many workers the cluster could hold if nothing else ran there."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = [_fit(node, scaling.resources_per_process) for node in nodes]
    size = scaling.processes
    if crew_strategy(scaling.crew) == "STRICT_PACK":
        return sum(n // size for n in fit)
    return sum(fit) // size


def _fit(resources: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    return int(min((resources.get(kind, 0.0) + 1e-9) / need for kind, need in wanted.items()))


def _reserve(
    run: str,
    scaling: ScalingConfig,
    room: int,
    timeout_s: float,
    lifetime: Literal["detached"] | None,
) -> tuple[tuple[PlacementGroup, ...], int]:
    """Room for as many workers as fit now, at least the minimum: of crews a group for each."""
    wanted = scaling.resources_per_worker
    least = scaling.min_workers
    most = max(least, min(scaling.max_workers, room - scaling.spares - scaling.shadows))
    # Resources of a run that has just ended are free a moment later, so the most is tried first.
    free = min(most, max(least, _fit(ray.available_resources(), wanted)))
    for size in sorted({least, free, most}, reverse=True):
        patience_s = timeout_s if size == least else min(_PATIENCE_S, timeout_s)
        groups = tuple(
            placement_group(
                [dict(scaling.resources_per_process)] * bundles,
                strategy=strategy,
                name=takeover.room_name(run),
                lifetime=lifetime,
            )
            for bundles, strategy in (
                [(scaling.processes, crew_strategy(scaling.crew))] * size
                if scaling.crew
                else [(size, scaling.placement)]
            )
        )
        until = time.monotonic() + patience_s
        if all(group.wait(max(0.0, until - time.monotonic())) for group in groups):
            return groups, size
        _remove(groups)
    raise QuorumLost(
        f"the cluster had no room for {least} workers with {wanted} each within "
        f"start_timeout_s={timeout_s:g}; free are {ray.available_resources()}. Nothing was "
        "started. Stop what else runs there, or wait longer."
    )


def _remove(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _history(directory: Path, attached: bool = False) -> Progress:
    """What earlier processes of this run came to; the one at work now tells its part itself."""
    path = directory / "journal.jsonl"
    progress = Progress()
    if not path.exists():
        return progress
    kinds = enumerate(kind for kind, _ in journal.lines(path)) if attached else ()
    began = [place for place, kind in kinds if kind == RunStarted.__name__]
    for event in islice(journal.read(path), began[-1] if began else None):
        progress.add(event)
    return progress
