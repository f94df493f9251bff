"""`train.torch`: what a script uses from ray.train.torch."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from elastix.arguments import checked, meant, require
from elastix.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from elastix.errors import ConfigError
from elastix.ray_train.reported_checkpoints import ReportedCheckpoints
from elastix.ray_train.script import here, running
from elastix.script_adapter import LoneLoader
from elastix.train.on_ray.trainer import ElasticTrainer
from elastix.train.record.result import Result
from elastix.train.replica.context import Context

if TYPE_CHECKING:
    import pandas as pd

_HARMLESS = {"find_unused_parameters", "gradient_as_bucket_view", "static_graph"}
"""Arguments of DistributedDataParallel that do not change the result."""

_EVERY_S = 60.0


@dataclass(frozen=True)
class FitResult:
    """What `TorchTrainer.fit` returns, with Ray Train's names.

    Attributes:
        metrics: the last reported value of each metric.
        checkpoint: the last reported checkpoint, a ray.train.Checkpoint, or None.
        best_checkpoints: the checkpoints that were kept, in order, with their metrics.
        path: the run's directory.
        run: elastix's own Result, with the final State and the audit.
        error: always None, because `fit` raises the error that ends a run.
    """

    metrics: dict[str, Any]
    checkpoint: Any | None
    best_checkpoints: list[tuple[Any, dict[str, Any]]]
    path: str
    run: Result
    error: None = None

    @property
    def metrics_dataframe(self) -> "pd.DataFrame":
        """A table with one row for each step that had a report."""
        return self.run.history


@dataclass(frozen=True)
class TrainLoop:
    """A train loop for Ray Train, as a train function of elastix.

    Attributes:
        loop: a function of the config, or without arguments.
        checkpoints: where reported checkpoints are kept.
    """

    loop: Callable[..., Any]
    checkpoints: ReportedCheckpoints

    def __call__(self, ctx: Context) -> None:
        """Run it on this worker."""
        takes = inspect.signature(self.loop).parameters
        with running(ctx, self.checkpoints):
            self.loop(*([dict(ctx.config)] if takes else []))


@checked
class TorchTrainer:
    """Ray Train's TorchTrainer, with the same arguments.

    `num_workers=4` means (1, 4) here: the group is as large as there is room for, and goes on as
    long as one worker is left. If `max_failures` is above 0, so many workers may be lost; otherwise
    any number may. States are stored every minute, unless `options` say otherwise.

    Args:
        train_loop_per_worker: a function of `train_loop_config`, or without arguments.
        train_loop_config: JSON values.
        scaling_config: ray.train.ScalingConfig: num_workers, use_gpu, resources_per_worker,
            placement_strategy.
        run_config: ray.train.RunConfig: name, storage_path, failure_config.max_failures,
            checkpoint_config.
        options: further arguments of ElasticTrainer: checkpoint, failure, loggers, restore, quiet
            and so on. `scaling` and `run` replace scaling_config and run_config.

    Raises:
        ConfigError: an argument has a value that only works in Ray Train.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: Any = None,  # noqa: ANN401 - ray.train.ScalingConfig
        run_config: Any = None,  # noqa: ANN401 - ray.train.RunConfig
        **options: Any,  # noqa: ANN401
    ) -> None:
        known = set(inspect.signature(ElasticTrainer).parameters) - {"train", "config"}
        for name, value in options.items():
            if name in _INSTEAD and value is not None:
                raise ConfigError(
                    f"TorchTrainer got {name}={value!r}, which works in Ray Train alone. Nothing "
                    f"was started. {_INSTEAD[name]}"
                )
            if name not in _INSTEAD and name not in known:
                names = ["train_loop_config", "scaling_config", "run_config", *sorted(known)]
                raise ConfigError(
                    f"TorchTrainer has no argument {name!r}. Nothing was started. "
                    f"{meant('TorchTrainer', name, names)}It has {', '.join(names)}."
                )
        for given, theirs, ours in (
            (scaling_config, "use_gpu", "scaling=elastix.ScalingConfig(...)"),
            (run_config, "storage_path", "run=elastix.RunConfig(...)"),
        ):
            require(
                given is None or hasattr(given, theirs),
                f"TorchTrainer got {given!r} where a setting of Ray Train's belongs. Nothing was "
                f"started. Give train.ScalingConfig or train.RunConfig, or {ours}.",
            )
        options = {name: value for name, value in options.items() if name in known}
        for name, given in (("scaling", scaling_config), ("run", run_config)):
            if given is not None and name in options:
                raise ConfigError(
                    f"TorchTrainer got both {name}_config and {name}. Nothing was started. Leave "
                    "out one of them."
                )
        if not callable(train_loop_per_worker) or len(_required(train_loop_per_worker)) > 1:
            raise ConfigError(
                "train_loop_per_worker must be a function of one argument, the config, or of none, "
                f"not {train_loop_per_worker!r}. Nothing was started."
            )
        if run_config is None and "run" not in options:
            from ray.train import RunConfig as RaysRunConfig  # takes a second

            run_config = RaysRunConfig()  # has a name of its own each time
        settings = _settings(scaling_config, run_config)
        run = options.setdefault("run", settings.pop("run", None))
        keep = settings.pop("keep", {})
        options = {"checkpoint": CheckpointConfig(every_s=_EVERY_S), **settings, **options}
        self._checkpoints = ReportedCheckpoints(run.directory.resolve() / "checkpoints", **keep)
        loop = TrainLoop(train_loop_per_worker, self._checkpoints)
        self.trainer = ElasticTrainer(loop, config=train_loop_config, **options)

    def fit(self) -> FitResult:
        """Train; see ElasticTrainer.fit.

        Raises:
            ElastixError: as ElasticTrainer.fit raises it.
        """
        from ray.train import Checkpoint  # takes a second

        run = self.trainer.fit()
        kept = [(Checkpoint(str(path)), metrics) for path, metrics in self._checkpoints.all()]
        last = kept[-1][0] if kept else None
        return FitResult(dict(run.metrics), last, kept, str(run.directory), run)


