"""Ray Train's API on an elastic group.

    from elastix import ray_train as train     # was: from ray import train
    ...
    for epoch in train_loader.epochs(10):      # was: for epoch in range(10):

The first of these lines stands where the script imported Ray Train, the second where its loop over
epochs was, and is how a joiner enters the right epoch. `train.torch` has TorchTrainer,
prepare_model and prepare_data_loader; settings (ScalingConfig, RunConfig and so on) and Checkpoint
are Ray Train's own classes.

The script sees a world of one process: see docs/adapters.md. What is not here raises a ConfigError.
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
    """Where this worker is.

    Raises:
        ConfigError: called outside of a train loop that TorchTrainer runs.
    """
    return here("get_context").context


def get_checkpoint() -> None:
    """None: a run that is continued goes on from its own States, model and all, by itself."""
    here("get_checkpoint")


def report(
    metrics: dict[str, Any],
    checkpoint: Any | None = None,  # noqa: ANN401 - ray.train.Checkpoint
    checkpoint_dir_name: str | None = None,
    **others: Any,  # noqa: ANN401
) -> None:
    """Hand metrics to the journal, and keep a checkpoint. All workers must call it; they wait.

    The metrics are those of the first worker, of its own share of the batch. The checkpoint is kept
    if the first worker has given one, or if that is lost meanwhile the next one. It is for use
    elsewhere: the run itself goes on from what `TorchTrainer(checkpoint=...)` has stored.

    Args:
        metrics: numbers and text.
        checkpoint: a directory to copy; the same on all workers, or on the first one alone.
        checkpoint_dir_name: of the copy; by default it has the number of the step.
        others: nothing else that Ray Train knows works here.

    Raises:
        ConfigError: called before the first batch, with something that does not work here, or with
            values that are no metrics.
    """
    here("report").report(metrics, checkpoint, checkpoint_dir_name, others)


def track(**objects: Stateful) -> None:
    """Further objects of the State, by name; see Context.track. At any time."""
    here("track").track(objects)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    """Ray Train's own classes, imported when they are asked for."""
    if name in _RAYS:
        return getattr(importlib.import_module("ray.train"), name)
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ConfigError(
        f"train.{name} is not there: elastix.ray_train has {', '.join(sorted((*__all__, *_RAYS)))}."
        " Nothing was done. See docs/adapters.md for what a script of Ray Train's may use."
    )
