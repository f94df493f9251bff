"""What adapters have in common: a script that was written for one process, run by a group.

The script sees a world of one. Its batch size is that of the whole group, and so are the length of
a loader, the steps of an epoch, and what a scheduler counts: they do not change with the group.
Only the batches it trains on are split. What it evaluates on, each worker has whole: with equal
replicas all find the same, and nothing has to be gathered. So a reduction by mean is the mean over
the group, and any other gives the value itself if all workers have it, and an error if they do not.

Models, optimizers and the rest are collected while the script sets them up, and prepared together
when it first uses a loader. Not here: any name of a peer's.
"""

import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data import IterableDataset as Stream

from elastix import whole_files
from elastix.data.loader import Loader
from elastix.data.random_numbers import seed_at
from elastix.data.source import to_device
from elastix.errors import ConfigError
from elastix.state import Stateful, raw_bytes
from elastix.train.replica.context import Context
from elastix.whole_files import FileWriter

T = TypeVar("T")

_BITS = 20  # of a digest in one number: times the samples of a batch it is still exact in float64
_NUMBERS = 3
_PARTS, _EACH = 1024, 4  # `on_any` asks up to 256 workers: batches of 4 out of 1024 dummy samples
_ATTEMPTS = 3
_SEEDERS = ("seed_worker", "pl_worker_init_function")  # of Hugging Face and of Lightning


