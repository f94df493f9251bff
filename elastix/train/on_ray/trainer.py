"""ElasticTrainer: the driver's side of a run.

A run that is finished is told of without Ray: what needs it is imported once there is something
left to do.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

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
from elastix.errors import ConfigError, StoreError
from elastix.events import CampaignStarted, RunStarted
from elastix.interrupts import heeding
from elastix.observe import catalogue
from elastix.observe.console import Console
from elastix.observe.loggers import Logger
from elastix.store import Store
from elastix.train.on_ray.run_settings import UNPICKLABLE, RunSettings, TrainFunction, Watch
from elastix.train.record.finished import history, mark, over
from elastix.train.record.loaded_script import refuse_while_loading
from elastix.train.record.result import Result
from elastix.train.record.uploaded_copy import warn_of_copy
from elastix.train.replica.exactness import check_configs

if TYPE_CHECKING:
    from elastix.train.replica.model_source import ModelSource

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
        self._asked = RunSettings(
            config=plain("config", config),
            scaling=given("scaling", scaling, ScalingConfig),
            run=given("run", run, RunConfig),
            checkpoint=given("checkpoint", checkpoint, CheckpointConfig),
            failure=given("failure", failure, FailureConfig),
            exchange=given("exchange", exchange, ExchangeConfig),
            restore=given("restore", restore, RestoreConfig),
            profile=None if profile is None else of_kind("profile", profile, ProfileConfig),
            loggers=all_able("loggers", loggers, Logger),
            metrics=metrics,
            quiet=quiet,
        )
        _check_together(self._asked)

    def as_trial(
        self,
        model_source: "ModelSource | None",
        until_reports: int | None,
        watch: Watch,
        order_seed: int | None = None,
        avoided: Collection[str] = (),
    ) -> Self:
        """Make this a trial of a campaign.

        Args:
            model_source: what the run takes from other models and leaves to them.
            until_reports: pause after so many reports.
            watch: is called about once a second with what has happened since; may raise
                KeyboardInterrupt to end the run.
            order_seed: of the order of samples; the run's own by default.
            avoided: nodes that are known to have other elastix code.
        """
        refuse_crew(self._asked.scaling, "trials of a campaign")
        self._asked = replace(
            self._asked,
            model_source=model_source,
            until_reports=until_reports,
            watch=watch,
            order_seed=order_seed,
            avoided=avoided,
        )
        return self

    def descending(self, model_source: "ModelSource") -> Self:
        """Let `ctx.inherit` take tensors from other models, and make these the parents."""
        refuse_crew(self._asked.scaling, "a run that inherits")
        self._asked = replace(self._asked, model_source=model_source)
        return self

    def fit(self) -> Result:
        """Train to the end of the train function, through losses and joins. Blocks.

        If the run is already finished, with the same config, seed and train function, there is
        nothing left to do, and its Result is returned at once.

        Uses the Ray cluster that this process is connected to, or one that it finds; otherwise it
        starts a local one and stops it afterwards.

        Raises:
            ConfigError: the train function cannot be pickled, or the cluster can never place the
                workers, and nothing was started; or a call in the train function cannot work.
            WorkerFailed: the train function raised.
            StateError: the stored State that the run would go on from does not fit the model.
            ReplicasDiffer: workers held different States, or drew different batches.
            TrainingUnstable: the guard had to discard too many steps.
            QuorumLost: too few workers were left, and none came in time.
            TooManyFailures: more losses than allowed.
            ControllerLost: the controller was ended for good, or cannot be started.
            Interrupted: somebody else has stopped the run.
            Conflict: another process is training this run; names it. Nothing was started.
            StoreError: the journal or the store cannot be read or written (Full: there is no room;
                Corrupt: something is damaged; TooNew: a later elastix has written it).
            KeyboardInterrupt: Ctrl-C. The State is stored first, for which the run has 20 s, and
                calling fit() again goes on from it. A detached run goes on, and calling fit() again
                attaches to it.
        """
        refuse_while_loading("fit()")
        self._check_size()
        catalogue.refuse_folder_of(CampaignStarted, self._asked.directory)
        opening = self._opening()
        found = self._finished(opening)
        if found is not None:
            return found
        if self._asked.watch is None:  # of a trial its campaign has said so
            warn_of_copy(self._asked.run.store)
        with heeding():
            from elastix.train.on_ray.launch import Launch  # Ray takes a second to import

        return Launch(self._train, self._asked, opening).fit()

    def stop(self) -> None:
        """Stop a detached run when its State is stored; calling `fit` again goes on from it.

        Does not wait for that. If `stop` is called again, or storing takes longer than 20 s, the
        run ends at once; two calls within a second count as one. Does nothing if the run is over.
        Needs the connection to its Ray cluster.

        Raises:
            ControllerLost: the controller does not answer, nor come back.
        """
        from elastix.train.on_ray.launch import end  # Ray takes a second to import

        end(self._asked)

    def _check_size(self) -> None:
        """Refuse settings with which Ray could not start a controller anew.

        Larger arguments Ray keeps with the process that gave them, which a detached run outlives.
        """
        asked = self._asked
        size = len(cloudpickle.dumps((asked.config, asked.model_source, asked.failure)))
        if asked.run.detached and size > _MOST_BYTES:
            raise ConfigError(
                f"config takes {size:,} bytes, and a detached run may have {_MOST_BYTES:,}: its "
                "controller could not be started again once this process is gone. Nothing was "
                "started. Write what is large to a file that all workers reach, and give its path."
            )

    def _opening(self) -> RunStarted:
        """Without its origin and versions: they are looked for if the run is not over."""
        asked, source = self._asked, self._asked.model_source
        return RunStarted(
            name=asked.run.name,
            seed=asked.run.seed,
            order_seed=asked.order_seed,
            exact=asked.run.exact,
            config=asked.config,
            scaling=asked.scaling.to_dict(),
            versions={},
            code=mark(_known_by(self._train), () if source is None else source.parents),
            checkpoint=asked.checkpoint.to_dict(),
            exchange=asked.exchange.to_dict(),
            sentinel=asked.failure.sentinel and not (asked.scaling.crew or asked.exchange.diloco),
        )

    def _finished(self, opening: RunStarted) -> Result | None:
        """What an earlier `fit` left, if there is nothing left to do: no Ray is needed to say so.

        A trial goes on where it was paused, and a RestoreConfig asks for steps to be made again.
        """
        asked = self._asked
        if asked.watch is not None or asked.restore != RestoreConfig():
            return None
        directory = asked.directory
        before = history(directory)
        if not over(before, opening):
            return None
        result = Result.of(directory, losses=0)
        try:
            with Store(asked.run.store, read_only=True) as store:
                store.manifest(result.ref)
        except StoreError:
            return None  # it was retired, or is damaged: training makes another one
        console = Console(asked.run.name, asked.run.store, quiet=asked.quiet, progress=before)
        console.over(result.ref, result.metrics, result.audit)
        return result


def _known_by(train: TrainFunction) -> bytes:
    """The train function as `mark` takes it: pickled without Ray, unless only Ray can."""
    try:
        return bytes(cloudpickle.dumps(train))
    except (*UNPICKLABLE, PicklingError):
        from elastix.train.on_ray.pickled_train import pickle_train

        return pickle_train(train)


def _check_together(asked: RunSettings) -> None:
    """Refuse settings that each make sense, and do not together."""
    check_configs(asked.run, asked.failure, asked.exchange)
    refuse_memory(asked.scaling, "a run")
    exact = asked.run.exact
    check_crew(asked.scaling, asked.failure, asked.checkpoint, exact=exact, profile=asked.profile)
    check_exchange(asked.exchange, asked.scaling, asked.failure, exact=exact)
