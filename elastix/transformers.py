"""Hugging Face's Trainer on an elastic group.

    from elastix.transformers import Trainer, TrainingArguments
    ...
    trainer = Trainer(ctx, model=model, args=args, train_dataset=dataset)

These two lines of a script change; the second stands in the train function, which is given ctx.

Accumulation is what the group shares. A script that asks for `per_device_train_batch_size=4` and
`gradient_accumulation_steps=8` takes steps of 32 samples in 8 parts of 4, on one process as on any
number of workers. Here the parts are the slices of a batch (see `ctx.loader`): each worker computes
some of them, and those of a lost worker are computed by the others in the same step. So a step
never becomes smaller and an epoch never longer, which Trainer's loop relies on.

What a worker has to know of the parts that others compute (the items that the loss is divided by,
the loss itself, tokens) is added up with the gradients; see `_Told`. Needs the extra
`transformers`.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import transformers
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer as _Trainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from elastix import whole_files
from elastix.arguments import (
    check_value,
    checked,
    is_whole,
    of_kind,
    require,
    with_arguments_of,
)
from elastix.comm.gradients.buckets import keep_whole
from elastix.errors import ConfigError
from elastix.script_adapter import LoneLoader, LoneScript, digest
from elastix.state import Stateful
from elastix.train.replica.context import Context
from elastix.train.replica.sliced_step import Step

__all__ = ["Trainer", "TrainingArguments"]
_PEER = "elastix.transformers.Trainer"
_TINY = 2.0**-64  # a power of two: exact. The norm of all gradients must not show what is told
_MOST = 8  # parts of a batch that the script does not cut itself
_PROBES = 16  # slices looked at to find out what the loss is divided by

_REFUSED: Mapping[str, str] = {
    "deepspeed": "Each worker has a whole replica; see docs/large-models.md",
    "fsdp": "Each worker has a whole replica; see docs/large-models.md",
    "parallelism_config": "Each worker has a whole replica; see docs/large-models.md",
    "auto_find_batch_size": "Workers would find different ones. Choose one",
    "load_best_model_at_end": (
        'CheckpointConfig(best="eval_loss", mode="min", keep_best=1) keeps the best State, and '
        "Result.model(build, best=True) gives the best model"
    ),
    "push_to_hub": "Push the model of the Result after the run",
    "enable_jit_checkpoint": "Workers that are told to leave do so by themselves",
    "save_on_each_node": "Checkpoints are written once, by the first worker",
}


_HOOKS = (
    "set_initial_training_values",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_evaluate",
    "loss_is_scaled_for_ga",
)
"""What Trainer's loop must call and look at, or the workers would train apart from each other."""

if missing := [name for name in _HOOKS if not hasattr(_Trainer, name)]:
    raise ImportError(
        f"elastix.transformers does not work with transformers {transformers.__version__}, whose "
        f"Trainer has no {missing[0]}. Install one that does: pip install 'elastix[transformers]'"
    )


