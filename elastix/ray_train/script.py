"""The worker that a train loop runs on, and what Ray Train's functions do there.

These functions have no argument that says where they are called, so that is kept here. Ray Train is
not told about optimizers either, so the optimizers of the prepared models are found in memory.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastix.errors import ConfigError
from elastix.ray_train.reported_checkpoints import ReportedCheckpoints
from elastix.script_adapter import LoneScript
from elastix.train.replica.context import Context

PEER = "elastix.ray_train"
_now: "Script | None" = None


class TrainContext:
    """What `train.get_context()` returns: a world of one process.

    Attributes:
        ctx: elastix's own context, for `evaluate`, `accumulate` and the rest.
    """

    def __init__(self, ctx: Context, checkpoints: ReportedCheckpoints) -> None:
        self.ctx = ctx
        self._checkpoints = checkpoints

    def get_world_size(self) -> int:
        """Always 1, for any number of workers: batch sizes are those of the whole group."""
        return 1

    def get_world_rank(self) -> int:
        """This worker's rank, which may change with any step."""
        return self.ctx.rank if self.ctx.rank >= 0 else self.ctx.worker

    get_local_rank = get_world_rank
    get_local_world_size = get_world_size

    def get_node_rank(self) -> int:
        """Always 0."""
        return 0

    def get_experiment_name(self) -> str:
        """The run's name."""
        return self._checkpoints.directory.parent.name

    get_trial_name = get_experiment_name
    get_trial_id = get_experiment_name

    def get_trial_dir(self) -> str:
        """The directory of the run, which has its journal."""
        return str(self._checkpoints.directory.parent)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(f"train.get_context() has no {name} in elastix. Nothing was done.")


class Script(LoneScript):
    """One worker's train loop."""

    def __init__(self, ctx: Context, checkpoints: ReportedCheckpoints) -> None:
        super().__init__(ctx, PEER)
        self.context = TrainContext(ctx, checkpoints)
        self._checkpoints = checkpoints
        self._saved: list[int] = []  # after which steps, for each that was given no name

    def enter(self) -> None:
        """As LoneScript's, with the optimizers of the models, and a GradScaler if there is one.

        Raises:
            ConfigError: nobody could say which of several is which.
        """
        if not self.entered:
            gc.collect()  # none that the script has dropped
            everything = gc.get_objects()
            self.add(*_optimizers(everything, self._modules, self._known))
            self.add(*_scalers(everything, self._known))
        super().enter()

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Any,  # noqa: ANN401
        name: str | None,
        others: Mapping[str, Any],
    ) -> None:
        """See `elastix.ray_train.report`."""
        self.check_entered("train.report")
        if others:
            raise ConfigError(
                f"train.report got {', '.join(others)}, which elastix has nothing for. Nothing was "
                "reported. Checkpoints are copied before report returns; evaluate in the loop."
            )
        # Checked first: what is wrong with the metrics shall not leave a checkpoint behind.
        self.ctx.report(**metrics)
        path = self._checkpoints.path(name or self._next_name())
        write = None if checkpoint is None else self._checkpoints.writer(checkpoint, metrics)
        if not self.save(write, path):
            return
        if not name:
            self._saved.append(self.ctx.step)
        if self.ctx.rank == 0:
            self._checkpoints.retire(path)

    def _next_name(self) -> str:
        """After how many steps, and which of those that were reported then."""
        step = self.ctx.step
        before = self._saved.count(step)
        return f"checkpoint_{step:08d}" + (f"_{before + 1}" if before else "")

    def check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
        """Before the step of any optimizer.

        Raises:
            ConfigError: it is not one of the group's, or the last batch was not one to train on.
        """
        if not self.entered:
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called before a batch was drawn from a "
                "loader that train.torch.prepare_data_loader gave, so this worker is in no group "
                "and would train by itself. No step was made; the run ends. Give the DataLoader to "
                "train.torch.prepare_data_loader, and write the loop over epochs as `for epoch in "
                "loader.epochs(n):`."
            )
        if not any(optimizer is known for known in self._known):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called, and the group knows nothing of "
                "this optimizer: it was made after the first batch, or for a model that was not "
                "given to train.torch.prepare_model. No step was made; the run ends. Prepare all "
                "models, and make all optimizers, before the first batch."
            )
        self.check_backward()


def here(call: str) -> Script:
    """The script that is running in this process.

    Raises:
        ConfigError: none is.
    """
    if _now is None:
        raise ConfigError(
            f"train.{call} was called outside of a train loop. Nothing was done. Call it within "
            "the function that elastix.ray_train.torch.TorchTrainer is given."
        )
    return _now


@contextmanager
def running(ctx: Context, checkpoints: ReportedCheckpoints) -> Iterator[None]:
    """Within it `here` is the script of this worker."""
    global _now
    _now = Script(ctx, checkpoints)
    hook: Callable[..., None] = _now.check_step
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        _now = None


def _optimizers(
    everything: Sequence[Any], modules: Sequence[torch.nn.Module], known: Sequence[Any]
) -> list[torch.optim.Optimizer]:
    """Those of the modules' parameters, in the order of their first ones.

    Raises:
        ConfigError: two begin with the same one, so workers could mix them up.
    """
    parameters = (one for module in modules for one in module.parameters())
    place = {id(parameter): number for number, parameter in enumerate(parameters)}
    found: dict[int, torch.optim.Optimizer] = {}
    for other in everything:
        if not issubclass(type(other), torch.optim.Optimizer):
            continue
        if any(other is one for one in known):
            continue
        own = [place.get(id(one)) for group in other.param_groups for one in group["params"]]
        places = [number for number in own if number is not None]
        if not places:
            continue
        if min(places) in found:
            both = f"{type(found[min(places)]).__name__}, {type(other).__name__}"
            raise ConfigError(
                f"two optimizers ({both}) have the same parameters, and a joiner must be told "
                "which is which. Nothing was prepared. Name them before the first batch, as "
                "train.track(first=..., second=...)."
            )
        found[min(places)] = other
    return [found[number] for number in sorted(found)]


def _scalers(everything: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """The GradScaler, if there is one.

    Raises:
        ConfigError: there are several.
    """
    found = [
        one
        for one in everything
        if issubclass(type(one), torch.amp.GradScaler)
        and one.is_enabled()
        and not any(one is other for other in known)
    ]
    if len(found) > 1:
        raise ConfigError(
            f"there are {len(found)} GradScalers, and a joiner must be told which is which. "
            "Nothing was prepared. Use one, or name them with train.track(first=..., second=...)."
        )
    return found
