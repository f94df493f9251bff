"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died.

The public API and nothing else; the lineage model store is `elastix.Store`. What a search space is
written with (`Integer`, `EqualsCondition` and so on) is ConfigSpace's own.
"""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from elastix import arguments as _arguments
from elastix.config import (
    Budget,
    CheckpointConfig,
    ExchangeConfig,
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
    Interrupted,
    NeverReported,
    NotFound,
    OtherCode,
    QuorumLost,
    ReadOnly,
    ReplicasDiffer,
    SearchError,
    StateError,
    StoreDamaged,
    StoreError,
    TooManyFailures,
    TooNew,
    TrainError,
    TrainingUnstable,
    WorkerFailed,
)

if _typing.TYPE_CHECKING:
    from ConfigSpace import (
        AndConjunction,
        Categorical,
        ConfigurationSpace,
        Constant,
        EqualsCondition,
        Float,
        ForbiddenAndConjunction,
        ForbiddenEqualsClause,
        ForbiddenInClause,
        GreaterThanCondition,
        InCondition,
        Integer,
        LessThanCondition,
        NotEqualsCondition,
        OrConjunction,
    )

    from elastix.data.formats.tables import Arrow, Parquet
    from elastix.data.formats.tar import Tar
    from elastix.data.rehearsal import Rehearsal
    from elastix.data.shared import Shared
    from elastix.observe.mlflow import MLflow
    from elastix.observe.tensorboard import TensorBoard
    from elastix.observe.wandb import WandB
    from elastix.search.campaign import Campaign
    from elastix.search.ensemble import Ensemble
    from elastix.search.gate import Gate
    from elastix.search.results import Results
    from elastix.search.rungs import Asha, Median
    from elastix.search.searchers.deephyper import DeepHyper
    from elastix.search.searchers.evolution import Evolution
    from elastix.search.searchers.optuna import Optuna
    from elastix.search.searchers.population import Population
    from elastix.search.searchers.random import Random
    from elastix.search.searchers.screened import ScreenedEvolution
    from elastix.search.space import Blocks, Space
    from elastix.state import Ref, State
    from elastix.store import Store
    from elastix.train.on_ray.trainer import ElasticTrainer
    from elastix.train.record.result import Result
    from elastix.train.replica.context import Context

__all__ = [
    "AndConjunction",
    "Arrow",
    "Asha",
    "Blocks",
    "Budget",
    "Campaign",
    "Categorical",
    "CheckpointConfig",
    "ConfigError",
    "ConfigurationSpace",
    "Conflict",
    "Constant",
    "Context",
    "ControllerLost",
    "Corrupt",
    "DeepHyper",
    "ElasticTrainer",
    "ElastixError",
    "EmptySpace",
    "Ensemble",
    "EqualsCondition",
    "EveryTrialFailed",
    "Evolution",
    "ExchangeConfig",
    "FailureConfig",
    "Float",
    "ForbiddenAndConjunction",
    "ForbiddenEqualsClause",
    "ForbiddenInClause",
    "Full",
    "Gate",
    "GreaterThanCondition",
    "Guard",
    "InCondition",
    "InheritConfig",
    "Integer",
    "Interrupted",
    "LessThanCondition",
    "MLflow",
    "Median",
    "NeverReported",
    "NotEqualsCondition",
    "NotFound",
    "Optuna",
    "OrConjunction",
    "OtherCode",
    "Parquet",
    "Population",
    "ProfileConfig",
    "QuorumLost",
    "Random",
    "ReadOnly",
    "Ref",
    "Rehearsal",
    "ReplicasDiffer",
    "RestoreConfig",
    "Result",
    "Results",
    "RunConfig",
    "ScalingConfig",
    "ScreenedEvolution",
    "SearchError",
    "Shared",
    "Space",
    "State",
    "StateError",
    "Store",
    "StoreDamaged",
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
    "AndConjunction": "ConfigSpace",
    "Arrow": "elastix.data.formats.tables",
    "Asha": "elastix.search.rungs",
    "Blocks": "elastix.search.space",
    "Campaign": "elastix.search.campaign",
    "Categorical": "ConfigSpace",
    "ConfigurationSpace": "ConfigSpace",
    "Constant": "ConfigSpace",
    "Context": "elastix.train.replica.context",
    "DeepHyper": "elastix.search.searchers.deephyper",
    "ElasticTrainer": "elastix.train.on_ray.trainer",
    "Ensemble": "elastix.search.ensemble",
    "EqualsCondition": "ConfigSpace",
    "Evolution": "elastix.search.searchers.evolution",
    "Float": "ConfigSpace",
    "ForbiddenAndConjunction": "ConfigSpace",
    "ForbiddenEqualsClause": "ConfigSpace",
    "ForbiddenInClause": "ConfigSpace",
    "Gate": "elastix.search.gate",
    "GreaterThanCondition": "ConfigSpace",
    "InCondition": "ConfigSpace",
    "Integer": "ConfigSpace",
    "LessThanCondition": "ConfigSpace",
    "MLflow": "elastix.observe.mlflow",
    "Median": "elastix.search.rungs",
    "NotEqualsCondition": "ConfigSpace",
    "Optuna": "elastix.search.searchers.optuna",
    "OrConjunction": "ConfigSpace",
    "Parquet": "elastix.data.formats.tables",
    "Population": "elastix.search.searchers.population",
    "Random": "elastix.search.searchers.random",
    "Ref": "elastix.state",
    "Rehearsal": "elastix.data.rehearsal",
    "Result": "elastix.train.record.result",
    "Results": "elastix.search.results",
    "ScreenedEvolution": "elastix.search.searchers.screened",
    "Shared": "elastix.data.shared",
    "Space": "elastix.search.space",
    "State": "elastix.state",
    "Store": "elastix.store",
    "Tar": "elastix.data.formats.tar",
    "TensorBoard": "elastix.observe.tensorboard",
    "WandB": "elastix.observe.wandb",
}


def __getattr__(name: str) -> _typing.Any:  # noqa: ANN401 - whatever is asked for
    """Import what is asked for when it is asked for: torch, Ray and spaces take seconds."""
    if name in _LATER:
        return getattr(_importlib.import_module(_LATER[name]), name)
    if name == "__version__":
        return _importlib.import_module("importlib.metadata").version(__name__)
    if not name.startswith("_") and _util.find_spec(f"{__name__}.{name}") is not None:
        return _importlib.import_module(f"{__name__}.{name}")
    hint = _arguments.closest(name, __all__).rstrip() if not name.startswith("_") else ""
    raise AttributeError(f"module 'elastix' has no attribute {name!r}. {hint}".rstrip())


def __dir__() -> list[str]:
    """The public names, those that are not imported yet too."""
    return [*__all__, "__version__"]
