"""What a run was asked to be: an ElasticTrainer's arguments, checked. Needs no Ray."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastix.config import (
    CheckpointConfig,
    ExchangeConfig,
    FailureConfig,
    ProfileConfig,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
)
from elastix.events import Event
from elastix.observe.loggers import Logger

if TYPE_CHECKING:
    from elastix.train.replica.context import Context
    from elastix.train.replica.model_source import ModelSource

TrainFunction = Callable[["Context"], None]
Watch = Callable[[Sequence[Event]], None]
UNPICKLABLE = (TypeError, AttributeError, ValueError, RuntimeError)
"""What picklers raise, besides PicklingError."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """See ElasticTrainer; the last five are those of a trial, see `ElasticTrainer.as_trial`."""

    config: dict[str, Any]
    scaling: ScalingConfig
    run: RunConfig
    checkpoint: CheckpointConfig
    failure: FailureConfig
    exchange: ExchangeConfig
    restore: RestoreConfig
    profile: ProfileConfig | None
    loggers: tuple[Logger, ...]
    metrics: bool
    quiet: bool
    model_source: "ModelSource | None" = None
    until_reports: int | None = None
    watch: Watch | None = None
    order_seed: int | None = None
    avoided: Collection[str] = ()

    @property
    def directory(self) -> Path:
        """Of the run, in full."""
        return self.run.directory.resolve()
