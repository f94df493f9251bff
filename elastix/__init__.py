"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died.

The public API and nothing else; the lineage model store is `elastix.Store`.
"""

import importlib as _importlib
import typing as _typing

from elastix.config import (
    Budget,
    CheckpointConfig,
    FailureConfig,
    Guard,
    InheritConfig,
    ProfileConfig,
    RestoreConfig,
    RunConfig,
    ScalingConfig,
)
from elastix.errors import (
    ConfigError,
    Conflict,
    ControllerLost,
    Corrupt,
    ElastixError,
    EmptySpace,
    EveryTrialFailed,
    Full,
    NeverReported,
    NotFound,
    QuorumLost,
    ReadOnly,
    ReplicasDiffer,
    SearchError,
    StateError,
    StoreError,
    TooManyFailures,
    TooNew,
    TrainError,
    TrainingUnstable,
    WorkerFailed,
)
from elastix.state import Ref, State
from elastix.store import Store
from elastix.train.replica.context import Context

if _typing.TYPE_CHECKING:
    from elastix.data.formats.tables import Arrow, Parquet
    from elastix.data.formats.tar import Tar
    from elastix.data.shared import Shared
    from elastix.observe.mlflow import MLflow
    from elastix.observe.tensorboard import TensorBoard
    from elastix.observe.wandb import WandB
    from elastix.search.campaign import Campaign
    from elastix.search.ensemble import Ensemble
    from elastix.search.results import Results
    from elastix.search.searchers.deephyper import DeepHyper
    from elastix.search.searchers.evolution import Evolution
    from elastix.search.searchers.optuna import Optuna
    from elastix.search.searchers.random import Random
    from elastix.search.searchers.screened import ScreenedEvolution
    from elastix.train.on_ray.trainer import ElasticTrainer, Result

__all__ = [
    "Arrow",
    "Budget",
    "Campaign",
    "CheckpointConfig",
    "ConfigError",
    "Conflict",
    "Context",
    "ControllerLost",
    "Corrupt",
    "DeepHyper",
    "ElasticTrainer",
    "ElastixError",
    "EmptySpace",
    "Ensemble",
    "EveryTrialFailed",
    "Evolution",
    "FailureConfig",
    "Full",
    "Guard",
    "InheritConfig",
    "MLflow",
    "NeverReported",
    "NotFound",
    "Optuna",
    "Parquet",
    "ProfileConfig",
    "QuorumLost",
    "Random",
    "ReadOnly",
    "Ref",
    "ReplicasDiffer",
    "RestoreConfig",
    "Result",
    "Results",
    "RunConfig",
    "ScalingConfig",
    "ScreenedEvolution",
    "SearchError",
    "Shared",
    "State",
    "StateError",
    "Store",
    "StoreError",
    "Tar",
    "TensorBoard",
    "TooManyFailures",
    "TooNew",
    "TrainError",
    "TrainingUnstable",
    "WandB",
    "WorkerFailed",
]

_LATER = {
    "Arrow": "elastix.data.formats.tables",
    "Campaign": "elastix.search.campaign",
    "DeepHyper": "elastix.search.searchers.deephyper",
    "ElasticTrainer": "elastix.train.on_ray.trainer",
    "Ensemble": "elastix.search.ensemble",
    "Evolution": "elastix.search.searchers.evolution",
    "MLflow": "elastix.observe.mlflow",
    "Optuna": "elastix.search.searchers.optuna",
    "Parquet": "elastix.data.formats.tables",
    "Random": "elastix.search.searchers.random",
    "Result": "elastix.train.on_ray.trainer",
    "Results": "elastix.search.results",
    "ScreenedEvolution": "elastix.search.searchers.screened",
    "Shared": "elastix.data.shared",
    "Tar": "elastix.data.formats.tar",
    "TensorBoard": "elastix.observe.tensorboard",
    "WandB": "elastix.observe.wandb",
}


def __getattr__(name: str) -> _typing.Any:  # noqa: ANN401 - whatever is asked for
    """Import what needs Ray or a library of its own when it is asked for: the store does not."""
    if name in _LATER:
        return getattr(_importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'elastix' has no attribute {name!r}")