def get_device() -> torch.device:
    """The device of this worker."""
    return here("torch.get_device").ctx.device


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Make a model part of the State, and average its gradients. It is returned without a wrapper.

    Raises:
        ConfigError: another strategy than DDP, arguments of DDP that would change the result, or
            called after the first batch.
    """
    script = here("torch.prepare_model")
    if parallel_strategy not in ("ddp", None) or set(parallel_strategy_kwargs or ()) - _HARMLESS:
        raise ConfigError(
            f"prepare_model got parallel_strategy={parallel_strategy!r} and "
            f"parallel_strategy_kwargs={parallel_strategy_kwargs!r}. Nothing was prepared. Each "
            "worker has a whole replica, whose gradients are averaged: leave both out. For models "
            "larger than a device see docs/large-models.md."
        )
    if move_to_device is not True and move_to_device != script.ctx.device:
        raise ConfigError(
            f"prepare_model got move_to_device={move_to_device!r}, and the group computes on "
            f"{script.ctx.device}. Nothing was prepared. Leave it out."
        )
    model.to(script.ctx.device)
    script.add(model)
    return model


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> LoneLoader:
    """Return a loader to train on within its `epochs`, and to evaluate on outside of them.

    See LoneLoader. `auto_transfer` is accepted and has no effect.

    Raises:
        ConfigError: it is not a DataLoader, or it should not be split or moved.
    """
    script = here("torch.prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader got {data_loader!r}, which is no torch DataLoader. Nothing was "
            "prepared."
        )
    if not (add_dist_sampler and move_to_device):
        raise ConfigError(
            f"prepare_data_loader got add_dist_sampler={add_dist_sampler!r} and "
            f"move_to_device={move_to_device!r}. Nothing was prepared. Leave both out, or use the "
            "DataLoader as it is where each worker is to read all of it."
        )
    return LoneLoader(data_loader, script)


_KEPT = ("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order")

_INSTEAD = {
    "datasets": "Make a DataLoader in the train loop; elastix.Parquet, Arrow and Tar read files by "
    "position.",
    "dataset_config": "Make a DataLoader in the train loop.",
    "resume_from_checkpoint": "A run of the same name goes on by itself; to begin with other "
    "weights load them in the train loop.",
    "backend_config": "elastix makes the connections itself.",
    "torch_config": "elastix makes the connections itself.",
    "validation_config": "Evaluate in the train loop.",
    "metadata": "Use train_loop_config.",
}


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in plain and one.default is one.empty]


def _settings(scaling: Any, run: Any) -> dict[str, Any]:  # noqa: ANN401
    """Arguments of ElasticTrainer, and as `keep` those of ReportedCheckpoints."""
    found: dict[str, Any] = {}
    if scaling is not None:
        found["scaling"] = _scaling(scaling)
    if run is None:
        return found
    _refuse_others("RunConfig", run, "name", "storage_path", "failure_config", "checkpoint_config")
    default = RunConfig()
    home = str(Path("~/ray_results").expanduser())
    path = run.storage_path
    store = default.store if path is None or str(path) == home else str(path)
    found["run"] = RunConfig(name=run.name or default.name, store=store)
    failure, kept = run.failure_config, run.checkpoint_config
    if failure is not None:
        _refuse_others("FailureConfig", failure, "max_failures")
        if failure.max_failures > 0:
            found["failure"] = FailureConfig(max_worker_losses=failure.max_failures)
    if kept is not None:
        _refuse_others("CheckpointConfig", kept, *_KEPT)
        keep, score, order = (getattr(kept, name) for name in _KEPT)
        found["keep"] = {"keep": keep, "score": score, "lowest": order == "min"}
    return found


def _scaling(scaling: Any) -> ScalingConfig:  # noqa: ANN401
    _refuse_others(
        "ScalingConfig",
        scaling,
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
    )
    given = scaling.resources_per_worker or {}
    require(
        isinstance(given, Mapping),
        f"resources_per_worker must be a mapping, like {{'CPU': 2}}, not {given!r}. Nothing was "
        "started.",
    )
    resources = dict(given)
    gpus = resources.pop("GPU", 1.0 if scaling.use_gpu else 0.0)
    cpus = resources.pop("CPU", 1.0)
    if resources:
        raise ConfigError(
            f"resources_per_worker has {', '.join(resources)}; elastix places workers by CPU and "
            "GPU. Nothing was started. Leave out the others."
        )
    most = scaling.num_workers
    return ScalingConfig(
        num_workers=most if isinstance(most, tuple) else (1, most),
        cpus_per_worker=cpus,
        gpus_per_worker=gpus,
        placement=scaling.placement_strategy,
    )


def _refuse_others(kind: str, given: Any, *known: str) -> None:  # noqa: ANN401
    """Raise if another field of Ray Train's than these is set, whatever its version has."""
    plain = type(given)()
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in known and value and value != getattr(plain, field.name):
            raise ConfigError(
                f"{kind} has {field.name}={value!r}, which works in Ray Train alone. Nothing was "
                "started. Leave it out."
            )
