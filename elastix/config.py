"""How a run is set up: frozen, keyword-only dataclasses, validated when they are made.

Not here: anything that changes while a run is going on. No environment variable overrides a
field. Every class survives `from_dict(to_dict())`.
"""

import inspect
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from packaging.version import Version

from elastix.arguments import check_call, check_fields, checked, is_whole, of_kind, whole
from elastix.arguments import require as _require

Placement = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]
Recovery = Literal["forward", "rollback"]
Cloud = Literal["aws", "gcp", "azure"]
Wire = Literal["bfloat16", "float16"]
_CLOUDS = ("aws", "gcp", "azure")
_ADDRESS = re.compile(r"http://([\w.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?")
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo, as its authors have them
_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # a tag begins with it


def require(condition: bool, message: str) -> None:
    """Raise ConfigError, unless the condition holds; it says that nothing was started."""
    _require(condition, message if "Nothing" in message else f"{message} Nothing was started.")


class _OfInit:
    """The signature of a class is that of its `__init__`, whatever its `__new__` takes."""

    def __get__(self, made: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Config:
    """Types of the fields, and a JSON round trip, shared by the dataclasses below."""

    __signature__ = _OfInit()

    def __new__(cls, *args: Any, **named: Any) -> Self:  # noqa: ANN401 - whatever is given
        """Of a user's dataclass that derives from one of them, the call is looked at here."""
        if args or named:  # nothing is given where one is unpickled
            check_call(cls, args, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse values of another type than their field's, before they are compared."""
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        return cls(**values)


@checked
@dataclass(frozen=True, kw_only=True)
class ScalingConfig(_Config):
    """How many workers, and what each of them occupies.

    Attributes:
        num_workers: a fixed number, or (min, max). A run starts with as many as fit, grows up to
            max as the cluster has room, and continues while at least min are left.
        spares: additional workers that are started in advance and wait. One takes the place of a
            lost worker at the next boundary. Where workers are crews, each is a whole crew.
        shadows: additional workers that receive every step but are not in the group. If all members
            are lost at once, the run goes on from a shadow, with no step lost. If a seat is free
            and a spare or a replacement is ready to be the shadow, the shadow takes the seat, and
            no State is copied. Each occupies the same resources as a worker.
        cpus_per_worker: logical CPUs of each worker; fractions let workers share one. The processes
            of a crew share them equally.
        gpus_per_worker: GPUs of each worker; fractions let workers share one. The processes of a
            crew share them equally: as many as these have one each, fewer are shared.
        memory_per_worker: for campaigns whose trials have one worker each: bytes that are kept free
            for a trial, libraries included, on its GPU if it has one and on its host otherwise.
            Fewer trials run at once if they would not fit; more than any host has is refused.
            "auto": what most trials so far have needed. None: an equal part of the host or GPU. A
            trial that runs out of memory is always run again with more.
        placement: strategy of the Ray placement group. Each crew has a placement group of its own:
            "PACK", or with the axis `tensor` "STRICT_PACK", on one node.
        crew: how many processes form one worker, by the axes of their mesh: {"shard": 2,
            "tensor": 2} makes four. For models that do not fit on one device; see `ctx.mesh`, and
            for the axis "pipe" `ctx.backward`. {} for one process.
        affinity: bind each worker to the cores of one NUMA node, that of its GPU if it has one. On
            a machine with a single NUMA node nothing is bound.
    """

    num_workers: int | tuple[int, int] = 1
    spares: int = 0
    shadows: int = 0
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    placement: Placement = "SPREAD"
    crew: dict[str, int] = field(default_factory=dict)
    affinity: bool = True
    memory_per_worker: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "crew", _axes(self.crew))
        object.__setattr__(self, "num_workers", _number_or_pair(self.num_workers))
        sizes = self.num_workers
        pair = sizes if isinstance(sizes, tuple) else (sizes, sizes)
        require(
            len(pair) == 2 and all(is_whole(n, 1) for n in pair) and pair[0] <= pair[-1],
            f"num_workers must be a whole number >= 1 or (min, max) with 1 <= min <= max, "
            f"not {self.num_workers!r}.",
        )
        require(
            self.cpus_per_worker > 0 or self.gpus_per_worker > 0,
            "a worker must occupy some CPU or GPU, or Ray would start any number of them at once; "
            f"got cpus_per_worker={self.cpus_per_worker}, gpus_per_worker={self.gpus_per_worker}.",
        )
        require(
            self.cpus_per_worker >= 0 and self.gpus_per_worker >= 0,
            f"cpus_per_worker={self.cpus_per_worker} and gpus_per_worker={self.gpus_per_worker} "
            "must not be negative.",
        )
        require(self.spares >= 0, f"spares must be >= 0, not {self.spares!r}.")
        require(self.shadows >= 0, f"shadows must be >= 0, not {self.shadows!r}.")
        memory = self.memory_per_worker
        require(
            not isinstance(memory, int) or memory > 0,
            f'memory_per_worker must be a whole number of bytes > 0, "auto" or None, not '
            f"{memory!r}.",
        )

    @property
    def min_workers(self) -> int:
        """The smallest group that may go on training."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The largest group."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """What one worker occupies, in Ray's words; zero entries left out."""
        wanted = {"CPU": float(self.cpus_per_worker), "GPU": float(self.gpus_per_worker)}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    @property
    def processes(self) -> int:
        """How many each worker is."""
        return math.prod(self.crew.values())

    @property
    def resources_per_process(self) -> dict[str, float]:
        """What one process of a worker occupies: an equal part of that."""
        return {name: n / self.processes for name, n in self.resources_per_worker.items()}


def is_name(text: str) -> bool:
    """Whether a run can have that name."""
    return _NAME.fullmatch(text) is not None


@checked
@dataclass(frozen=True, kw_only=True)
class RunConfig(_Config):
    """Which run this is. The same name and the same store mean: continue it.

    Attributes:
        name: letters, digits, '.', '_' and '-'.
        store: directory for States and journals. Workers on several nodes need it shared.
        seed: of initial weights and of the order of samples.
        detached: the run goes on without the process that called `fit`, on a Ray cluster that
            outlives it; `fit` of the same name and store attaches to it again.
        exact: the final State has the same bytes for any number of workers, no matter which of them
            are lost or join. Loaders must have slices, and their number must be a power of two.
            Not promised: the same bytes on other hardware, or with other thread counts, versions,
            or meshes of crews.
    """

    name: str = "run"
    store: str = "runs/store"
    seed: int = 0
    detached: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        store: Any = self.store
        if isinstance(store, Path) or (isinstance(store, str) and store.startswith("~")):
            # Path's own raises where it is the name of a folder, and no user has it.
            object.__setattr__(self, "store", os.path.expanduser(store))  # noqa: PTH111
        super().__post_init__()
        require(
            self.store != "" and "\0" not in self.store,
            f"store must be the path of a directory, not {self.store!r}.",
        )
        require(
            "://" not in self.store,
            f"a run's store is a directory that all its workers reach, not {self.store!r}: "
            "journals and locks lie beside its States. An object store can hold models: "
            "elastix.Store opens it.",
        )
        require(
            is_name(self.name),
            f"a run's name is 1 to 100 letters, digits, '.', '_' or '-', starts with a letter or "
            f"digit and has no '..', not {self.name!r}: it names a directory and tags.",
        )
        require(
            self.seed >= 0,
            f"seed must be a whole number from 0 to 2**63 - 1, not {self.seed!r}.",
        )

    @property
    def directory(self) -> Path:
        """Where the run keeps its journal and States: STORE/runs/NAME."""
        return Path(self.store) / "runs" / self.name


InheritMode = Literal["lcs", "lp", "none"]
"""Which layers match: the longest common subsequence of them, the longest prefix, or none."""

InheritProvider = Literal["parent", "store"]
"""From which model: the one that a configuration was made from, or the best match in the store."""


@checked
@dataclass(frozen=True, kw_only=True)
class InheritConfig(_Config):
    """What a trial of a campaign inherits from models that are already trained.

    Attributes:
        mode: "lcs", "lp" or "none": what `ctx.inherit` copies.
        provider: from which model: the "parent" whose configuration was changed to make this one,
            or the best match among this campaign's models in the "store". None: the parent if the
            searcher proposes configurations with parents, as Evolution and ScreenedEvolution do;
            otherwise the store.
        optimizer: store models together with their optimizers' state, and let `ctx.prepare` restore
            that state for the copied tensors. A child then does not need the steps in which Adam
            finds its step sizes again; it costs two thirds of the store's bytes. None: only with
            the provider "parent", because the state of a distant relative does not fit the
            gradients behind so many fresh layers. Nothing is inherited if mode is "none".
    """

    mode: InheritMode = "lcs"
    provider: InheritProvider | None = None
    optimizer: bool | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class Budget(_Config):
    """When a campaign ends: at the first limit that it reaches.

    Attributes:
        trials: how many trials are started, over all runs of the campaign. Failed trials, and
            trials that a rung paused and that were never continued, count too. None: no limit.
        parallel: how many run at once; None: as many as the cluster has room for. An `executor` of
            your own has a number of its own.
        time_s: seconds of this `run()`. Running trials are then stopped, and restart next time.
        epochs: passes over the data by all trials together, failed ones too. What was lost with a
            worker, or is done again in another attempt, does not count. Running trials then finish.
    """

    trials: int | None = None
    parallel: int | None = None
    time_s: float | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("trials", "parallel", "time_s", "epochs"):
            value = getattr(self, name)
            least = ">= 1" if name in ("trials", "parallel") else "> 0"
            require(
                value is None or value > 0,
                f"Budget.{name} must be {least} or None, not {value!r}: nothing could be tried.",
            )
        require(
            any(limit is not None for limit in (self.trials, self.time_s, self.epochs)),
            "a Budget needs an end: give trials, time_s or epochs.",
        )

    @property
    def most_trials(self) -> int | None:
        """How many trials there can be if each takes an epoch at least; None: nobody knows."""
        limits = [int(limit) for limit in (self.trials, self.epochs) if limit is not None]
        return min(limits, default=None)


@checked
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Config):
    """When States are stored while a run goes on. The final State is always stored.

    Attributes:
        every_steps: store a State after every so many steps. None: do not go by steps.
        every_s: also store a State when so many seconds have passed since the last one.
        keep_last: how many of the latest States to keep; None keeps all.
        best: name of a metric. A State is stored when `ctx.report` reports a new best value of it.
            If the first report does not contain it, the console says so.
        mode: whether the "min" or the "max" of that metric is best.
        keep_best: how many of the best to keep beside the latest.
        wait: stop training until each State is stored. By default training goes on meanwhile, and
            waits only if the next State is due before the previous one is stored.
    """

    every_steps: int | None = None
    every_s: float | None = None
    keep_last: int | None = 2
    best: str | None = None
    mode: Literal["min", "max"] = "max"
    keep_best: int = 1
    wait: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("every_steps", "keep_last"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be >= 1 or None, not {value!r}.")
        require(
            self.every_s is None or self.every_s > 0,
            f"every_s must be > 0 or None, not {self.every_s!r}.",
        )
        require(self.best != "", "best must be the name of a metric or None, not ''.")
        require(self.keep_best >= 0, f"keep_best must be >= 0, not {self.keep_best!r}.")


@checked
@dataclass(frozen=True, kw_only=True)
class RestoreConfig(_Config):
    """Where a run continues from, if not from its last State.

    Attributes:
        step: go back to the stored State of this step. Later steps no longer count, and their
            States are dropped. None: the last State.
        leave_out: numbers of later steps whose samples, according to the journal, are never used
            again.
    """

    step: int | None = None
    leave_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers: Any = self.leave_out
        require(
            isinstance(numbers, list | tuple | set | range),
            f"leave_out must be a list of numbers of steps, not {numbers!r}.",
        )
        object.__setattr__(self, "leave_out", tuple(map(whole, numbers)))
        require(
            self.step is None or self.step >= 0, f"step must be >= 0 or None, not {self.step!r}."
        )
        require(
            all(is_whole(step, 1) for step in self.leave_out),
            f"leave_out has the numbers of steps, counted from 1, not {self.leave_out!r}.",
        )


@checked
@dataclass(frozen=True, kw_only=True)
class ProfileConfig(_Config):
    """Which steps of a run are written to its timeline.

    Attributes:
        steps: how many of each worker's first steps; or (first, last), counted from 1 over the
            whole run.
        torch: run torch's profiler over the same steps. It slows them down.
    """

    steps: int | tuple[int, int] = 20
    torch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", _number_or_pair(self.steps))
        steps = self.steps
        pair = steps if isinstance(steps, tuple) else (1, steps)
        require(
            len(pair) == 2 and all(is_whole(n, 1) for n in pair) and pair[0] <= pair[1],
            f"steps must be a whole number >= 1 or (first, last) with 1 <= first <= last, "
            f"not {self.steps!r}.",
        )

    def window(self, committed: int) -> tuple[int, int]:
        """Steps to record as committed steps before the first and after the last.

        Args:
            committed: steps that the worker finds when it comes to its first.
        """
        if isinstance(self.steps, tuple):
            return self.steps[0] - 1, self.steps[1]
        return committed, committed + self.steps


@checked
@dataclass(frozen=True, kw_only=True)
class ExchangeConfig(_Config):
    """How workers exchange what they have learned.

    With `every_steps` they do not exchange gradients: each takes so many inner steps by itself, and
    then all take one outer step together (DiLoCo). Its gradient is how far each has moved since the
    last one, averaged by samples. `ctx.step`, checkpoints and the journal count outer steps.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023, arXiv 2311.08105, algorithm 1; its values are the defaults of the outer optimizer, SGD
    with Nesterov momentum.

    Attributes:
        wire: "bfloat16" or "float16": send gradients of float32 and float64 in that type, and add
            them up in it. Half the bytes or a quarter, for networks that are slower than the
            workers. Workers stay equal to the last bit. Sums are rounded to 3 significant digits
            ("bfloat16") or 4 ("float16"); no error is carried to the next step. "float16" has less
            range, so use a GradScaler, as with mixed precision. None: send each gradient in its own
            type. Buffers of modules always are.
        every_steps: inner steps between two outer ones; see docs/train-function.md. A step is a
            batch, or several that `ctx.accumulate` adds up. None: exchange the gradients of each
            step.
        outer_lr: learning rate of the outer step; 1.0 without momentum averages the weights.
        outer_momentum: Nesterov momentum of the outer steps; 0 for none.
    """

    wire: Wire | None = None
    every_steps: int | None = None
    outer_lr: float = _OUTER_LR
    outer_momentum: float = _OUTER_MOMENTUM

    def __post_init__(self) -> None:
        super().__post_init__()
        every, lr, momentum = self.every_steps, self.outer_lr, self.outer_momentum
        require(every is None or every >= 1, f"every_steps must be >= 1 or None, not {every!r}.")
        require(lr > 0, f"outer_lr must be > 0, not {lr!r}.")
        require(0 <= momentum < 1, f"outer_momentum must be from 0 to below 1, not {momentum!r}.")
        require(
            every is not None or (lr, momentum) == (_OUTER_LR, _OUTER_MOMENTUM),
            f"outer_lr={lr!r} and outer_momentum={momentum!r} are of use only with every_steps, "
            "the number of steps that each worker takes by itself.",
        )

    @property
    def diloco(self) -> bool:
        """Whether workers take inner steps by themselves."""
        return self.every_steps is not None


@checked
@dataclass(frozen=True, kw_only=True)
class Guard(_Config):
    """Which steps are discarded because their gradient or loss is not finite or far too large.

    A step is void on all workers if the averaged gradient is not finite, or if its norm is far
    above its usual size. This is decided in the step's own commit round. The batch is never used,
    and the journal says so. If a GradScaler is prepared, it handles gradients that are not finite.

    Attributes:
        spike: a norm is far too large if its logarithm is this many standard deviations (estimated
            from the median deviation) above the median of the latest norms. None: discard only
            steps that are not finite.
        window: how many of the latest steps are compared with.
        warmup: do not judge norms before so many steps.
        metric: name of a metric that is reported with `ctx.report`. It is judged like the norm, as
            part of the current step; after backward the next step is the current one.
        most: the run ends with TrainingUnstable if more steps than this in one window are void.
            Void passes on one batch count as one.
    """

    spike: float | None = 10.0
    window: int = 200
    warmup: int = 20
    metric: str | None = None
    most: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.spike is None or self.spike > 0,
            f"Guard.spike must be > 0 or None, not {self.spike!r}.",
        )
        require(
            2 <= self.warmup <= self.window,
            f"Guard.warmup must be from 2 to window={self.window}, not {self.warmup!r}.",
        )
        require(self.metric != "", "Guard.metric must be the name of a metric or None, not ''.")
        require(self.most >= 0, f"Guard.most must be >= 0, not {self.most!r}.")


