"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died.

The public API and nothing else; the lineage model store is `elastix.Store`.
"""

import importlib as _importlib
import typing as _typing

from elastix.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from elastix.errors import (
    ConfigError,
    Conflict,
    Corrupt,
    ElastixError,
    EmptySpace,
    Full,
    NotFound,
    QuorumLost,
    ReadOnly,
    SearchError,
    StateError,
    StoreError,
    TooManyFailures,
    TooNew,
    TrainError,
    WorkerFailed,
)
from elastix.state import Ref, State
from elastix.store import Store
from elastix.train.context import Context

if _typing.TYPE_CHECKING:
    from elastix.train.trainer import ElasticTrainer, Result

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "Conflict",
    "Context",
    "Corrupt",
    "ElasticTrainer",
    "ElastixError",
    "EmptySpace",
    "FailureConfig",
    "Full",
    "NotFound",
    "QuorumLost",
    "ReadOnly",
    "Ref",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SearchError",
    "State",
    "StateError",
    "Store",
    "StoreError",
    "TooManyFailures",
    "TooNew",
    "TrainError",
    "WorkerFailed",
]

_ON_RAY = ("ElasticTrainer", "Result")


def __getattr__(name: str) -> _typing.Any:  # noqa: ANN401 - whatever is asked for
    """Import what needs Ray when it is asked for: the store and the command line do not."""
    if name in _ON_RAY:
        return getattr(_importlib.import_module("elastix.train.trainer"), name)
    raise AttributeError(f"module 'elastix' has no attribute {name!r}")