class LoneScript:
    """One worker, as a script sees it that believes to be alone.

    Args:
        ctx: what the train function was given.
        peer: whose words the script uses, for messages.

    Raises:
        ConfigError: the worker is several processes, or takes steps by itself.
    """

    def __init__(self, ctx: Context, peer: str) -> None:
        if not isinstance(ctx, Context):
            raise ConfigError(
                f"{peer} got {ctx!r} where the train function's ctx belongs. Nothing was set up. "
                "Call it within train(ctx), which ElasticTrainer runs on each worker."
            )
        if ctx.mesh is not None:
            raise ConfigError(
                f"{peer} was used by a worker that is several processes (ScalingConfig.crew). "
                "Nothing was set up. Shard the model on ctx.mesh and use ctx.prepare."
            )
        if ctx.steps_alone:
            raise ConfigError(
                f"{peer} was used with ExchangeConfig(every_steps=...): between outer steps each "
                "worker has weights of its own, and what a script computes would differ. Nothing "
                "was set up. Leave every_steps out, or use ctx.prepare and ctx.loader."
            )
        self.ctx = ctx
        self.peer = peer
        self.entered = False
        self.trains = False  # the last batch was one to train on
        self.within = 0  # loops over the epochs of loaders that are under way
        self._orders: dict[torch.Generator | None, int] = {}  # by generator, how many were drawn
        self.strays: set[object] = set()  # loops over whole batches that may have been trained on
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Stateful] = []
        self._tracked: dict[str, Stateful] = {}

    def add(self, *objects: Any) -> None:  # noqa: ANN401 - whatever was set up
        """Modules, optimizers, schedulers and scalers, to be part of the State; each once.

        Raises:
            ConfigError: a loader was used already.
        """
        for other in objects:
            if any(other is known for known in self._known):
                continue
            if self.entered:
                raise ConfigError(
                    f"{self.peer} was given an object ({type(other).__name__}) after a loader was "
                    "used, and with it this worker had entered the group. It was not set up. Set "
                    "up all models, optimizers and schedulers before the first batch."
                )
            if isinstance(other, torch.nn.Module):
                self._modules.append(other)
            elif isinstance(other, torch.optim.Optimizer):
                self._optimizers.append(other)
            else:
                self._others.append(other)

    def seed_of_next_order(self, generator: torch.Generator | None = None) -> int:
        """Of a loader that shuffles: another one for each, as alone, where they share a generator.

        Workers open loaders one after the other, all in the same order.

        Args:
            generator: the loader's own; None: it has none.
        """
        seed = self.ctx.seed_of_order if generator is None else generator.initial_seed()
        number = self._orders.get(generator, 0)
        self._orders[generator] = number + 1
        return seed_at(seed, "order", number) if number else seed

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """Further objects of the State, as `ctx.track` takes them; at any time."""
        if self.entered:
            self.ctx.track(**objects)
        else:
            self._tracked.update(objects)

    @property
    def _known(self) -> list[Any]:
        return [*self._modules, *self._optimizers, *self._others, *self._tracked.values()]

    def enter(self) -> None:
        """Enter the group with what was set up, the first time. Collective; blocks.

        Raises:
            ConfigError: as `ctx.prepare`; or an optimizer has several schedulers of its own.
        """
        if self.entered:
            return
        if not self._modules:
            raise ConfigError(
                f"a loader was used before {self.peer} was given a model. Nothing was read. Set up "
                "the model and its optimizer first."
            )
        gc.collect()  # nothing that the script has dropped
        everything = gc.get_objects()
        for scheduler in _schedulers(everything, self._optimizers, self._known, self.peer):
            self._others.append(scheduler)
        for optimizer in _strays(everything, self._modules, self._known):
            optimizer.register_step_pre_hook(partial(_refuse_stray, weakref.ref(self)))
        self.entered = True
        self.ctx.prepare(*self._modules, *self._optimizers, *self._others)
        if self._tracked:
            self.ctx.track(**self._tracked)

    def check_backward(self) -> None:
        """Before a backward pass.

        Raises:
            ConfigError: the last batch was not one to train on, or there is another one that was
                not.
        """
        if not self.trains:
            raise ConfigError(
                "a backward pass was asked for, and the last batch was not drawn within the epochs "
                "of a loader, so each worker would train on all of it, and a joiner would not know "
                "where to begin. Nothing was computed; the run ends. Write the loop over epochs "
                f"as `for epoch in loader.epochs(n):`, where loader is what {self.peer} gave for "
                "the DataLoader, and the loop over its batches within it."
            )
        if self.strays:
            raise ConfigError(
                "a backward pass was asked for, and besides the batch to train on one of another "
                "loader was drawn, which is not within its epochs: by zip(other, loader), say. "
                "Each worker has all of it and draws it in an order of its own, and nobody counts "
                "its samples. Nothing was computed; the run ends. To train on both write "
                "`for epoch, _ in zip(loader.epochs(n), other.epochs(n)):` around it; to look at "
                "the batch alone draw it within torch.no_grad()."
            )

    def check_entered(self, call: str) -> None:
        """Raise if this worker is in no group yet.

        Raises:
            ConfigError: it is in none.
        """
        if not self.entered:
            raise ConfigError(
                f"{call} was called before a loader was used. Nothing was done: until then this "
                "worker is in no group, and joiners come to that line at other times. Call it "
                "within the loop, or prepare files before the run is started."
            )

    # ------------------------------------------------------------------ what others have

    def mean(self, values: T) -> T:
        """The mean over the group of each number in a tensor, or in containers of them.

        As `ctx.mean`: a worker counts by its samples of the last batch.
        """
        self.check_entered("a reduction")
        leaves = [torch.as_tensor(leaf) for leaf in tree_leaves(values)]
        flat = [number for leaf in leaves for number in leaf.double().flatten().tolist()]
        if not flat:
            return values
        means = self.ctx.mean(**{f"value{place}": number for place, number in enumerate(flat)})
        return cast(
            "T", _rebuilt(values, iter([means[f"value{place}"] for place in range(len(flat))]))
        )

    def on_any(self, mine: bool, call: str) -> bool:
        """Whether something is so on any worker, also on one without samples of the last batch."""
        self.check_entered(call)
        parts = cast("Dataset[int]", range(_PARTS))
        found = self.ctx.evaluate(
            lambda *_: {"so": float(mine)}, parts, batch_size=_EACH, collate_fn=list
        )
        return found["so"] > 0

    def same(self, value: T, call: str) -> T:
        """The value, which is what one process would have, if all workers have it.

        Raises:
            ConfigError: they have different ones.
        """
        self.check_entered(call)
        numbers = digest(value)
        means = self.ctx.mean(**{f"digest{place}": part for place, part in enumerate(numbers)})
        found = [means[f"digest{place}"] for place in range(_NUMBERS)]
        # Not a number: nobody is left who had samples of the last batch, so nobody can compare.
        if not any(map(math.isnan, found)) and found != list(map(float, numbers)):
            raise ConfigError(
                f"{call} was called with what differs between workers: each had its own share of a "
                "batch, or drew random numbers. Workers come and go, so there is no list of what "
                "all have. The run ends. Use a mean over the group (ctx.mean), evaluate on "
                "a loader outside of its epochs, of which each worker has every sample, or use "
                "ctx.evaluate, which shares it out."
            )
        return value

    @property
    def writer(self) -> FileWriter:
        """This worker, as it writes files."""
        return FileWriter(self.ctx.run, self.ctx.worker)

    def save(
        self,
        write: Callable[[Path], None] | None,
        path: Path,
        put: Callable[[Path, Callable[[Path], None], FileWriter], None] = whole_files.replace,
    ) -> bool:
        """Have the first worker write a file or directory, and the next if that is lost meanwhile.

        Args:
            write: writes to the path that it is given, on one worker; None if this one has nothing
                to write.
            path: where it is afterwards; there is never a part of it.
            put: of whole_files: whether it takes the place of what is there, or is added to it.

        Returns:
            Whether it was written, as far as this worker knows.
        """
        self.check_entered("saving a file")
        for _ in range(_ATTEMPTS):
            first = self.ctx.rank == 0
            if first and write is not None:
                put(path, write, self.writer)
            # Nobody is told of a first one that has no samples of the last batch: once more then.
            found = self.ctx.mean(first=float(first), saved=float(first and write is not None))
            if found["first"] > 0:
                return found["saved"] > 0
        return False