@checked
@dataclass(frozen=True, kw_only=True)
class FailureConfig(_Config):
    """What counts as a failure, and how many are too many.

    Attributes:
        max_worker_losses: end the run with TooManyFailures after more losses than this. None:
            never.
        hang_timeout_s: a worker that has been silent for so long, or for which all others have
            waited so long, is killed and counts as lost. In a worker's first step, in which
            compilers run and caches fill, start_timeout_s applies instead if it is longer.
            While none of several workers is heard of, which may be for the network of whoever
            listens, it is three times as long.
        evict_slower_than: remove a worker if its part of a step takes this many times as long as
            the others'. None: only report slow workers, from 1.5 times on.
        wait_s: how long the survivors wait for replacements when fewer than the minimum are left.
            If no replacement can come, they do not wait.
        start_timeout_s: how long a run may take to find room on the cluster and form its group.
            After that it begins with the workers that are ready, if these are the minimum.
        replace: start a replacement for each lost worker. If not, and a worker is lost before the
            group has formed, the others begin without it, or the run ends if they are too few.
        recovery: what the survivors do with the step in which a worker was lost. "forward": finish
            it from the gradients that they hold. "rollback": compute it again, with the same
            samples.
        guard: which steps are discarded; None: none.
        sentinel: compare digests of the workers' States in every step, and remove a worker that
            differs from the majority. Of a State of more than 256 KiB each step compares a part, so
            that all of 600 MB is compared within a minute, and all of 6 GB within ten. Not
            with crews, nor with ExchangeConfig(every_steps=...): there States are compared at
            checkpoints alone.
        recompute_every: with RunConfig(exact=True), every so many steps one slice is computed by
            two workers, and a worker that miscalculates is removed. In its first step each worker
            computes its first slice three times, which finds code that gives a different result the
            second time, and a slice of another worker, which finds code that goes by what a worker
            did before. None: nothing is computed twice, as never with crews.
        notices: "aws", "gcp" or "azure": ask the cloud's metadata service on each node whether the
            machine is about to be preempted. Its workers then leave at the next step boundary,
            before the deadline. On Ray only. None: do not ask. Workers always react to SIGTERM
            and to nodes that Ray drains.
        notices_address: address of the metadata service, such as "http://localhost:1338", if it is
            not the cloud's own.
    """

    max_worker_losses: int | None = None
    hang_timeout_s: float = 30.0
    evict_slower_than: float | None = None
    wait_s: float = 120.0
    start_timeout_s: float = 300.0
    replace: bool = True
    recovery: Recovery = "forward"
    guard: Guard | None = None
    sentinel: bool = True
    recompute_every: int | None = 200
    notices: Cloud | None = None
    notices_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        guard: Any = self.guard
        if isinstance(guard, Mapping):  # from JSON
            object.__setattr__(self, "guard", Guard.from_dict(guard))
        elif guard is not None:
            of_kind("guard", guard, Guard)
        losses = self.max_worker_losses
        require(
            losses is None or losses >= 0,
            f"max_worker_losses must be >= 0 or None, not {losses!r}.",
        )
        every = self.recompute_every
        require(
            every is None or every >= 1,
            f"recompute_every must be >= 1 or None, not {every!r}.",
        )
        self._check_notices()
        for name in ("hang_timeout_s", "wait_s", "start_timeout_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0, not {getattr(self, name)!r}.")
        limit = self.evict_slower_than
        require(
            limit is None or limit > 1, f"evict_slower_than must be > 1 or None, not {limit!r}."
        )

    def _check_notices(self) -> None:
        address = self.notices_address
        if address is None:
            return
        require(
            self.notices is not None,
            f"notices_address={address!r} is of use only with notices, one of {_CLOUDS}.",
        )
        require(
            _ADDRESS.fullmatch(address) is not None,
            f"notices_address must look like 'http://localhost:1338', not {address!r}.",
        )