class _Told(torch.nn.Module):
    """What each slice tells the whole group: as gradients of parameters that are always zero.

    They are added up with the model's own gradients, so they are as exact as these whoever is
    lost: the slices of the batch count once each, and a joiner that follows from outside has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = keep_whole(torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)))

    def add(self, loss: torch.Tensor, *numbers: torch.Tensor | float) -> torch.Tensor:
        """The same loss; its backward pass tells its value, and these numbers."""
        values = [loss.detach(), *numbers]
        told = torch.stack([torch.as_tensor(v).to(self.numbers) for v in values])
        return loss + (self.numbers * (_TINY * told)).sum().to(loss.dtype)

    @property
    def nothing(self) -> bool:
        """Whether the group has taken the step back: gradients are zeros, or as of an overflow."""
        told = self.numbers.grad
        return told is None or not bool(told[1].isfinite() & told.any())

    def take(self, scale: float) -> torch.Tensor:
        """Means over the samples of the batch of what was told in it."""
        told = self.numbers.grad
        self.numbers.grad = None
        return torch.zeros_like(self.numbers) if told is None else told / (scale * _TINY)


class Trainer(_Trainer):  # type: ignore[misc]
    """Hugging Face's, with the train function's ctx as its first argument.

    The script sees a world of one process, as with every adapter: see docs/adapters.md. `evaluate`
    and `predict` have all samples on every worker. Checkpoints and `save_model` are written by the
    first worker, whole or not at all, for use elsewhere: a run goes on from its own States.
    Everything that is logged is reported too.

    Args:
        ctx: of the train function.
        arguments: as Trainer has them; `args` is copied.

    Raises:
        ConfigError: `ctx` is no Context, its worker is several processes, or `args` has something
            that a group cannot do.
    """

    @checked
    @with_arguments_of(_Trainer.__init__)
    def __init__(self, ctx: Context, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        self._script = LoneScript(ctx, _PEER)
        bound = inspect.signature(_Trainer.__init__).bind(self, *arguments, **named).arguments
        bound.pop("self")
        given = bound.get("args") or TrainingArguments(output_dir="tmp_trainer")
        _check(given, ctx)
        args = copy.copy(given)
        args.per_device_train_batch_size *= args.gradient_accumulation_steps
        self._slices = _slices(given.gradient_accumulation_steps, args.per_device_train_batch_size)
        self._slice_size = args.per_device_train_batch_size // self._slices
        self._part = given.per_device_train_batch_size  # samples of what the script accumulates
        args.gradient_accumulation_steps = 1
        self._told = _Told()
        self._loader: _Steps | None = None
        self._epochs: Iterator[int] = iter(())
        self._begun = False  # the epoch that comes next
        self._prepared: Any = None
        self._counts_items = False  # the loss is divided by num_items_in_batch
        self._samples = 0  # of the slice in hand
        self._items: torch.Tensor | float = 0.0
        self._inputs: dict[str, Any] = {}
        self._flos = self._tokens = 0.0  # of the last step
        self._writing: str | None = None
        super().__init__(**{**bound, "args": args})
        for shown_by_elastix in (ProgressCallback, PrinterCallback):
            self.remove_callback(shown_by_elastix)
        self._progress = _Progress(self)
        self.callback_handler.callbacks.insert(0, self._progress)

    def track(self, **objects: Stateful) -> None:
        """Further objects of the State, by name; see Context.track. At any time."""
        self._script.track(objects)

    # ------------------------------------------------------------------ where this worker is

    def is_world_process_zero(self) -> bool:
        """Whether this worker is the first one now; that may change with any step."""
        ctx = self._script.ctx
        return (ctx.rank if ctx.rank >= 0 else ctx.worker) == 0

    is_local_process_zero = is_world_process_zero

    # ------------------------------------------------------------------ entering the group

    def create_accelerator_and_postprocess(self) -> None:
        """Its backward passes tell the group what they are about."""
        super().create_accelerator_and_postprocess()
        self._own_backward = self.accelerator.backward
        self.accelerator.backward = self._backward

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Its batches are steps: each worker has some slices of each.

        Raises:
            ConfigError: it draws its samples in a way that a group cannot share.
        """
        self.accelerator.prepare = lambda loader: loader
        try:
            loader = super().get_train_dataloader()
        finally:
            del self.accelerator.prepare
        self._loader = _Steps(loader, self._script, self._slices, self.args.data_seed)
        return self._loader  # type: ignore[return-value]

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,  # noqa: ANN401
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As Trainer's. A run that is continued goes on where it was, by itself.

        Raises:
            ConfigError: called twice, for a trial, or with a checkpoint to resume from.
        """
        if resume_from_checkpoint or trial is not None:
            raise ConfigError(
                f"{_PEER}.train got "
                + ("a trial" if trial is not None else "resume_from_checkpoint")
                + ". Nothing was trained. A run that is continued goes on from its own States by "
                "itself, RestoreConfig(step=...) goes back to an earlier one, and elastix.Campaign "
                "searches."
            )
        if self._script.entered:
            raise ConfigError(
                f"{_PEER}.train was called a second time. Nothing was trained. A run is one call "
                "of it: give num_train_epochs, or make another run that begins with its State."
            )
        found: TrainOutput = super().train(None, None, ignore_keys_for_eval)
        return found

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Is not there.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{_PEER}.hyperparameter_search: nothing was done. Use elastix.Campaign.")

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:  # noqa: ANN401
        """As Trainer's, whose loop is about to train on this loader.

        Raises:
            ConfigError: it is another one than the group shares out.
        """
        if self._loader is None or dataloader is not self._loader:
            raise ConfigError(
                f"get_train_dataloader of a subclass of {_PEER} did not return what that of "
                f"{_PEER} returns, but a {type(dataloader).__name__}, and nobody could share out "
                "what it reads. Nothing was trained. Override train_dataset or data_collator "
                "instead."
            )
        return super().set_initial_training_values(args, dataloader, *more)

    def _init_training_state(self, max_steps: int, *more: Any) -> tuple[int, int]:  # noqa: ANN401
        """Counters at zero, or the group's; which epoch it is in."""
        super()._init_training_state(max_steps, *more)
        loader = cast("_Steps", self._loader)  # as set_initial_training_values has seen
        self._prepared = super()._prepare_for_training(max_steps, loader, None)
        if not isinstance(loader.dataset, IterableDataset):  # refused where the epochs begin
            self._counts_items = self._looks_whether_items_count(loader)
            if self._part > self._slice_size:
                self._check_cut(loader)
        scaler = [] if self.accelerator.scaler is None else [self.accelerator.scaler]
        optimizer = self.optimizer.optimizer
        self._script.add(self.model, self._told, optimizer, self.lr_scheduler, *scaler)
        self._script.track({"trainer": self._progress})
        self._epochs = loader.epochs(self.state.num_train_epochs)
        self._begun = (first := next(self._epochs, None)) is not None
        return self.state.num_train_epochs if first is None else first, 0

    def _prepare_for_training(self, *_: Any) -> Any:  # noqa: ANN401
        return self._prepared

    def _run_epoch(self, **settings: Any) -> None:  # noqa: ANN401
        if not self._begun and next(self._epochs, None) is None:
            return
        self._begun = False
        super()._run_epoch(**settings)

    # ------------------------------------------------------------------ a step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The next step, as the one batch that Trainer's loop is to train on."""
        del num_batches, device
        step = next(epoch_iterator, None)
        return [] if step is None else [step], None

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: "_Batch",
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Compute this worker's slices; the loss of the whole batch, equal on all workers."""
        del num_items_in_batch
        self.current_gradient_accumulation_steps = 1
        items_are_known = self._compute(model, inputs)
        while self._told.nothing:
            # Trainer counts its steps, so it is not told of this one: the next in its place.
            model.zero_grad()
            self._told.numbers.grad = None
            following = None if self._loader is None else next(self._loader.steps, None)
            if following is None:
                return torch.tensor(math.nan, device=self.args.device)
            inputs = following
            items_are_known = self._compute(model, inputs)
        divided_by_parts = self._divides_by_parts(items_are_known)
        scaler = self.accelerator.scaler
        loss, items, tokens, flos = self._told.take(1.0 if scaler is None else scaler.get_scale())
        parts = -(-inputs.samples // self._part)
        if self._counts_items:  # from the mean over samples to the mean over items
            divisor = float(items) * (parts if divided_by_parts else 1)
        else:  # the mean over the parts, of which Trainer may make a sum
            divisor = 1.0 if divided_by_parts else 1 / parts
        if divisor != 1:
            loss = loss / divisor
            torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], divisor)
        self._tokens, self._flos = (float(number) * inputs.samples for number in (tokens, flos))
        told: torch.Tensor = loss.to(self.args.device, torch.float32)
        return told

    def _compute(self, model: torch.nn.Module, inputs: "_Batch") -> bool:
        """This worker's slices; whether it is known what the loss is to be divided by."""
        items: Any = None
        for self._samples, slice_ in inputs.step:
            self._inputs = dict(slice_)
            items = self._get_num_items_in_batch([slice_], self.args.device)
            per_sample = self._counts_items and items is not None
            self._items = torch.as_tensor(items).double() / self._samples if per_sample else 1.0
            samples = torch.tensor(self._samples, device=self.args.device)
            super().training_step(model, slice_, samples if items is not None else None)
        return items is not None

    def _backward(self, loss: torch.Tensor, **settings: Any) -> None:  # noqa: ANN401
        """Of one slice, with what it tells the group."""
        if not self._script.entered:
            raise ConfigError(
                f"a backward pass was asked for within compute_loss of a subclass of {_PEER}. "
                "Nothing was trained. Have it return the sum of its losses: each part of a batch "
                "has one backward pass, which Trainer makes."
            )
        self._script.check_backward()
        flos = super().floating_point_ops(self._inputs)
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(self._inputs)
        tokens, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen - before, before
        numbers = (self._items, tokens / self._samples, flos / self._samples)
        self._own_backward(self._told.add(loss, *numbers), **settings)

    def floating_point_ops(self, inputs: Any) -> float:  # noqa: ANN401
        """Of the whole batch."""
        if isinstance(inputs, _Batch):
            return self._flos
        return float(super().floating_point_ops(inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:  # noqa: ANN401
        self.state.num_input_tokens_seen += round(self._tokens)

    def _divides_by_parts(self, items_are_known: bool) -> bool:
        """Whether Trainer takes the mean of what it accumulates, and not the sum.

        It takes the sum where it expects the loss to be divided by all items of the batch, even if
        an overridden compute_loss does not do so.
        """
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items_are_known) or self.compute_loss_func
        return not scaled

    def _looks_whether_items_count(self, loader: "_Steps") -> bool:
        """Whether the loss is divided by num_items_in_batch; else it is a mean over its slice.

        A slice's loss is divided by its samples first, and by the items of the batch when all are
        known. That is right only if nothing else is in the loss. All workers look at the same
        samples with the same weights.

        Raises:
            ConfigError: a part of the loss is divided by it, and another one is not.
        """
        for samples in loader.probes(self._slice_size):
            inputs = self._prepare_inputs(loader.collate(samples))
            if self._get_num_items_in_batch([inputs], self.args.device) is None:
                return False
            once, half = (
                self._loss_over(inputs, items) for items in (len(samples), 2 * len(samples))
            )
            if not math.isfinite(once) or once == 0:
                continue  # nothing to learn from it
            if math.isclose(once, half, rel_tol=1e-5):
                return False
            if not math.isclose(once, 2 * half, rel_tol=1e-5):
                raise ConfigError(
                    "a part of this model's loss is divided by num_items_in_batch, and another "
                    f"one is not: {once:.6g} for {len(samples)} items, {half:.6g} for twice as "
                    "many. No batch has all of its items on one worker, so nobody could say what "
                    "each part has to be divided by. Nothing was trained. Leave the other part "
                    "out (output_router_logits=False, say), or override compute_loss so that it "
                    "gives the mean over its batch and leaves num_items_in_batch alone."
                )
            return True
        return True

    def _check_cut(self, loader: "_Steps") -> None:
        """Raise if it matters that a batch is cut, which the script did not ask for.

        Raises:
            ConfigError: a batch norm layer would see less at a time; or the loss of some samples is
                not made of the losses of their parts.
        """
        found = self._differs_if_cut(loader)
        if found:
            raise ConfigError(
                f"{_PEER} got gradient_accumulation_steps=1, so it would cut each batch of "
                f"{self._part} samples into {self._slices} parts for the workers; but with this "
                f"model that is not the same: {found}. Nothing was trained. Say what the parts "
                f"are: per_device_train_batch_size={self._slice_size} and "
                f"gradient_accumulation_steps={self._slices} train as Trainer does with these. Or "
                "have the loss be a sum over the batch divided by num_items_in_batch."
            )

    def _differs_if_cut(self, loader: "_Steps") -> str | None:
        """What is another thing for parts of a batch; None if nothing was found."""
        for layer in self.model.modules():
            if isinstance(layer, _BatchNorm):
                return f"a {type(layer).__name__} would see one part at a time"
        kinds = {parameter.dtype for parameter in self.model.parameters()}
        low = self.args.bf16 or self.args.fp16 or kinds & {torch.bfloat16, torch.float16}
        rough = 3e-2 if low else 1e-4  # two losses that are the same but for rounding
        probes = loader.probes(self._slice_size)
        for one, other in zip(probes, probes, strict=False):
            parts = [loader.collate(one), loader.collate(other)]
            whole = _joined(*parts)
            if whole is None:
                both = loader.collate([*one, *other])
                whole = both if digest(loader.collate(one)) == digest(parts[0]) else None
            if whole is None or len(one) != len(other):
                continue  # the collator draws random numbers: there is no telling
            losses = [self._loss_over(self._prepare_inputs(part), 1) for part in (*parts, whole)]
            sum_ = (losses[0] + losses[1]) / (1 if self._counts_items else 2)
            if math.isfinite(sum_) and not math.isclose(losses[2], sum_, rel_tol=rough):
                return (
                    f"the loss of {2 * len(one)} samples is {losses[2]:.6g}, and {sum_:.6g} if it "
                    f"is put together from two parts of {len(one)}"
                )
        return None

    def _loss_over(self, inputs: Mapping[str, Any], items: int) -> float:
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng(), self.compute_loss_context_manager():
            divisor = torch.tensor(items, device=self.args.device)
            return float(self.compute_loss(self.model, dict(inputs), num_items_in_batch=divisor))

    # ------------------------------------------------------------------ what is told and saved

    def _evaluate(
        self,
        trial: Any,  # noqa: ANN401
        ignore_keys_for_eval: list[str] | None,
        skip_scheduler: bool = False,
    ) -> dict[str, float]:
        """As Trainer's; before the first step (eval_on_start) only if the group has not done so."""
        if skip_scheduler:
            if self._progress.evaluated_on_start:
                return {}
            self._progress.evaluated_on_start = True
        found: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Reported too, once this worker is in a group."""
        super().log(logs, start_time)
        kinds = (int, float, np.number)
        numbers = {name: value for name, value in logs.items() if isinstance(value, kinds)}
        if self._script.entered:
            self._script.ctx.report(**numbers)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Written by the first worker, and by the next one if that is lost meanwhile. Collective.

        Raises:
            ConfigError: called before `train`.
        """
        if self._writing is not None:
            super().save_model(output_dir, _internal_call)
            return
        save = super().save_model
        folder = Path(output_dir or self.args.output_dir)  # which also has Trainer's checkpoints
        self._script.save(lambda to: save(str(to)), folder, whole_files.add)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:  # noqa: ANN401
        """As `save_model`, with all that Trainer writes down."""
        name = f"checkpoint-{self.state.global_step}"
        save = super()._save_checkpoint
        self.store_flos()

        def write(to: Path) -> None:
            self._writing = str(to)
            try:
                save(model, trial)
            finally:
                self._writing = self.state.best_model_checkpoint = None
            for entry in list((to / name).iterdir()):
                entry.rename(to / entry.name)
            (to / name).rmdir()

        self._script.save(write, Path(self.args.output_dir) / name)
        if self.is_world_process_zero():
            rotate_checkpoints(self.args.output_dir, save_total_limit=self.args.save_total_limit)

    def _get_output_dir(self, trial: Any) -> str:  # noqa: ANN401
        return self._writing or str(super()._get_output_dir(trial))


class _Batch:
    """A step of the group, in Trainer's hands.

    Attributes:
        step: to be iterated over for this worker's slices, each with its number of samples.
        samples: of all slices.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.samples = sum(step.draw.samples)

    def _is_no_batch(self, *_: Any) -> NoReturn:  # noqa: ANN401
        raise ConfigError(
            f"training_step of a subclass of {_PEER} used its inputs as a batch, and they are a "
            "whole step of the group. The run ends. Call super().training_step with them as they "
            "are, and override compute_loss, which is given one part of the batch after the other."
        )

    __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = _is_no_batch
    keys = items = values = get = pop = to = _is_no_batch


class _Steps(LoneLoader):
    """The loader that Trainer's loop is given. It yields a `_Batch` for each step.

    Attributes:
        collate: what the script collates with.
        drawn: how many steps this worker has had of the epoch.
        steps: of the epoch, as they are drawn.
    """

    def __init__(
        self, loader: DataLoader[Any], script: LoneScript, slices: int, seed: int | None
    ) -> None:
        super().__init__(loader, script)
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self.drawn = 0
        self.steps: Iterator[_Batch] = iter(())
        if isinstance(self._options, dict):
            counted = _Counted(self.collate)
            self._options = {**self._options, "slices": slices, "collate_fn": counted}
            if seed is not None:
                self._options["seed"] = seed

    def probes(self, size: int) -> Iterator[list[Any]]:
        """Up to `_PROBES` lists of `size` samples, from all over the dataset."""
        dataset = cast("Any", self.dataset)
        ends = range(size, len(dataset) + 1, max(size, len(dataset) // _PROBES))
        for end in ends[:_PROBES] or [len(dataset)]:
            yield [dataset[place] for place in range(max(0, end - size), end)]

    @property
    def place(self) -> float:
        """Epochs that are behind, and how much of the one in progress."""
        epoch = 0 if self._shared is None else self._shared.epoch
        return epoch + (len(self) - self.left) / len(self)

    def __iter__(self) -> Iterator[Any]:
        self.steps = self._draw()
        return self.steps

    def come_to_end(self) -> None:
        """Find that the epoch has no batch left, before anything is done that is no step of it.

        Trainer's loop counts its steps, so a worker that was there for the whole epoch does not
        look for one more, and a worker that joined in it does. All must be between the same two
        steps then, in the same epoch: States are compared and stored there.
        """
        if self.left == 0:
            next(self.steps, None)

    def _draw(self) -> Iterator["_Batch"]:
        self.drawn = 0
        for step in self._shared or ():
            self._script.trains = True
            self.drawn += 1
            yield _Batch(step)


class _Counted:
    """A batch with its number of samples, which its tensors need not show."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


class _Progress(TrainerCallback):  # type: ignore[misc]
    """What Trainer counts, as a part of the State: a joiner goes on in the middle of an epoch.

    It is the first callback, so that the others find what it sets. What is told to one worker alone
    (`log_history`, times) is not in it: replicas are compared.
    """

    _COUNTS = ("global_step", "best_metric", "best_global_step", "num_input_tokens_seen")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}
        self.evaluated_on_start = False

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        best = trainer.state.best_metric
        return {
            **{name: getattr(trainer.state, name) for name in self._COUNTS},
            "best_metric": None if best is None else float(best),
            "flos": [float(trainer.state.total_flos), float(trainer.current_flos)],
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "logged": getattr(trainer, "_globalstep_last_logged", 0),
            "callbacks": [callback.state()["attributes"] for callback in self._stateful()],
            "stops": bool(trainer.control.should_training_stop),
            "evaluated_on_start": self.evaluated_on_start,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer, self._loaded = self._trainer, state_dict
        for name in self._COUNTS:
            setattr(trainer.state, name, state_dict[name])
        for callback, attributes in zip(self._stateful(), state_dict["callbacks"], strict=True):
            vars(callback).update(attributes)
        self.evaluated_on_start = state_dict["evaluated_on_start"]
        self._put_back()

    def _stateful(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]

    def _put_back(self) -> None:
        """Trainer sets these to zero when it begins."""
        trainer, loaded = self._trainer, self._loaded
        trainer.state.total_flos, trainer.current_flos = loaded["flos"]
        trainer._tr_loss = torch.tensor(loaded["loss"], device=trainer.args.device)
        trainer._total_loss_scalar = loaded["total_loss"]
        trainer._globalstep_last_logged = loaded["logged"]

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - as Trainer calls it
        if self._loaded:
            self._put_back()
        self._trainer._initial_global_step = 0

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,  # noqa: ANN401
    ) -> None:
        del args, control
        if (loader := self._trainer._loader) is not None:
            state.epoch = loader.place

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """A worker that enters when its epoch has no batch left does not stop because of that."""
        del args
        if (loader := self._trainer._loader) is None:
            return
        loader.come_to_end()
        if not loader.drawn:
            stops = self._loaded.get("stops", False)  # the others' callbacks, in the last step
            control.should_training_stop = stops or state.global_step >= state.max_steps
            state.epoch = loader.place


