"""Ray Train's API on an elastic group.

    from elastix import ray_train as train     # was: from ray import train
    ...
    for epoch in train_loader.epochs(10):      # was: for epoch in range(10):

Only these two lines of a script change. The first replaces the import of Ray Train. The second
replaces the loop over epochs, so that a joiner starts in the right epoch. `train.torch` has
TorchTrainer, prepare_model and prepare_data_loader. The settings (ScalingConfig, RunConfig and so
on) and Checkpoint are Ray Train's own classes.

The script sees a world of one process: see docs/adapters.md. Anything else of Ray Train raises a
ConfigError.
"""

import importlib
from typing import Any

from elastix.errors import ConfigError
from elastix.ray_train import torch
from elastix.ray_train.script import TrainContext, here
from elastix.state import Stateful

__all__ = ["TrainContext", "get_checkpoint", "get_context", "report", "torch", "track"]

_RAYS = (
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
    "RunConfig",
    "ScalingConfig",
)


def get_context() -> TrainContext:
    """This worker's place in the run.

    Raises:
        ConfigError: called outside of a train loop that TorchTrainer runs.
    """
    return here("get_context").context


def get_checkpoint() -> None:
    """Always None: a continued run restores its model and everything else by itself."""
    here("get_checkpoint")


def report(
    metrics: dict[str, Any],
    checkpoint: Any | None = None,  # noqa: ANN401 - ray.train.Checkpoint
    checkpoint_dir_name: str | None = None,
    **others: Any,  # noqa: ANN401
) -> None:
    """Write metrics to the journal, and keep a checkpoint. All workers must call it; they wait.

    The metrics are those of the first worker, for its own share of the batch. The checkpoint is
    that of the first worker, or of the next one if that is lost meanwhile. It is for use elsewhere:
    a continued run starts from what `TorchTrainer(checkpoint=...)` stored.

    Args:
        metrics: numbers and strings.
        checkpoint: a directory to copy; the same on all workers, or only on the first one.
        checkpoint_dir_name: name of the copy. By default the number of the step, and of the
            report if there are several after one step.
        others: not supported; other arguments of Ray Train's function are refused.

    Raises:
        ConfigError: called before the first batch, with an argument that is not supported, or with
            values that are not metrics.
    """
    here("report").report(metrics, checkpoint, checkpoint_dir_name, others)


def track(**objects: Stateful) -> None:
    """Add objects to the State, by name; see Context.track. Can be called at any time."""
    here("track").track(objects)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    """Ray Train's own classes, imported when they are used."""
    if name in _RAYS:
        return getattr(importlib.import_module("ray.train"), name)
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ConfigError(
        f"train.{name} is not there: elastix.ray_train has {', '.join(sorted((*__all__, *_RAYS)))}."
        " Nothing was done. See docs/adapters.md for what a script of Ray Train's may use."
    )