_AXES = ("shard", "tensor", "pipe")
_AXES_TO_COME = ("context",)


def _number_or_pair(given: Any) -> Any:  # noqa: ANN401 - not checked yet
    """JSON knows no tuples, and numpy has whole numbers of its own."""
    return tuple(map(whole, given)) if isinstance(given, list | tuple) else whole(given)


def _axes(crew: Mapping[str, int]) -> dict[str, Any]:
    """The axes and their sizes. A closed list: of each it must be known whether it splits samples.

    Raises:
        ConfigError: another axis, or no size.
    """
    require(
        isinstance(crew, dict),
        f"crew must be a dict of axes and their sizes, like {{'shard': 2}}, not {crew!r}.",
    )
    sizes = {axis: whole(size) for axis, size in crew.items()}
    for axis, size in sizes.items():
        require(
            axis not in _AXES_TO_COME,
            f"crew has the axis {axis!r}, which is not there yet: axes are {', '.join(_AXES)}.",
        )
        require(
            axis in _AXES,
            f"crew has no axis {axis!r}: axes are 'shard', which splits a worker's samples and its "
            "tensors, 'tensor', which splits its tensors alone, and 'pipe', which splits its "
            "layers into stages.",
        )
        require(
            is_whole(size, 1),
            f"crew has {axis!r}: {size!r}; it must be a whole number >= 1, the processes along it.",
        )
    return sizes