class LoneLoader:
    """What stands in for a DataLoader.

    Within `epochs` its batches are this worker's shares; otherwise they are the DataLoader's own,
    whole. The attributes of a DataLoader that scripts look at are here, too.

    Args:
        loader: as the script made it.
        script: whose.

    Attributes:
        within: the loop over `epochs` is under way.
    """

    def __init__(self, loader: DataLoader[Any], script: LoneScript) -> None:
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.sampler = loader.sampler
        self.batch_sampler = loader.batch_sampler
        self.collate_fn = loader.collate_fn
        self.num_workers = loader.num_workers
        self.drop_last = loader.drop_last
        self._whole = loader
        self._script = script
        self._shared: Loader | None = None
        self.within = False
        self._through = False  # with the epoch in hand
        if isinstance(loader.dataset, Stream):
            self._options: dict[str, Any] | str = (
                "its dataset is iterable, and nobody could say which samples were used"
            )
        else:
            self._options = _options(loader)

    def __len__(self) -> int:
        """Batches of an epoch, whatever becomes of the group."""
        return len(self._whole)

    @property
    def left(self) -> int:
        """Batches left of the epoch; more if samples of a lost worker come back."""
        return self._shared.steps_left if self._shared is not None else len(self)

    def epochs(self, total: int) -> Iterator[int]:
        """Numbers of the epochs up to the `total`-th: train on the loader within this loop.

        A joiner begins with the epoch that the group is in.

        Raises:
            ConfigError: the loader draws its samples in a way that a group cannot share.
        """
        if isinstance(self._options, str):
            raise ConfigError(
                f"{self._script.peer} cannot train on this DataLoader: {self._options}. Nothing "
                "was read. Workers that come and go share one order, which elastix draws: use "
                "shuffle=True or shuffle=False, a batch_size, and no sampler; or write the loop "
                "with ctx.loader."
            )
        if type(total) is not int or total < 0:
            raise ConfigError(
                f"epochs must be a whole number >= 0, not {total!r}. Nothing was read."
            )
        self._script.enter()
        if self._shared is None:
            options, generator = self._options, self._whole.generator
            given = "seed" in options  # by an argument of the script's
            if not given and options["shuffle"]:
                options = {**options, "seed": self._script.seed_of_next_order(generator)}
            elif not given and generator is not None:  # the seed of what samples draw
                options = {**options, "seed": generator.initial_seed()}
            self._shared = self._script.ctx.loader(self.dataset, **options)
        for epoch in self._shared.epochs(total):
            self.within, self._through = True, False
            self._script.within += 1
            try:
                yield epoch.number
            finally:
                self.within = False
                self._script.within -= 1

    def __iter__(self) -> Iterator[Any]:
        """See the class.

        Raises:
            ConfigError: within an epoch, a second time.
        """
        self._script.enter()
        within = self.within and self._shared is not None
        batches = iter(self._shared) if within and self._shared is not None else iter(self._whole)
        if within and self._through:
            raise ConfigError(
                "a loader was iterated again within an epoch that it had come to the end of, where "
                "it has no batch left. Nothing was read; the run ends. To look at all samples "
                "again, as for the accuracy on them, use a loader of its own for them, or "
                "ctx.evaluate; to train on them again, the next epoch."
            )
        here = object()
        for batch in batches:
            self._script.trains = within
            if not within and self._script.within and torch.is_grad_enabled():
                self._script.strays.add(here)
            yield to_device(batch, self._script.ctx.device)
        self._through = within
        self._script.strays.discard(here)  # whoever evaluates comes to the end


