"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died."""

from elastix.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from elastix.errors import (
    ConfigError,
    Corrupt,
    ElastixError,
    NotFound,
    QuorumLost,
    StateError,
    StoreError,
    TooManyFailures,
    TrainError,
    WorkerFailed,
)
from elastix.state import Ref, State
from elastix.train.context import Context
from elastix.train.trainer import ElasticTrainer, Result

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "Context",
    "Corrupt",
    "ElasticTrainer",
    "ElastixError",
    "FailureConfig",
    "NotFound",
    "QuorumLost",
    "Ref",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "State",
    "StateError",
    "StoreError",
    "TooManyFailures",
    "TrainError",
    "WorkerFailed",
]