def check_torch(
    since: str = "2.11", what: str = "a worker of several processes, or an estimate of one,"
) -> None:
    """Refuse to shard a model with an old torch: gradients are weighed within its FSDP2.

    Raises:
        ConfigError: it is older than that.
    """
    installed = version("torch")
    require(
        Version(installed).release >= Version(since).release,
        f"{what} needs torch {since} or newer; {installed} is installed. Nothing was started. "
        "Install a newer torch, or leave crew or mesh out.",
    )


def check_crew(
    scaling: ScalingConfig,
    failure: FailureConfig,
    checkpoint: CheckpointConfig,
    *,
    exact: bool,
    profile: ProfileConfig | None = None,
) -> None:
    """Refuse what does not work with workers of several processes yet.

    Raises:
        ConfigError: something is set that does not.
    """
    if not scaling.crew:
        return
    check_torch()
    if exact and "pipe" in scaling.crew:  # before, a schedule's first use drew random numbers
        check_torch("2.13", "a pipeline with exact=True")
    gpus = f"gpus_per_worker={scaling.gpus_per_worker:g}" if scaling.gpus_per_worker else ""
    require(
        scaling.gpus_per_worker <= scaling.processes,
        f"{gpus} is more than one for each of the {scaling.processes} processes of a worker, which "
        f"crew={scaling.crew} makes, and each computes on one. Nothing was started. Give "
        f"gpus_per_worker={scaling.processes}, or less to share them.",
    )
    require(
        not 0.5 < scaling.gpus_per_worker / scaling.processes < 1,
        f"{gpus} is {scaling.gpus_per_worker / scaling.processes:.2g} for each of the "
        f"{scaling.processes} processes of a worker, and no two of them fit on one GPU. Nothing "
        f"was started. Give gpus_per_worker={scaling.processes}, or at most "
        f"{scaling.processes / 2:g}.",
    )
    exact_gpus = f"exact=True with {gpus} and more than two processes, or with stages,"
    for wrong, what in (
        (scaling.shadows > 0, f"shadows={scaling.shadows}"),
        (failure.recovery != "forward", f"recovery={failure.recovery!r}"),
        (failure.guard is not None, "guard=Guard(...)"),
        (
            exact and failure.recompute_every not in (None, FailureConfig().recompute_every),
            f"recompute_every={failure.recompute_every}",
        ),
        (checkpoint.best is not None, f"best={checkpoint.best!r}"),
        # Of two numbers a sum is the same in any order; of more NCCL chooses one.
        (gpus and exact and (scaling.processes > 2 or "pipe" in scaling.crew), exact_gpus),
        (scaling.placement != "SPREAD", f"placement={scaling.placement!r}"),
        (profile is not None, "profile=ProfileConfig(...)"),
    ):
        require(
            not wrong,
            f"{what} does not work with crew={scaling.crew} yet: each worker is several processes. "
            "Nothing was started. Leave out one of the two.",
        )


