"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died.

The public API and nothing else; the lineage model store is `elastix.Store`.
"""

import importlib as _importlib
import typing as _typing

from elastix.config import (
    CheckpointConfig,
    FailureConfig,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
)
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
    from elastix.search.searchers.deephyper import DeepHyper
    from elastix.search.searchers.evolution import Evolution
    from elastix.search.searchers.optuna import Optuna
    from elastix.search.searchers.random import Random
    from elastix.train.trainer import ElasticTrainer, Result

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "Conflict",
    "Context",
    "Corrupt",
    "DeepHyper",
    "ElasticTrainer",
    "ElastixError",
    "EmptySpace",
    "Evolution",
    "FailureConfig",
    "Full",
    "NotFound",
    "Optuna",
    "QuorumLost",
    "Random",
    "ReadOnly",
    "Ref",
    "RestoreConfig",
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

_LATER = {
    "DeepHyper": "elastix.search.searchers.deephyper",
    "ElasticTrainer": "elastix.train.trainer",
    "Evolution": "elastix.search.searchers.evolution",
    "Optuna": "elastix.search.searchers.optuna",
    "Random": "elastix.search.searchers.random",
    "Result": "elastix.train.trainer",
}


def __getattr__(name: str) -> _typing.Any:  # noqa: ANN401 - whatever is asked for
    """Import what needs Ray, DeepHyper or Optuna when it is asked for: the store does not."""
    if name in _LATER:
        return getattr(_importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'elastix' has no attribute {name!r}")
