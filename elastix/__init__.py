"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died.

The public API and nothing else; the lineage model store is `elastix.Store`.
"""

from elastix.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from elastix.errors import (
    ConfigError,
    Conflict,
    Corrupt,
    ElastixError,
    Full,
    NotFound,
    QuorumLost,
    ReadOnly,
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
from elastix.train.trainer import ElasticTrainer, Result

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "Conflict",
    "Context",
    "Corrupt",
    "ElasticTrainer",
    "ElastixError",
    "FailureConfig",
    "Full",
    "NotFound",
    "QuorumLost",
    "ReadOnly",
    "Ref",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "State",
    "StateError",
    "Store",
    "StoreError",
    "TooManyFailures",
    "TooNew",
    "TrainError",
    "WorkerFailed",
]
