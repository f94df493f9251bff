"""Lightning Fabric on an elastic group.

    fabric = Fabric(strategy=elastix.fabric.Strategy(ctx))
    ...
    for epoch in train_loader.epochs(10):

Only these two lines of a Fabric script change. The first is in the train function, which has `ctx`
as its argument. The second replaces the loop over epochs, so that a joiner starts in the right one.

The script sees a world of one process: see docs/adapters.md. Needs the extra `fabric`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric.accelerators.accelerator import Accelerator
from lightning_fabric.plugins import CheckpointIO, Precision
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.strategies.dp import DataParallelStrategy
from lightning_fabric.strategies.strategy import Strategy as _Strategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from elastix.arguments import checked
from elastix.errors import ConfigError
from elastix.script_adapter import LoneLoader, LoneScript
from elastix.state import Stateful
from elastix.train.replica.context import Context

T = TypeVar("T")


@checked
class Strategy(_Strategy):
    """Pass it to Fabric as `strategy`.

    `fabric.setup` may be called several times. The worker joins the group when the first loader is
    used. Schedulers of an optimizer are found even if they were not set up. `fabric.backward`
    outside of `no_backward_sync` makes a step of the group.

    `fabric.all_reduce` by mean is the mean over the group. Other reductions, `all_gather` and
    `broadcast` return their argument, as in a world of one process, and raise a ConfigError if
    workers have different values. `fabric.save` writes a complete file, no matter which workers are
    lost meanwhile. Loggers run on the first worker.

    How many workers there are and on which devices is said to ElasticTrainer. `Fabric(devices=4)`,
    `num_nodes=2`, another `accelerator` than the workers have and a cluster environment raise a
    ConfigError.

    Args:
        ctx: the argument of the train function.
        accelerator, checkpoint_io, precision: as for Fabric's own strategies.

    Raises:
        ConfigError: `ctx` is not a Context, or a worker consists of several processes.
    """

    def __init__(
        self,
        ctx: Context,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision)
        self._script = LoneScript(ctx, "elastix.fabric.Strategy")
        self._backward_sync_control = _Accumulation(self._script)
        self._checked = False  # what the step in hand is about
        vars(rank_zero_only)["rank"] = ctx.worker  # whose loggers write, until there is a group

    def track(self, **objects: Stateful) -> None:
        """Add objects to the State, by name; see Context.track. Can be called at any time."""
        self._script.track(objects)

    # ------------------------------------------------------------------ where this worker is

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return self._script.ctx.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker has rank 0. That may change with any step."""
        return self._script.ctx.rank == 0

    @property
    def global_rank(self) -> int:
        """This worker's current rank; -1 if it is not in the group."""
        return self._script.ctx.rank

    local_rank = global_rank
    world_size = 1
    node_rank = 0

    # ------------------------------------------------------------------ what Fabric was asked for

    num_nodes = 1
    """Fabric looks for this name, and then tells the number it was given."""

    @property
    def _num_nodes(self) -> int:
        return 1

    @_num_nodes.setter
    def _num_nodes(self, asked: int) -> None:
        if asked != 1:
            raise _elsewhere(f"num_nodes={asked}", "ScalingConfig(num_workers=...)")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device of this worker."""
        return []  # Fabric would take what is in it for the number of processes

    @parallel_devices.setter
    def parallel_devices(self, asked: list[torch.device]) -> None:
        """Fabric tells what `devices` comes to; "auto" is all that this worker can see."""
        every = torch.cuda.device_count() if self.root_device.type == "cuda" else 1
        if len(asked) not in (1, every):
            raise _elsewhere(f"devices={len(asked)}", "ScalingConfig(num_workers=...)")

    @property
    def accelerator(self) -> Accelerator | None:
        """What Fabric's own strategies have."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        kind = type(accelerator).__name__.removesuffix("Accelerator").lower()
        if kind != self.root_device.type:
            raise ConfigError(
                f"Fabric was given or has chosen accelerator={kind!r}, and this worker computes on "
                f"{self.root_device}. Nothing was set up. Leave accelerator out, or say "
                f"accelerator={self.root_device.type!r}; ScalingConfig(gpus_per_worker=...) says "
                "what workers compute on."
            )
        self._accelerator = accelerator

    @property
    def cluster_environment(self) -> None:
        """None: workers find each other by themselves."""
        return

    @cluster_environment.setter
    def cluster_environment(self, asked: ClusterEnvironment) -> None:
        """Fabric tells what it was given as a plugin, or else what it has found by itself."""
        if not isinstance(asked, LightningEnvironment) and not type(asked).detect():
            raise _elsewhere(f"plugins={type(asked).__name__}()", "ScalingConfig")

    # ------------------------------------------------------------------ what is set up

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move the module to this worker's device."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Make it part of the State."""
        self._script.add(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make it part of the State, together with the gradient scaler of mixed precision."""
        self._script.add(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None:
            self._script.add(scaler)
        return optimizer

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scheduler: Any = None,  # noqa: ANN401 - as Fabric has it
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Make all of them part of the State."""
        found = super().setup_module_and_optimizers(module, optimizers, scheduler)
        if scheduler is not None:
            self._script.add(scheduler)
        return found

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader with `epochs`, the loop to train in; see LoneLoader."""
        loader = LoneLoader(dataloader, self._script)
        vars(loader)["epochs"] = loader.epochs  # Fabric's wrapper takes over what is in vars
        return loader  # type: ignore[return-value]

    # ------------------------------------------------------------------ a step

    def backward(
        self,
        tensor: torch.Tensor,
        module: torch.nn.Module | None,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Backward pass of a loss that is a mean over the batch.

        Raises:
            ConfigError: the last batch was not drawn within `loader.epochs`.
        """
        self._look_at_batch()
        self._checked = True
        super().backward(tensor, module, *args, **kwargs)

    def _look_at_batch(self) -> None:
        self._script.check_backward()
        vars(rank_zero_only)["rank"] = self._script.ctx.rank

    def _before_step(self, *_: Any) -> None:  # noqa: ANN401
        if not self._checked:  # after loss.backward()
            self._look_at_batch()
        self._checked = False

    # ------------------------------------------------------------------ what others have

    def all_reduce(
        self,
        tensor: T,
        group: Any = None,  # noqa: ANN401
        reduce_op: Any = "mean",  # noqa: ANN401
    ) -> T:
        """Reduce by mean over the group. Other reductions return the value that all workers have.

        Raises:
            ConfigError: workers have different values, and it is not a mean.
        """
        del group
        if str(getattr(reduce_op, "name", reduce_op)).lower() in ("mean", "avg", "none"):
            return self._script.mean(tensor)
        return self._script.same(tensor, f"fabric.all_reduce(reduce_op={reduce_op!r})")

    def all_gather(
        self,
        tensor: torch.Tensor,
        group: Any = None,  # noqa: ANN401
        sync_grads: bool = False,
    ) -> torch.Tensor:
        """Return the tensor, as in a world of one process.

        Raises:
            ConfigError: workers have different values.
        """
        del group, sync_grads
        return self._script.same(tensor, "fabric.all_gather")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object.

        Raises:
            ConfigError: workers have different objects, or `src` is not 0.
        """
        if src != 0:
            raise ConfigError(
                f"fabric.broadcast(src={src}): there is rank 0 only. Nothing was sent. Use src=0."
            )
        return self._script.same(obj, "fabric.broadcast")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all members of the group."""
        del name
        self._script.check_entered("fabric.barrier")
        self._script.ctx.mean(barrier=0.0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return the decision, which must be the same on all workers.

        Raises:
            ConfigError: it is not.
        """
        del all
        return self._script.same(decision, "a decision of all")

    # ------------------------------------------------------------------ files

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,  # noqa: ANN401
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002
    ) -> None:
        """Save on the first worker, and again on the next one if that is lost meanwhile.

        The file is for use elsewhere. A continued run starts from what CheckpointConfig stored.
        """
        save = super().save_checkpoint
        self._script.save(lambda to: save(to, state, storage_options, filter), Path(path))

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,  # noqa: ANN401
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load weights to start a new run with, before the first loader is used.

        Raises:
            ConfigError: a loader was used already, so this worker has the State of the group.
        """
        if self._script.entered:
            raise ConfigError(
                "fabric.load was called after a loader was used. Nothing was loaded: this worker "
                "has the State of its group, which would differ from now on. Load before the first "
                "epoch. A run that is continued goes on from its own States by itself; "
                "RestoreConfig(step=...) goes back to an earlier one."
            )
        return super().load_checkpoint(path, state, strict, weights_only)


# Of strategies of several processes Fabric wants `launch` called first, which a script for one
# process, or for `fabric run`, does not do. This class means nothing else to it.
DataParallelStrategy.register(Strategy)

# Where a strategy has a `backward` of its own, Fabric refuses torch.autograd.grad and
# loss.backward(). It looks behind wrappers for that, so this one passes for what it extends.
vars(Strategy.backward)["__wrapped__"] = _Strategy.backward


def _elsewhere(asked: str, instead: str) -> ConfigError:
    return ConfigError(
        f"Fabric was given {asked}. Nothing was set up: each worker is one process with one "
        f"device, and Fabric does not start it. Leave it out; {instead}, an argument of "
        "ElasticTrainer, says how many workers there are."
    )


class _Accumulation(_BackwardSyncControl):
    def __init__(self, script: LoneScript) -> None:
        self._script = script

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        del module
        self._script.enter()
        return self._script.ctx.accumulate() if enabled else nullcontext()
