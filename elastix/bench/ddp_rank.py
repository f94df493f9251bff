"""One rank of plain DDP that runs a train function as it is: what `elastix bench` compares with.

    python -m elastix.bench.ddp_rank FOLDER RANK

The Context is elastix's own; what stands behind it is torch's: DistributedDataParallel around each
prepared module, and a DataLoader with a sampler that gives each rank its share. Both have torch's
defaults. Nothing of elastix's reducer, loader, commit round or journal takes part.

Rank 0 writes when each step was over, and every rank writes digests of its parameters now and then:
if these differ, the function trains around DDP (by calling something else than the module), and
there is nothing to compare with.
"""

import functools
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from elastix.data.random_numbers import seed_at, seed_generators
from elastix.data.source import Collate, Source, to_device
from elastix.errors import ConfigError
from elastix.state import Stateful, raw_bytes
from elastix.train.replica.context import Context
from elastix.train.replica.evaluation import Evaluation, Metric
from elastix.train.replica.learning_rate import RateScaling, hold_at_end
from elastix.train.replica.tracked_objects import drop_gradients

DIGESTS_AT = (4, 16, 64)
"""Batches drawn when parameters are compared: after the first optimizer steps."""


class Files:
    """What a rank leaves for the process that started it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.steps = folder / "steps"
        self.digests = folder / f"digests-{rank}"
        self.failure = folder / f"failure-{rank}"
        self.ended = folder / f"ended-{rank}"


class DdpReplica:
    """A rank: what context.Replica asks for, done by torch."""

    mesh, place, generation = None, 0, 1
    device, run = torch.device("cpu"), "ddp"
    alone = exact = steps_alone = False

    def __init__(self, files: Files, size: int, seed: int) -> None:
        self.me = self.rank = files.rank
        self.world_size = size
        self.settings = self
        self.seed_of_order = seed
        self.step = 0
        self.prepared = False
        self._files = files
        self._wrapped: list[DistributedDataParallel] = []
        self._modules: list[torch.nn.Module] = []
        self._scaling: RateScaling | None = None
        self._weight = 1.0  # this rank's samples of the last batch
        self._samples = 0  # of all ranks, drawn so far
        self._drawn = 0

    def prepare(self, objects: Sequence[Any]) -> None:
        """Have DDP around the modules, which makes them equal."""
        self._modules = [o for o in objects if isinstance(o, torch.nn.Module)]
        if not self._modules or self.prepared:
            raise ConfigError("ctx.prepare needs a module, and is called once.")
        for module in self._modules:
            module.to(self.device)
            drop_gradients([module])
            if any(p.requires_grad for p in module.parameters()):
                self._wrapped.append(through_ddp(module))
        for other in objects:
            hold_at_end(other)
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        if optimizers:
            optimizers[0].register_step_post_hook(self._stepped)
        self.prepared = True

    def _stepped(self, *_: Any) -> None:  # noqa: ANN401 - optimizer, args, kwargs
        self.step += 1

    def inherit(self, model: torch.nn.Module, rehearsal: object) -> Mapping[str, Any] | None:
        """There is no ancestor."""
        return None

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """There is no State."""

    def open_loader(self, source: Source) -> "DdpLoader":
        """A DataLoader for this rank.

        Raises:
            ConfigError: it is asked for what DDP has not.
        """
        for used, what in ((source.slices, "slices"), (source.memory, "rehearse")):
            if used is not None:
                raise ConfigError(
                    f"ctx.loader(..., {what}=...) has no counterpart in DDP, so there is nothing "
                    "to compare with. Measure elastix alone: --no-ddp."
                )
        return DdpLoader(self, source)

    def scale_rate(self, scaling: RateScaling) -> None:
        """The group keeps its size."""
        scaling.observe(self.world_size)

    def accumulate(self) -> AbstractContextManager[None]:
        """DDP's no_sync."""
        stack = ExitStack()
        for module in self._wrapped:
            stack.enter_context(module.no_sync())
        return cast("AbstractContextManager[None]", stack)

    def backward(self) -> AbstractContextManager[None]:
        """DDP averages what each pass adds, which comes to the same."""
        return nullcontext()

    def boundary(self) -> None:
        """Steps without a loader have no samples to count."""

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """As torch does."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
        microbatch: int | None = None,
    ) -> dict[str, float]:
        """Each rank its part, as in elastix. There are no pipelines, so no micro-batches."""
        model = self._modules[0]
        evaluation = Evaluation(model, metric, dataset, batch_size, collate, self.device)
        result = evaluation.payload(
            cast("Any", SimpleNamespace(rank=self.me, size=self.world_size))
        )
        dist.all_reduce(result)
        return evaluation.means(result)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """By the samples of the last batch."""
        sums = torch.tensor([1.0, *values.values()], dtype=torch.float64) * self._weight
        dist.all_reduce(sums)
        weight, *rest = sums.tolist()
        return {name: total / weight for name, total in zip(values, rest, strict=True)}

    def report(self, metrics: Mapping[str, Any]) -> None:
        """There is no journal."""

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """There are none."""

    def drawing(self) -> None:
        """A batch is about to be drawn: the steps with the batches before it are over."""
        if self.me == 0 and self._drawn:
            with self._files.steps.open("a") as file:
                file.write(f"{time.time()!r} {self._samples}\n")
        if self._drawn in DIGESTS_AT:
            with self._files.digests.open("a") as file:
                file.write(f"{self._drawn} {self._digest()}\n")

    def drew(self, share: int, batch: int) -> None:
        """This rank has `share` of the `batch` samples that all have."""
        self._drawn += 1
        self._weight = float(share)
        self._samples += batch

    def _digest(self) -> str:
        found = blake3()
        for module in self._wrapped:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    found.update(raw_bytes(parameter.detach().contiguous()).numpy().data)
        return found.hexdigest()


class Shares:
    """Keys of one rank's share of each global batch, as DistributedSampler draws its order.

    A batch with fewer samples than ranks, at an epoch's end, is left out.
    """

    def __init__(self, source: Source, rank: int, size: int) -> None:
        self.epoch = 0
        self._source = source
        self._rank, self._size = rank, size
        self.batch_size = source.batch_size * (size if source.per_worker else 1)

    def __len__(self) -> int:
        whole, rest = divmod(self._source.length, self.batch_size)
        return whole + (rest >= self._size)

    def batch(self, number: int) -> int:
        """Samples of that global batch."""
        return min(self.batch_size, self._source.length - number * self.batch_size)

    def __iter__(self) -> Iterator[list[Any]]:
        length = self._source.length
        order = list(range(length))
        if self._source.shuffle:
            seed = seed_at(self._source.seed, "epoch", self.epoch)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(length, generator=generator).tolist()
        for number in range(len(self)):
            first, batch = number * self.batch_size, self.batch(number)
            start, stop = (batch * (self._rank + i) // self._size for i in (0, 1))
            mine = range(first + start, first + stop)
            if self._source.augment is None:
                yield [order[place] for place in mine]
            else:
                yield [(order[place], self.epoch * length + place) for place in mine]


class DdpLoader:
    """What `ctx.loader` returns under DDP: torch's DataLoader with a sampler for this rank."""

    def __init__(self, replica: DdpReplica, source: Source) -> None:
        self.dataset: Dataset[Any] = source.dataset
        self.epoch = 0
        self._replica = replica
        self._shares = Shares(source, replica.me, replica.world_size)
        if not len(self._shares):
            raise ConfigError(
                f"the dataset has {source.length} samples, fewer than there are ranks. Nothing "
                "was measured. Take fewer workers, or a larger dataset."
            )
        more: dict[str, Any] = {}
        if source.num_workers:
            more = {"prefetch_factor": source.prefetch, "persistent_workers": True}
        self._loader: DataLoader[Any] = DataLoader(
            source.keyed,
            batch_sampler=cast("Any", self._shares),
            collate_fn=source.collate,
            num_workers=source.num_workers,
            **more,
        )
        self._number = 0

    def epochs(self, total: int) -> Iterator["DdpEpoch"]:
        """See Loader."""
        while self.epoch < total:
            self._shares.epoch, self._number = self.epoch, 0
            yield DdpEpoch(self)
            self.epoch += 1

    def __iter__(self) -> Iterator[Any]:
        replica = self._replica
        batches = iter(self._loader)
        for number in range(len(self._shares)):
            replica.drawing()
            batch = next(batches)
            self._number = number + 1
            whole = self._shares.batch(number)
            start, stop = (whole * (replica.me + i) // replica.world_size for i in (0, 1))
            replica.drew(stop - start, whole)
            yield to_device(batch, replica.device)

    @property
    def steps_left(self) -> int:
        """Batches until this epoch is drawn."""
        return len(self._shares) - self._number


class DdpEpoch:
    """See data.loader.Epoch."""

    def __init__(self, loader: DdpLoader) -> None:
        self._loader = loader
        self.number = loader.epoch
        self.dataset: Dataset[Any] = loader.dataset

    def __len__(self) -> int:
        return self._loader.steps_left

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _Inner(torch.nn.Module):
    """What DDP wraps: a module's parameters, and its own forward pass."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._plain = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        return self._plain(*args, **kwargs)


def through_ddp(module: torch.nn.Module) -> DistributedDataParallel:
    """Have DDP around each forward pass of the module from now on.

    `ctx.prepare` gives the same objects back, and functions may go on with the one that they gave,
    so the module stays what it is but for its class. A copy of it, as for an average, is plain.
    """
    kind = type(module)
    ddp = DistributedDataParallel(_Inner(module, functools.partial(kind.forward, module)))

    @functools.wraps(kind.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        through = self is module and torch.is_grad_enabled()  # evaluation is each rank's own
        return ddp(*args, **kwargs) if through else kind.forward(self, *args, **kwargs)

    names = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), names)
    return ddp


def main(folder: Path, rank: int) -> None:
    """Run the function of that folder as this rank, to its end or until it is killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    files = Files(folder, rank)
    plan = json.loads((folder / "plan.json").read_text())
    try:
        torch.set_num_threads(plan["threads"])  # as each worker of elastix does
        train = pickle.loads((folder / "train.pkl").read_bytes())
        store = FileStore(str(folder / "meeting"), plan["size"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan["size"])
        replica = DdpReplica(files, plan["size"], plan["seed"])
        seed_generators(plan["seed"])
        train(Context(cast("Any", replica), plan["config"]))
        files.ended.touch()
    except BaseException as error:  # noqa: BLE001 - the border of the process
        wrong_call = isinstance(error, ConfigError)
        told = str(error) if wrong_call else traceback.format_exc()
        draft = files.failure.with_suffix(".draft")
        draft.write_text(json.dumps({"config": wrong_call, "text": told}))
        draft.replace(files.failure)
    sys.stdout.flush()
    os._exit(0)  # a group whose peers are gone would be waited for


def _end_with_parent() -> None:
    """Its end of a pipe closes when it dies, however that happens."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