def _joined(one: Any, other: Any) -> Mapping[str, torch.Tensor] | None:  # noqa: ANN401
    """Both batches as one, with the very samples that are in them; None if they do not fit."""
    if not isinstance(one, Mapping) or one.keys() != other.keys():
        return None
    pairs = {name: (one[name], other[name]) for name in one}
    for pair in pairs.values():
        if not all(isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in pair):
            return None
        if pair[0].shape[1:] != pair[1].shape[1:]:
            return None
    return {name: torch.cat(pair) for name, pair in pairs.items()}


def _slices(accumulation: int, batch_size: int) -> int:
    """Into how many parts a batch is cut: those that are accumulated anyway, or else up to eight.

    Raises:
        ConfigError: it cannot be cut.
    """
    parts = (
        accumulation
        if accumulation > 1
        else max(number for number in range(1, _MOST + 1) if batch_size % number == 0)
    )
    if parts == 1 < batch_size:
        raise ConfigError(
            f"{_PEER} got batches of {batch_size} samples in one piece, which cannot be cut into "
            "equal parts for several workers. Nothing was set up. Say how: a "
            "per_device_train_batch_size of a part, and gradient_accumulation_steps for how many "
            "parts make a step."
        )
    return parts


def _check(args: TrainingArguments, ctx: Context) -> None:
    """Raise if there is something among the arguments that a group cannot do."""
    of_kind("args", args, TrainingArguments)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        value = getattr(args, name)
        require(
            is_whole(value, 1),
            f"{_PEER} got TrainingArguments({name}={value!r}). Nothing was set up. It must be a "
            "whole number >= 1.",
        )
    accelerate: Any = args.accelerator_config
    require(
        "num_steps" not in (accelerate.gradient_accumulation_kwargs or {}),
        f"{_PEER} got accelerator_config with num_steps. Nothing was set up. Say it as "
        "gradient_accumulation_steps.",
    )
    check_value("TrainingArguments", "max_steps", int, args.max_steps)
    check_value("TrainingArguments", "num_train_epochs", float, args.num_train_epochs)
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"{_PEER} got TrainingArguments({name}={getattr(args, name)!r}). Nothing was set "
                f"up. {instead}."
            )
    if any(word in str(args.optim).lower() for word in ("lomo", "layerwise")):
        raise ConfigError(
            f"{_PEER} got optim={str(args.optim)!r}, which changes parameters within the backward "
            "pass, before the group has agreed on it. Nothing was set up. Use another one."
        )
    if args.n_gpu > 1 or args.device.type != ctx.device.type:
        raise ConfigError(
            f"{_PEER}: the TrainingArguments are for {args.device} and {args.n_gpu} GPUs, and this "
            f"worker has {ctx.device}. Nothing was set up. Make them within the train function; "
            "use_cpu=True keeps to the CPU."
        )
