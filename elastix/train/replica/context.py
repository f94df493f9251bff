"""What the train function sees. Everything behind it is a Replica: a member."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, TypeVarTuple, cast, overload

import torch
from torch.utils.data import Dataset, default_collate

from elastix.arguments import check_value, checked, closest, require, single
from elastix.comm.network.crew_world import DeviceMesh
from elastix.compiled_modules import plain
from elastix.data.loader import Loader
from elastix.data.rehearsal import Rehearsal
from elastix.data.source import Augment, Collate, Source
from elastix.errors import ConfigError
from elastix.state import Stateful
from elastix.train.replica.evaluation import Metric
from elastix.train.replica.learning_rate import RateScaling, Rule

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _RunSettings(Protocol):
    @property
    def run(self) -> str: ...

    @property
    def seed_of_order(self) -> int: ...

    @property
    def alone(self) -> bool: ...

    @property
    def exact(self) -> bool: ...

    @property
    def steps_alone(self) -> bool: ...


class Replica(Protocol):
    """What a context needs of the worker behind it: a Member, or one that replays a run.

    The methods are those of Context with its arguments checked; all are called in the training
    thread.
    """

    me: int
    device: torch.device

    @property
    def step(self) -> int:
        """How many steps count."""
        ...

    @property
    def mesh(self) -> DeviceMesh | None:
        """Of the processes of this worker."""
        ...

    @property
    def place(self) -> int:
        """Of this process in the mesh."""
        ...

    @property
    def settings(self) -> _RunSettings:
        """`alone`: nobody else trains, so metrics may be what one worker says."""
        ...

    @property
    def prepared(self) -> bool:
        """Whether `prepare` was called."""
        ...

    @property
    def rank(self) -> int:
        """Place in the group; -1 outside."""
        ...

    @property
    def world_size(self) -> int:
        """Members of the group."""
        ...

    @property
    def generation(self) -> int:
        """Version of the membership."""
        ...

    def prepare(self, objects: Sequence[Any]) -> None:
        """Take in model, optimizer and the rest, and enter the group."""
        ...

    def inherit(
        self, model: torch.nn.Module, rehearsal: Rehearsal | None
    ) -> Mapping[str, Any] | None:
        """Copy tensors of an ancestor; what was copied."""
        ...

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """Make further objects part of the State."""
        ...

    def open_loader(self, source: Source) -> Any:  # noqa: ANN401
        """A Loader, or what stands in for one."""
        ...

    def scale_rate(self, scaling: RateScaling) -> None:
        """Let learning rates follow the group's size."""
        ...

    def accumulate(self) -> AbstractContextManager[None]:
        """Defer the step."""
        ...

    def backward(self) -> AbstractContextManager[None]:
        """Take the step at its exit."""
        ...

    def boundary(self) -> None:
        """Between two steps."""
        ...

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
        microbatch: int | None = None,
    ) -> dict[str, float]:
        """Metrics over a dataset that the group shares out."""
        ...

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients by the norm of the whole model; that norm."""
        ...

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Means over the group."""
        ...

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Hand metrics to the journal."""
        ...

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """Call `listener` at each phase from now on."""
        ...


class Context:
    """The one argument of a train function.

    `rank`, `world_size`, `generation` and `step` are read live and may change with any step. All
    workers must make the same calls on the context in the same order.

    Attributes:
        config: what ElasticTrainer was given as `config`.
    """

    def __init__(self, member: Replica, config: Mapping[str, Any]) -> None:
        self.config = config
        self._member = member

    @property
    def run(self) -> str:
        """The run's name; a trial of a search is a run of its own."""
        return self._member.settings.run

    @property
    def rank(self) -> int:
        """Place of this worker in the group, from 0; -1 before prepare and for a joiner outside."""
        return self._member.rank

    @property
    def worker(self) -> int:
        """Id of this worker, which never changes; founders have their first ranks."""
        return self._member.me

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of this worker's processes, for what shards a model: ctx.mesh["shard"].

        None if the worker is one process; see ScalingConfig.crew.
        """
        return self._member.mesh

    @property
    def place(self) -> int:
        """Place of this process in its worker's mesh, from 0."""
        return self._member.place

    @property
    def steps_alone(self) -> bool:
        """Whether workers take steps by themselves; see ExchangeConfig.every_steps."""
        return self._member.settings.steps_alone

    @property
    def seed_of_order(self) -> int:
        """Of the order of samples in a loader that is given no seed."""
        return self._member.settings.seed_of_order

    @property
    def world_size(self) -> int:
        """Workers in the group; 0 before prepare."""
        return self._member.world_size

    @property
    def generation(self) -> int:
        """Version of the group's membership, from 1; 0 before prepare."""
        return self._member.generation

    @property
    def step(self) -> int:
        """Steps committed so far, over restarts too. Use it instead of a counter of your own."""
        return self._member.step

    @property
    def device(self) -> torch.device:
        """Where prepare moves models and the loader moves batches."""
        return self._member.device

    @overload
    def prepare(self, only: T, /) -> T: ...
    @overload
    def prepare(self, *objects: *Ts) -> tuple[*Ts]: ...
    def prepare(self, *objects: Any) -> Any:  # type: ignore[misc]
        """Join the group with a model, its optimizer, and whatever belongs to the State.

        The same objects come back, not wrappers. Modules are moved to the device, their gradients
        averaged in `backward`, their buffers kept equal. Gradients of an earlier pass are dropped,
        since a worker that joins would add them once more. Optimizers, schedulers, scalers and any
        other object with state_dict and load_state_dict become part of the State. The first
        module is the main one: its tensors keep their plain names.

        Collective. Blocks until the group has formed, or let this worker in.

        Raises:
            ConfigError: no module, an optimizer of other parameters, an object without a
                state_dict, or parameters that differ between workers (names the first).
        """
        self._member.prepare(list(map(_without_compiler, objects)))
        return objects if len(objects) > 1 else objects[0]

    def inherit(
        self, model: torch.nn.Module, rehearsal: Rehearsal | None = None
    ) -> Mapping[str, Any] | None:
        """Start from tensors of an ancestor, if this trial has one. Call it before prepare.

        The campaign decides which ancestor and which tensors. Outside a campaign, and in a trial
        without ancestors, nothing happens. If `ctx.config["freeze"]` is True, inherited tensors
        are not trained. Not collective; blocks while the tensors are read.

        Args:
            model: the model that will be the first argument of `prepare`.
            rehearsal: continues with the samples that the ancestor has kept.

        Returns:
            What was inherited, as JSON values; None for nothing.

        Raises:
            ConfigError: the model was prepared already, another one has inherited, or what the
                ancestor has kept cannot be rehearsed here.
            StoreError: the ancestor cannot be read.
        """
        if rehearsal is not None:
            _check_rehearsal("inherit", rehearsal)
        return self._member.inherit(_without_compiler(model), rehearsal)

    def track(self, **objects: Stateful) -> None:
        """Make further objects part of the State under these names: an EMA, a scheduler, a count.

        Everything that influences training and is not rebuilt from `config` must be prepared or
        tracked; otherwise a joiner does not have it.

        Raises:
            ConfigError: an object without state_dict and load_state_dict, or a name in use.
        """
        self._member.track(objects)

    @checked
    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        per_worker: bool = False,
        shuffle: bool = True,
        seed: int | None = None,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        augment: Augment | None = None,
        slices: int | None = None,
        microbatch: int | None = None,
        rehearse: Rehearsal | None = None,
    ) -> Loader:
        """Batches of a map-style dataset, every sample exactly once an epoch.

        Args:
            dataset: has a length and an item for each index below it.
            batch_size: of the whole group; each worker gets its share.
            per_worker: `batch_size` is that of each worker, and the group's batch grows and shrinks
                with the group; see `scale_rate`.
            shuffle: draw a new order in each epoch, the same for any number of workers.
            seed: of that order. By default it is the run's, or in a trial the campaign's. Two
                datasets of one length have the same order with one seed, so that their samples
                come in pairs: give one loader another seed if they are to be independent. A
                warning says so if it is the same dataset.
            collate_fn: makes a batch of a list of items.
            num_workers: processes of this worker that load ahead; 0 loads in place.
            prefetch_factor: batches that each of them loads ahead.
            augment: `augment(sample, rng)` returns what is collated instead of the sample. Take all
                random numbers from `rng`, a NumPy Generator that depends only on `seed` and on
                the sample's position in the stream. So they are the same with any number of
                workers and processes, after any loss, and in a replay.
            slices: cut each batch into so many equal slices, which are the unit of work. An epoch
                then yields steps, and each step yields the slices of this worker:
                `for step in epoch: for x, y in step: loss(model(x), y).backward()`, and after the
                inner loop optimizer.step(). The others compute a lost worker's slices
                within the same step. Faster workers get more slices.
            microbatch: samples of a pipeline's micro-batch. What a process is given is a whole
                number of them. What is left of an epoch after these is a last batch of fewer
                samples.
            rehearse: append samples from the datasets of earlier loaders to each batch.

        Raises:
            ConfigError: a dataset without a length, fewer samples in a batch than workers, a
                batch that cannot be cut into `slices` or micro-batches, or a dataset that is not
                the one the run was at work with.
        """
        self._need_prepare("loader")
        if rehearse is not None:
            _check_rehearsal("loader", rehearse)
        source = Source(
            dataset=dataset,
            batch_size=batch_size,
            per_worker=per_worker,
            shuffle=shuffle,
            seed=self.seed_of_order if seed is None else seed,
            collate=collate_fn,
            num_workers=num_workers,
            prefetch=prefetch_factor,
            augment=augment,
            slices=slices,
            microbatch=microbatch,
            exact=self._member.settings.exact,
            memory=None if rehearse is None else rehearse.admit(dataset),
            device=self.device,
        )
        loader: Loader = self._member.open_loader(source)
        return loader

    @checked
    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        collate_fn: Collate = default_collate,
        microbatch: int | None = None,
    ) -> dict[str, float]:
        """Mean of a metric over a dataset, shared out over the group, equal on all workers.

        Args:
            metric: `metric(model, batch)` gives the mean over the batch, or several by name. The
                model is the first one prepared, in eval mode, without gradients. In a pipeline it
                runs `schedule.eval`, and what it returns at the last stage counts.
            dataset: map-style.
            batch_size: of each worker, unlike the loader's. If workers are several processes, the
                axis `shard` of their mesh splits it.
            collate_fn: makes a batch of a list of items.
            microbatch: samples of a pipeline's micro-batch. A batch is a whole number of them, or
                has fewer samples than one, where these are the last of the dataset.

        Collective, for all processes of each worker. If a worker is lost, the others repeat it
        among themselves.

        Returns:
            Means by name. If the metric returns one number, the name is that of the function.

        Raises:
            ConfigError: it cannot be done with these arguments; says with which.
        """
        self._need_prepare("evaluate")
        check_value("ctx.evaluate", "batch_size", int, batch_size)
        check_value("ctx.evaluate", "microbatch", int | None, microbatch)
        require(
            microbatch is None or microbatch >= 1,
            f"ctx.evaluate: microbatch must be >= 1, not {microbatch}. Nothing was evaluated.",
        )
        indexed = all(hasattr(type(dataset), each) for each in ("__len__", "__getitem__"))
        if not indexed or len(cast("Any", dataset)) < 1 or batch_size < 1:
            raise ConfigError(
                "ctx.evaluate needs a map-style dataset with samples and a batch_size >= 1, not a "
                f"{type(dataset).__name__} and {batch_size}. Nothing was evaluated."
            )
        for name, function in (("metric", metric), ("collate_fn", collate_fn)):
            said = f"ctx.evaluate: {name} must be a function, not {function!r}."
            require(callable(function), f"{said} Nothing was evaluated.")
        return self._member.evaluate(metric, dataset, batch_size, collate_fn, microbatch)

    @checked
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, by the norm of the whole model.

        If workers are several processes, each has a part of it: a stage, or shards on several
        meshes. Collective, for all processes of each worker. Call it where gradients are the
        group's averages, after the backward pass, or after `with ctx.backward()`.

        Args:
            parameters: of the model, or of this process's stage.
            max_norm: if the 2-norm of all gradients is above it, they are scaled down to it.

        Returns:
            The norm before that: of the whole model, equal in all processes.

        Raises:
            ConfigError: something that is no tensor, or a max_norm that is no number of 0 or more;
                or in a pipeline, a batch was drawn on which no step was taken.
        """
        self._need_prepare("clip_grad_norm_")
        given: Any = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        every = list(given) if isinstance(given, Iterable) else [given]
        for one in every:
            require(
                isinstance(one, torch.Tensor),
                f"ctx.clip_grad_norm_ got a {type(one).__name__} among the parameters, which is no "
                "tensor. Nothing was clipped. Give it model.parameters().",
            )
        plain = _plain("max_norm", max_norm, "clip_grad_norm_")
        require(
            isinstance(plain, int | float) and not isinstance(plain, bool) and plain >= 0,
            f"ctx.clip_grad_norm_ got max_norm={max_norm!r}, which is no number of 0 or more. "
            "Nothing was clipped.",
        )
        return self._member.clip(every, float(plain))

    @checked
    def mean(self, **values: float | torch.Tensor) -> dict[str, float]:
        """Means over the group of numbers that each worker has of its own share of the batch.

            ctx.report(**ctx.mean(loss=loss, accuracy=accuracy))

        Workers are weighted by their samples in the last batch that they drew. So if the loss is a
        mean over each worker's share, this gives the mean over the whole batch. Without a loader
        all workers have the same weight. Values of lost workers are not included. In a pipeline
        those of the last stage count, which knows the loss. To average over a dataset, use
        `evaluate`.

        Collective. It blocks until all workers have called it, so call it only every so many
        steps. In a run with `exact=True` its last digits depend on the number of workers, so no
        decision may depend on it.

        Args:
            values: numbers or tensors of one element; the same names on all workers.

        Returns:
            Mean by name, equal on all workers.

        Raises:
            ConfigError: nothing to average, or something that is no number.
        """
        if not self._member.settings.alone:
            self._need_prepare("mean")
        if not values:
            raise ConfigError("ctx.mean got nothing to average. Call it as ctx.mean(loss=loss).")
        numbers = {name: _plain(name, value, "mean") for name, value in values.items()}
        for name, value in numbers.items():
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"ctx.mean got {name}={value!r}, which is no number. Nothing was computed."
                )
        return self._member.mean({name: float(value) for name, value in numbers.items()})

    @checked
    def report(self, **metrics: float | str | torch.Tensor | None) -> None:
        """Write metrics to journal and console, with the values of the lowest rank. Never blocks.

        The values are those of one worker, for example of its own share of the batch; `ctx.mean`
        gives the group's. All workers must call it, because rank 0 may be lost at any time.

        Args:
            metrics: numbers, text or tensors of one element by name; None says nothing new.

        Raises:
            ConfigError: another value, or none that is a number for `Guard.metric`; or in a group,
                it was called before prepare.
        """
        if not self._member.settings.alone:
            self._need_prepare("report")
        self._member.report({name: _plain(name, value) for name, value in metrics.items()})

    @checked
    def scale_rate(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        reference: int,
        rule: Rule = "linear",
        warmup_steps: int = 0,
    ) -> None:
        """Let the learning rates follow the group's size, for a loader with `per_worker=True`.

        Args:
            optimizer: a prepared one. Its rates are scaled during `step` and restored afterwards,
                so schedulers work as usual.
            reference: number of workers for which the rates are meant.
            rule: "linear": times workers / reference; "sqrt": times its square root.
            warmup_steps: over how many steps a change is spread.

        Raises:
            ConfigError: another rule, impossible numbers, or called before prepare or twice.
        """
        self._need_prepare("scale_rate")
        self._member.scale_rate(RateScaling(optimizer, rule, reference, warmup_steps))

    def accumulate(self) -> AbstractContextManager[None]:
        """Within it backward only adds to the local gradients; the next one outside ends the step.

        Raises:
            ConfigError: at its beginning, before prepare, or within the slices of a batch.
        """
        return self._member.accumulate()

    def backward(self) -> AbstractContextManager[None]:
        """Within it backward adds to the local gradients; at its exit they are averaged: one step.

        For steps of several backward passes: those of a pipeline's micro-batches
        (`with ctx.backward(): schedule.step(x, target=y)`), or of several losses. All are about
        the batches drawn last. Within `ctx.accumulate()` it takes no step.

        Raises:
            ConfigError: at its beginning, within the slices of a batch, or where workers take steps
                by themselves.
        """
        self._need_prepare("backward")
        return self._member.backward()

    def boundary(self) -> None:
        """Mark where a step begins in a loop without `ctx.loader`: workers join only here.

        Collective, and blocks while a worker is let in. States are stored at these places, too.

        Raises:
            ConfigError: called before prepare, or where workers take steps by themselves.
        """
        self._need_prepare("boundary")
        self._member.boundary()

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """Call `listener(name, detail)` in the training thread at each phase that it comes to.

        For traces, and for tests that kill a worker at a chosen phase: wait, boundary, batch,
        slice, handed (a lost worker's slice; detail: its number), again (one that is computed a
        second time), computed, bucket (detail: its number), filled, round, held, left, evaluate,
        mean, report, snapshot, level, unequal, enter, meet, give, take, crew, pause, released,
        leaderless.
        """
        self._member.on_phase(listener)

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> NoReturn:
            """Of what it does not have, say what was meant."""
            if name.startswith("_"):
                raise AttributeError(name)
            public = [one for one in dir(self) if not one.startswith("_")]
            listed = ", ".join(public)
            raise AttributeError(f"ctx has no {name!r}. {closest(name, public)}It has {listed}.")

    def _need_prepare(self, call: str) -> None:
        if not self._member.prepared:
            raise ConfigError(
                f"ctx.{call} was called before ctx.prepare. Nothing was done. Prepare the model "
                "first: that is where this worker joins the group."
            )


def _without_compiler(one: Any) -> Any:  # noqa: ANN401 - what prepare takes
    return plain(one) if isinstance(one, torch.nn.Module) else one


def _check_rehearsal(call: str, value: object) -> None:
    if not isinstance(value, Rehearsal):
        hint = " Call it: Rehearsal(...)." if value is Rehearsal else ""
        raise ConfigError(
            f"ctx.{call} got {value!r} to rehearse from, which is no elastix.Rehearsal.{hint} "
            "Nothing was done."
        )


def _plain(name: str, value: Any, call: str = "report") -> Any:  # noqa: ANN401
    plain = single(value)
    if plain is None or isinstance(plain, bool | float | str):
        return plain
    if isinstance(plain, int) and abs(plain) <= sys.float_info.max:
        return plain
    kind = f"{type(value).__name__}" + (" beyond all floats" if isinstance(plain, int) else "")
    raise ConfigError(
        f"ctx.{call} got {name} of type {kind}. Nothing was done with it. Metrics are numbers, "
        "text or tensors of one element."
    )