def _options(loader: DataLoader[Any]) -> dict[str, Any] | str:
    """Arguments of `ctx.loader` that mean the same; or why there are none."""
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return "it has a batch_sampler of its own, or no batch_size"
    shuffle = type(sampler) is RandomSampler
    if not shuffle and type(sampler) is not SequentialSampler:
        return f"it has a sampler of its own, a {type(sampler).__name__}"
    if loader.num_workers and not _seeds(loader.worker_init_fn):
        return (
            "its worker_init_fn would not be called, as what a lost worker leaves is read in other "
            "processes than these. Open files when the dataset is first asked for a sample, and "
            "leave seeds to elastix"
        )
    amount = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != amount):
        return "its sampler draws with replacement, or another number of samples than there are"
    if loader.drop_last and amount % loader.batch_size:
        return (
            f"drop_last=True would leave {amount % loader.batch_size} samples of each epoch out, "
            "and every sample is used once"
        )
    options = {"batch_size": loader.batch_size, "shuffle": shuffle, "collate_fn": loader.collate_fn}
    if loader.num_workers:
        options["num_workers"] = loader.num_workers
        options["prefetch_factor"] = loader.prefetch_factor or 2
    return options


def _seeds(function: Any) -> bool:  # noqa: ANN401 - any callable
    """Whether a peer has put this in place, to seed generators; None has nothing to do either."""
    function = getattr(function, "func", function)  # of a partial
    return function is None or getattr(function, "__name__", "") in _SEEDERS


def _schedulers(
    everything: Sequence[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    known: Sequence[Any],
    peer: str,
) -> list[LRScheduler]:
    """Schedulers that were made for these optimizers, and were not set up.

    Peers let a script keep them to itself. A joiner needs to be given their counts, and an
    optimizer does not know its scheduler, so they are looked for in memory, once.

    Raises:
        ConfigError: one optimizer has several, and nobody could say which is which.
    """
    found = [other for other in everything if issubclass(type(other), LRScheduler)]
    inner = [part for one in [*found, *known] for part in getattr(one, "_schedulers", ())]
    taken = {id(other) for other in (*known, *inner)}
    fresh: list[LRScheduler] = []
    for optimizer in optimizers:
        own = [
            one
            for one in found
            if id(one) not in taken and _bare(getattr(one, "optimizer", None)) is optimizer
        ]
        if len(own) > 1:
            raise ConfigError(
                f"an optimizer ({type(optimizer).__name__}) has {len(own)} schedulers "
                f"({', '.join(sorted(type(one).__name__ for one in own))}), and {peer} was not "
                "given them. Nothing was prepared. A joiner must be given what each has counted: "
                "name them, as track(warmup=..., decay=...), or use a ChainedScheduler."
            )
        fresh += own
    return fresh


def _strays(
    everything: Sequence[Any], modules: Sequence[torch.nn.Module], known: Sequence[Any]
) -> list[torch.optim.Optimizer]:
    """Optimizers of parameters that are in none of the modules."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    return [
        other
        for other in everything
        if issubclass(type(other), torch.optim.Optimizer)
        and _bare(other) is other
        and not any(other is one for one in known)
        and not any(id(one) in own for group in other.param_groups for one in group["params"])
    ]


def _refuse_stray(
    script: "weakref.ref[LoneScript]",
    optimizer: torch.optim.Optimizer,
    *_: Any,  # noqa: ANN401 - as torch calls it
) -> None:
    """Before a step of such a one.

    Raises:
        ConfigError: as long as the script is there.
    """
    alive = script()
    if alive is not None:
        raise ConfigError(
            f"{type(optimizer).__name__}.step() was called, and its parameters are of no model "
            f"that {alive.peer} was given: each worker would train another model by its own share "
            "of the batches, and a joiner would not have it. No step was taken; the run ends. Set "
            "up all models and optimizers before the first batch."
        )


def _bare(optimizer: Any) -> Any:  # noqa: ANN401 - a peer's wrapper, or what it wraps
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def digest(value: Any) -> list[int]:  # noqa: ANN401
    """Numbers that are equal for equal values, and hardly ever for different ones."""
    text = blake3()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            text.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            text.update(raw_bytes(leaf.detach().cpu().contiguous()).numpy().data)
        else:
            text.update(pickle.dumps(leaf))
    whole = int.from_bytes(text.digest(8))
    return [(whole >> _BITS * place) % (1 << _BITS) for place in range(_NUMBERS)]


def _rebuilt(values: Any, numbers: Iterator[float]) -> Any:  # noqa: ANN401
    """The same containers, tensors and numbers, with other contents."""

    def one(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, torch.Tensor):
            return next(numbers)
        flat = [next(numbers) for _ in range(leaf.numel())]
        kind = leaf.dtype if leaf.is_floating_point() else torch.get_default_dtype()
        return torch.tensor(flat, dtype=kind, device=leaf.device).reshape(leaf.shape)

    return tree_map(one, values)