def check_exchange(
    exchange: ExchangeConfig, scaling: ScalingConfig, failure: FailureConfig, *, exact: bool
) -> None:
    """Refuse what does not work where each worker takes inner steps by itself.

    Raises:
        ConfigError: something is set that does not.
    """
    if not exchange.diloco:
        return
    for wrong, what, why in (
        (exact, "exact=True", "what each worker has learned depends on how many there are"),
        (
            failure.recovery != "forward",
            f"recovery={failure.recovery!r}",
            "inner steps cannot be taken back",
        ),
        (failure.guard is not None, "guard=Guard(...)", "inner steps cannot be taken back"),
        (
            scaling.shadows > 0,
            f"shadows={scaling.shadows}",
            "a shadow is sent outer steps, and has no inner optimizer's state",
        ),
        (
            scaling.crew.get("pipe", 1) > 1,
            f"crew={scaling.crew}",
            "a pipeline's gradients are exchanged where ctx.backward() ends",
        ),
    ):
        require(
            not wrong,
            f"{what} does not work with ExchangeConfig(every_steps={exchange.every_steps}): {why}. "
            "Nothing was started. Leave out one of the two.",
        )


def refuse_memory(scaling: ScalingConfig, what: str) -> None:
    """Refuse a reservation of memory where nobody would keep it free.

    Raises:
        ConfigError: there is one.
    """
    require(
        scaling.memory_per_worker is None,
        f"memory_per_worker={scaling.memory_per_worker!r}: {what} would not go by it. Nothing was "
        "started. Trials of one worker on the default executor do.",
    )


def refuse_crew(scaling: ScalingConfig, what: str) -> None:
    """Refuse workers of several processes where there are none yet.

    Args:
        scaling: as it was asked for.
        what: cannot have them.

    Raises:
        ConfigError: workers are to be crews.
    """
    require(
        not scaling.crew,
        f"crew={scaling.crew}: {what} cannot have workers of several processes yet. Nothing was "
        "started. ElasticTrainer trains one model with them.",
    )
