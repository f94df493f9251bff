"""Hugging Face Accelerate on an elastic group.

    accelerator = elastix.accelerate.Accelerator(ctx, gradient_accumulation_steps=2)
    ...
    for epoch in train_loader.epochs(10):

Only these two lines of a script change. The first is in the train function, which has `ctx` as its
argument. The second replaces the loop over epochs, so that a joiner starts in the right epoch.

The script sees a world of one process: see docs/adapters.md. Needs the extra `accelerate`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator as _Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elastix import whole_files
from elastix.arguments import checked, is_whole, require, whole, with_arguments_of
from elastix.errors import ConfigError
from elastix.script_adapter import LoneLoader, LoneScript
from elastix.state import Stateful
from elastix.train.replica.context import Context

T = TypeVar("T")

_PEER = "elastix.accelerate.Accelerator"
_REFUSED = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "torch_tp_plugin",
)
_OWN_ORDER = ("dispatch_batches", "data_seed", "use_stateful_dataloader")
"""Settings of DataLoaderConfiguration: who draws the samples, and in which order."""

_last: Context | None = None


class Accelerator(_Accelerator):  # type: ignore[misc]
    """Accelerate's Accelerator, with the train function's `ctx` as its first argument.

    `prepare` may be called several times. The worker joins the group when the first loader is
    used. `accumulate`, `clip_grad_norm_`, `autocast`, `unwrap_model` and mixed precision work as
    in Accelerate.

    `gather`, `gather_for_metrics`, and `reduce` by anything but the mean return their argument, as
    in a world of one process, and raise a ConfigError if workers have different values. `save` and
    `save_model` write on the first worker, completely or not at all. Trackers run on the first
    worker.

    Args:
        ctx: the argument of the train function.
        settings: the keyword arguments of Accelerate's own class.

    Raises:
        ConfigError: `ctx` is not a Context, a worker consists of several processes, `accelerate
            launch` started the process, or a setting says what is elastix's to say: a plugin
            shards models, batches would be dispatched, samples have a seed of their own, say.
    """

    @checked
    @with_arguments_of(_Accelerator.__init__)
    def __init__(self, ctx: Context, **settings: Any) -> None:  # noqa: ANN401
        global _last
        self._script = LoneScript(ctx, _PEER)
        wrong = [name for name in _REFUSED if settings.get(name) is not None]
        config = settings.get("dataloader_config")
        own_order = {name: getattr(config, name, None) for name in _OWN_ORDER}
        wrong += [
            f"dataloader_config with {name}={value!r}"
            for name, value in own_order.items()
            if value is not None and value is not False  # a seed of 0 is one
        ]
        handlers = settings.get("kwargs_handlers") or ()
        wrong += [
            "DistributedDataParallelKwargs with a comm_hook"
            for handler in handlers
            if getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
            is not DDPCommunicationHookType.NO
        ]
        if settings.get("mixed_precision") == "fp8":
            wrong.append("mixed_precision='fp8'")
        if settings.get("cpu") and ctx.device.type != "cpu":
            wrong.append(f"cpu=True, while this worker computes on {ctx.device}")
        plugin = settings.get("gradient_accumulation_plugin")
        steps = settings.get("gradient_accumulation_steps", getattr(plugin, "num_steps", 1))
        require(
            is_whole(whole(steps), 1),
            f"gradient_accumulation_steps must be a whole number >= 1, not {steps!r}. Nothing was "
            "set up.",
        )
        if wrong:
            raise ConfigError(
                f"{_PEER} got {', '.join(wrong)}. Nothing was set up. Each worker has a whole "
                "replica on the device that ScalingConfig gives it, and reads its own samples in "
                "an order by RunConfig(seed=...); elastix reduces gradients and continues runs by "
                "itself: leave it out. For models larger than a device see docs/large-models.md."
            )
        if _last is not ctx:  # what Accelerate shares in a process is of one run
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            _last = ctx
        settings["cpu"] = ctx.device.type == "cpu"
        super().__init__(**settings)
        if self.distributed_type is not DistributedType.NO:
            raise ConfigError(
                f"{_PEER} found settings of `accelerate launch` for {self.distributed_type}. "
                "Nothing was set up. ElasticTrainer starts the workers: run the script with python."
            )
        self._deferred = False
        self.flag_tensor: torch.Tensor | None = None
        self._tracking: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def track(self, **objects: Stateful) -> None:
        """Add objects to the State, by name; see Context.track. Can be called at any time."""
        self._script.track(objects)

    # ------------------------------------------------------------------ where this worker is

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._script.ctx.device

    @property
    def process_index(self) -> int:
        """This worker's current rank; its id until it has joined the group."""
        ctx = self._script.ctx
        return ctx.rank if ctx.rank >= 0 else ctx.worker

    @property
    def is_main_process(self) -> bool:
        """Whether this worker has rank 0. That may change with any step."""
        return self.process_index == 0

    local_process_index = process_index
    is_local_main_process = is_main_process
    is_last_process = is_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Print on the first worker."""
        if self.is_main_process:
            print(*args, **kwargs)  # noqa: T201 - that is what was asked for

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Make a function that runs only on the worker that has rank 0 when it is called."""

        @functools.wraps(function)
        def only_there(*args: Any, **kwargs: Any) -> T | None:  # noqa: ANN401
            return function(*args, **kwargs) if self.is_main_process else None

        return only_there

    on_local_main_process = on_main_process
    on_last_process = on_main_process

    def on_process(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Not supported: workers have no fixed numbers.

        Raises:
            ConfigError: always.
        """
        self._refuse("on_process", "Workers come and go; on_main_process is the first one.")

    on_local_process = on_process

    # ------------------------------------------------------------------ what is prepared

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Make it part of the State, unless it is only for evaluation."""
        if not evaluation_mode:
            self._script.add(model)
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Make it part of the State, together with the gradient scaler of mixed precision."""
        known = getattr(optimizer, "_is_accelerate_prepared", False)
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        if not known:
            self._script.add(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            if self.scaler is not None:
                self._script.add(self.scaler)
        return prepared  # type: ignore[no-any-return]

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:  # noqa: ANN401
        """Make it part of the State. It advances once per step, for any number of workers."""
        prepared = super().prepare_scheduler(scheduler)
        self._script.add(prepared.scheduler)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *_: Any, **__: Any) -> "_Loader":  # noqa: ANN401
        """Return a loader with `epochs`, the loop to train in; see LoneLoader."""
        if isinstance(data_loader, _Loader):
            return data_loader
        loader = _Loader(data_loader, self._script, self.gradient_state)
        self._dataloaders.append(loader)
        return loader

    def register_for_checkpointing(self, *objects: Any) -> None:  # noqa: ANN401
        """Make them part of the State. Must be called before the first batch."""
        self._script.add(*objects)

    # ------------------------------------------------------------------ a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # noqa: ANN401
        """Backward pass of a loss that is a mean over the batch; deferred while accumulating.

        Raises:
            ConfigError: the last batch was not drawn within `loader.epochs`.
        """
        self._script.check_backward()
        deferred = not self.sync_gradients and not self._deferred
        context: AbstractContextManager[None] = nullcontext()
        if deferred:
            context = self._script.ctx.accumulate()
        with context:
            super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Defer the step. It applies to all models."""
        del model
        if self._deferred:
            yield
            return
        self._script.enter()
        self._deferred = True
        try:
            with self._script.ctx.accumulate():
                yield
        finally:
            self._deferred = False

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> NoReturn:
        """Not supported.

        Raises:
            ConfigError: always.
        """
        del model
        self._refuse("trigger_sync_in_backward", "Leave the last backward pass out of no_sync.")

    def _before_step(self, *_: Any) -> None:  # noqa: ANN401
        self._script.check_backward()

    # ------------------------------------------------------------------ what others have

    def wait_for_everyone(self) -> None:
        """Wait for all members of the group."""
        self._script.check_entered("accelerator.wait_for_everyone")
        self._script.ctx.mean(barrier=0.0)

    def gather(self, tensor: T) -> T:
        """Return the argument, as in a world of one process.

        Raises:
            ConfigError: workers have different values.
        """
        return self._script.same(tensor, "accelerator.gather")

    def gather_for_metrics(self, input_data: T, use_gather_object: bool = False) -> T:
        """Return the argument, as in a world of one process.

        Raises:
            ConfigError: workers have different values.
        """
        del use_gather_object
        return self._script.same(input_data, "accelerator.gather_for_metrics")

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduce by mean over the group. Other reductions return the value that all workers have.

        Raises:
            ConfigError: workers have different values, and it is not a mean.
        """
        del scale  # as Accelerate's own on one process
        if reduction == "mean":
            return self._script.mean(tensor)
        return self._script.same(tensor, f"accelerator.reduce(reduction={reduction!r})")

    def pad_across_processes(self, tensor: T, *_: Any, **__: Any) -> T:  # noqa: ANN401
        """Return the argument."""
        return tensor

    def check_trigger(self) -> bool:
        """Whether any worker in the group has set the trigger."""
        mine = self.flag_tensor is not None and bool(self.flag_tensor)
        found = self._script.on_any(mine, "accelerator.check_trigger")
        if found:
            self.flag_tensor = None
        return found

    # ------------------------------------------------------------------ files and trackers

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:  # noqa: ANN401
        """Save on the first worker, completely or not at all.

        Raises:
            ConfigError: `f` is not a path.
        """
        if not isinstance(f, str | Path):
            self._refuse("save", f"Give a path, not {f!r}.")
        if self.is_main_process:
            save = super().save
            writer = self._script.writer
            whole_files.replace(Path(f), lambda at: save(obj, at, safe_serialization), writer)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save on the first worker, completely or not at all. Other files in there are kept.

        Shards have other names every second time. The index, which comes last, says which are the
        model's.

        Raises:
            ConfigError: `save_directory` is a file.
        """
        folder = Path(save_directory)
        if folder.is_file():
            self._refuse(
                "save_model", f"Give a directory, not {save_directory!r}, which is a file."
            )
        if self.is_main_process:
            save = super().save_model
            whole_files.add(
                folder,
                lambda to: save(model, to, max_shard_size, safe_serialization),
                self._script.writer,
            )

    def save_state(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Not supported.

        Raises:
            ConfigError: always.
        """
        self._refuse(
            "save_state",
            "States are stored by themselves, and CheckpointConfig says when: leave it out. For "
            "weights to use elsewhere there are save_model and save.",
        )

    def load_state(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Not supported.

        Raises:
            ConfigError: always.
        """
        self._refuse(
            "load_state",
            "A run of the same name goes on from its last State by itself: leave it out. To begin "
            "with other weights load them into the model before prepare.",
        )

    def skip_first_batches(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Not supported.

        Raises:
            ConfigError: always.
        """
        self._refuse(
            "skip_first_batches",
            "A run that goes on begins with the first batch that was not used: leave it out.",
        )

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Start trackers on the first worker; if that is lost, on the next one at its first log."""
        self._tracking = (args, kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: ANN401
        """As in Accelerate. On all workers but the first it does nothing."""
        self._start_trackers()
        return super().get_tracker(name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Log on the first worker. Use `ctx.report` for the journal and the report."""
        self._start_trackers()
        if self.is_main_process:
            super().log(values, step, **kwargs)

    def _start_trackers(self) -> None:
        if self.is_main_process and self._tracking is not None:
            (args, kwargs), self._tracking = self._tracking, None
            super().init_trackers(*args, **kwargs)

    def _refuse(self, call: str, instead: str) -> NoReturn:
        raise ConfigError(f"accelerator.{call} does not work here. Nothing was done. {instead}")


class _Loader(LoneLoader):
    """A LoneLoader that tells Accelerate about the last batch, which always ends a step."""

    def __init__(self, loader: DataLoader[Any], script: LoneScript, state: GradientState) -> None:
        super().__init__(loader, script)
        self.end_of_dataloader = False
        self.remainder = 0
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self._state._add_dataloader(self)
        try:
            for number, batch in enumerate(super().__iter__(), 1):
                self.end_of_dataloader = self.left == 0 if self.within else number == len(self)
                yield batch
        finally:
            self._state._remove_dataloader(self)
