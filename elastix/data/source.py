"""A dataset and how it is read: which samples stand at which positions, and a batch of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset, default_collate

from elastix.arguments import check_value, require
from elastix.data.cache_eviction import ReaderPosition
from elastix.data.cursor import count, split
from elastix.data.formats.indexed import Indexed, by_position, known_by
from elastix.data.random_numbers import elsewhere, seed_at, seed_generators
from elastix.data.rehearsal import Memory, WithMemory
from elastix.data.sample_order import Blocks, indices, is_scattered, runs
from elastix.data.shared import Shared
from elastix.errors import ConfigError, TrainError
from elastix.events import Span

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, np.random.Generator], Any]
"""`augment(sample, rng)`: what is collated in place of the sample."""

_PLAIN: Mapping[str, object] = {
    **dict.fromkeys(("batch_size", "seed", "num_workers", "prefetch"), int),
    **dict.fromkeys(("per_worker", "shuffle"), bool),
    "slices": int | None,
    "microbatch": int | None,
}
_LOW = (1 << 64) - 1
_REHEARSED = 1 << 63
"""Above all positions of a stream are those of what is rehearsed beside it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A map-style dataset and how to read it.

    Attributes:
        batch_size: samples of a global batch; of each worker's share with `per_worker`.
        seed: of the order, with the epoch; of augmentation, with the position.
        slices: into how many a global batch is cut; None: into a share for each worker.
        microbatch: samples of which a process gets a multiple; None: any number.
        augment: makes what is collated of a sample; see `rng_at`.
        exact: what dataset, augmentation and collation draw from the global generators is a
            function of the position too; see `_Seeded`.
        num_workers: processes that load ahead; 0 loads in the training thread.
        prefetch: batches that each of them loads ahead.
        memory: of earlier datasets, what stands beside the samples of this one.
        tiny_whole: a batch of which somebody would have nothing is not split: each has all of it.
        part: which part of a worker's share this process reads, and of how many: one for each
            place of a crew that splits samples.
        device: where tensors of a batch are moved.

    Raises:
        ConfigError: on construction, for a dataset without a length and impossible sizes.
    """

    dataset: Dataset[Any]
    batch_size: int
    per_worker: bool = False
    shuffle: bool = True
    seed: int = 0
    slices: int | None = None
    microbatch: int | None = None
    collate: Collate = default_collate
    augment: Augment | None = None
    exact: bool = False
    num_workers: int = 0
    prefetch: int = 2
    memory: Memory | None = None
    tiny_whole: bool = False
    part: tuple[int, int] = (0, 1)
    device: torch.device

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", by_position(self.dataset))
        for name, hint in _PLAIN.items():
            said = "prefetch_factor" if name == "prefetch" else name
            value = check_value("ctx.loader", said, hint, getattr(self, name))
            object.__setattr__(self, name, value)
        self._check_least("batch_size", self.batch_size, 1)
        self._check_least("seed", self.seed, 0)
        self._check_least("num_workers", self.num_workers, 0)
        self._check_least("prefetch_factor", self.prefetch, 1)
        if self.slices is not None:
            self._check_slices(self.slices)
        if self.microbatch is not None:
            self._check_microbatch(self.microbatch)
        if self.length < 1:
            raise ConfigError(f"the {type(self.dataset).__name__} is empty. No loader was made.")
        if self.augment is not None and not callable(self.augment):
            raise ConfigError(
                f"augment must be a function of a sample and a NumPy Generator, not "
                f"{self.augment!r}. No loader was made."
            )
        if not callable(self.collate):
            raise ConfigError(
                f"collate_fn must be a function of a list of samples, not {self.collate!r}. No "
                "loader was made. Leave it out for torch's default_collate."
            )

    @staticmethod
    def _check_least(name: str, value: int, least: int) -> None:
        require(value >= least, f"{name} must be >= {least}, not {value}. No loader was made.")

    def _check_slices(self, slices: int) -> None:
        if slices < 1:
            raise ConfigError(
                f"slices must be >= 1, not {slices}. No loader was made. It is into how many equal "
                "parts each batch is cut; leave it out for a share a worker."
            )
        if self.batch_size % slices:
            near = max(slices, self.batch_size // slices * slices)
            raise ConfigError(
                f"a batch_size of {self.batch_size} cannot be cut into {slices} equal slices. No "
                f"loader was made. Make it a multiple of slices, {near} say, or use other slices."
            )

    def _check_microbatch(self, microbatch: int) -> None:
        self._check_least("microbatch", microbatch, 1)
        require(
            self.memory is None,
            "microbatch does not work with rehearse, which appends samples to each batch. No "
            "loader was made. Leave out one of the two.",
        )
        unit = self.unit * (self.slices or 1)
        if self.batch_size % unit:
            near = max(unit, self.batch_size // unit * unit)
            shards = self.part[1]
            of_all = f" for each of {shards} places of the axis 'shard'" if shards > 1 else ""
            each = f" in each of {self.slices} slices" if self.slices else ""
            raise ConfigError(
                f"a batch_size of {self.batch_size} is no whole number of micro-batches of "
                f"{microbatch}{of_all}{each}. No loader was made. Make it a multiple of {unit}, "
                f"{near} say, or use another microbatch."
            )

    @property
    def unit(self) -> int:
        """A worker's share of a batch is a multiple of so many samples."""
        return 1 if self.microbatch is None else self.microbatch * self.part[1]

    @property
    def units(self) -> tuple[int, ...]:
        """See Cursor.draw: micro-batches for each place, else for one, else what is left."""
        return () if self.microbatch is None else (self.unit, self.microbatch)

    def fits(self, samples: int) -> bool:
        """Whether so many are a share of whole micro-batches, or less than one."""
        if self.microbatch is None or samples < self.microbatch:
            return True
        return samples % (self.unit if samples > self.unit else self.microbatch) == 0

    def steps(self, samples: int, batch_size: int) -> int:
        """How many batches so many samples are, at the end of an epoch."""
        if self.microbatch is None:
            return -(-samples // batch_size)
        rest = samples % self.unit
        few = (rest >= self.microbatch) + (rest % self.microbatch > 0)
        return -(-(samples - rest) // batch_size) + few

    @cached_property
    def length(self) -> int:
        """Samples of an epoch: as many as when it was first asked, though the dataset may grow."""
        return len(self.dataset)  # type: ignore[arg-type]

    @cached_property
    def blocks(self) -> Blocks:
        """Blocks in which the order is shuffled, for a dataset whose rows are dear to reach."""
        dataset = self.dataset
        return runs(dataset.blocks) if self.shuffle and isinstance(dataset, Indexed) else ()

    @property
    def mixed(self) -> int:
        """How many blocks are shuffled together."""
        return self.dataset.mixed if self.blocks and isinstance(self.dataset, Indexed) else 0

    @cached_property
    def files(self) -> str:
        """By which the dataset's samples are known again; see known_by."""
        return known_by(self.dataset)

    @property
    def draws(self) -> tuple[object, ...]:
        """On which it depends which samples a batch has, and who computes them."""
        of_all = self.length, self.batch_size, self.per_worker, self.slices, self.microbatch
        return (*of_all, self.shuffle, self.seed, self.blocks, self.mixed, self.files)

    @property
    def scattered(self) -> bool:
        """Whether the order is computed where it is needed."""
        return self.shuffle and is_scattered(self.length, self.blocks)

    def indices(self, spans: Sequence[Span]) -> npt.NDArray[np.int64]:
        """Dataset indices at stream positions; a placeholder of two samples for no positions.

        A worker without a share has to run the same loop as the others, and batch normalisation
        refuses a single sample. Its result counts for nothing. With micro-batches it is one.
        """
        if not spans:
            return np.arange(min(self.microbatch or 2, self.length))
        return indices(spans, self.seed, self.length, self.shuffle, self.blocks, self.mixed)

    def weigh(self, spans: Sequence[Span]) -> int:
        """How many samples the batch at these positions has, rehearsed ones included."""
        return count(spans) + (self.memory.count(spans) if self.memory else 0)

    def own(self, share: tuple[Span, ...]) -> tuple[Span, ...]:
        """What of a worker's share falls to this process."""
        index, parts = self.part
        if parts == 1 or not share or self._at_all_places(share):
            return share
        return split(share, parts, count(share))[index]

    def within(self, share: tuple[Span, ...]) -> float:
        """How much what this process has of a worker's share counts there; 0 if that is empty."""
        if self._at_all_places(share):
            return 1 / self.part[1]
        return count(self.own(share)) / count(share) if share else 0.0

    def _at_all_places(self, share: tuple[Span, ...]) -> bool:
        """Whether there are too few micro-batches for all places: all of them have these.

        They make equally many passes on equally many samples, as a pipeline of shards has to.
        """
        return self.microbatch is not None and count(share) % self.unit > 0

    def keys(self, spans: Sequence[Span]) -> list[Any]:
        """What to ask `keyed` for: indices, with the positions if these matter."""
        wanted: list[int] = self.indices(spans).tolist()
        positions = [p for start, stop in spans or ((0, len(wanted)),) for p in range(start, stop)]
        if self.memory is not None:
            wanted += [self.length + place for place in self.memory.places(spans)]
            positions += [_REHEARSED + turn for turn in self.memory.turns(spans)]
        if self.augment is None and not self.exact:
            return wanted
        return list(zip(wanted, positions, strict=True))

    @cached_property
    def keyed(self) -> Dataset[Any]:
        """Samples as they are collated, by `keys`: what processes that load ahead are given."""
        dataset = self.dataset
        if self.memory is not None and self.memory.names:
            dataset = WithMemory(dataset, self.memory)
        if self.exact:
            return _Seeded(dataset, self.augment, self.seed)
        if self.augment is None:
            return _Several(dataset) if hasattr(dataset, "__getitems__") else dataset
        return _Augmented(dataset, self.augment, self.seed)

    def read(self, spans: Sequence[Span]) -> Any:  # noqa: ANN401
        """The batch at these positions, on the device."""
        if self._gathers:
            return to_device(self._gathered(spans), self.device)
        with _one_thread() if self.exact and self.num_workers else nullcontext():
            batch = self.collate(samples_at(self.keyed, self.keys(spans)))
        return to_device(batch, self.device)

    def collated(self, keys: list[Any], samples: Mapping[int, Any]) -> Any:  # noqa: ANN401
        """A batch as a process makes it that loads ahead, where some samples were read before.

        Args:
            keys: of all.
            samples: what there is of them, by place in `keys`; the others are read.
        """
        lacks = [place for place in range(len(keys)) if place not in samples]
        read = samples_at(self.keyed, [keys[place] for place in lacks]) if lacks else []
        every = {**samples, **dict(zip(lacks, read, strict=True))}
        first = keys[0][1] if isinstance(keys[0], tuple) else keys[0]
        with _one_thread(), elsewhere(self.seed, "collate", first):
            return self.collate([every[place] for place in range(len(keys))])

    @cached_property
    def _gathers(self) -> bool:
        """Whether batches can be taken out of tensors at once, to the same bits as one by one."""
        if type(self.dataset) is not TensorDataset or self.collate is not default_collate:
            return False
        if self.augment is not None or not all(map(_is_plain, self.dataset.tensors)):
            return False
        if self.memory is not None and not self.memory.settled:
            return False
        return self._rehearsed is None or self._fits(self._rehearsed)

    @cached_property
    def _rehearsed(self) -> Any:  # noqa: ANN401 - whatever collate makes
        """All that is rehearsed as one batch; None if there is nothing."""
        if self.memory is None or not self.memory.names:
            return None
        samples = [self.memory.sample(place) for place in range(len(self.memory.names))]
        return self.collate(samples)

    def _fits(self, others: Any) -> bool:  # noqa: ANN401 - whatever collate makes
        """Whether rows of these can stand below those of the dataset."""
        tensors = cast("TensorDataset", self.dataset).tensors
        if not isinstance(others, list) or len(others) != len(tensors):
            return False
        pairs = zip(tensors, others, strict=True)
        return all(
            isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
            for a, b in pairs
        )

    def _gathered(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        chosen = torch.from_numpy(self.indices(spans))
        tensors = cast("TensorDataset", self.dataset).tensors
        batch = [tensor.index_select(0, chosen.to(tensor.device)) for tensor in tensors]
        if self.memory is None or self._rehearsed is None:
            return batch
        places = torch.tensor(self.memory.places(spans), dtype=torch.int64, device="cpu")
        olds = (old.index_select(0, places.to(old.device)) for old in self._rehearsed)
        return [torch.cat(pair) for pair in zip(batch, olds, strict=True)]

    def announce(self, epoch: int, epochs: int, start: int, stop: int) -> None:
        """A batch begins, with what is between two positions: who shares samples plans by it."""
        if isinstance(self.dataset, Shared):
            offset = max(0, start - epoch * self.length)
            reader = ReaderPosition(self.seed, epoch, offset, epochs, self.shuffle)
            self.dataset.announce(reader, stop - start)


def rng_at(seed: int, position: int) -> np.random.Generator:
    """The random numbers of one position of the stream, whoever asks for them, and when.

    A sample has other ones in each epoch, and the same after any loss, in any process that loads
    it, and in a replay.
    """
    key = np.array([seed & _LOW, position], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def samples_at(dataset: Any, keys: list[Any]) -> list[Any]:  # noqa: ANN401 - whatever a sample is
    """Several samples, at once if the dataset can."""
    if not hasattr(dataset, "__getitems__"):
        return [dataset[key] for key in keys]
    samples = cast("list[Any]", dataset.__getitems__(keys))
    if len(samples) != len(keys):
        raise TrainError(
            f"{type(dataset).__name__}.__getitems__ gave {len(samples)} samples for {len(keys)} "
            "positions. The batch was not used. It must give one for each, in their order."
        )
    return samples


@contextmanager
def told_from_the_end() -> Iterator[None]:
    """Within, what a dataset raises is never taken for the end of an epoch.

    Raises:
        TrainError: StopIteration, which would end the loop over the batches in silence.
    """
    try:
        yield
    except StopIteration as error:
        raise TrainError(
            "the dataset, its decoding, augment or collate_fn raised StopIteration while a batch "
            "was read. The batch was not used. A `next` in one of them has come to an end: see the "
            "traceback above."
        ) from error


class _Several(Dataset[Any]):
    """A dataset that gives several samples at once, and as many as were asked for."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return samples_at(self._dataset, keys)


class _Augmented(Dataset[Any]):
    """Samples by (index, position)."""

    def __init__(self, dataset: Dataset[Any], augment: Augment | None, seed: int) -> None:
        self._dataset = dataset
        self._augment = augment
        self._seed = seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        samples = samples_at(self._dataset, [index for index, _ in keys])
        if self._augment is None:
            return samples
        return [
            self._augment(sample, rng_at(self._seed, position))
            for sample, (_, position) in zip(samples, keys, strict=True)
        ]


class _Seeded(_Augmented):
    """The same, with the global generators set for each.

    They are set once more before the samples are collated, which comes next in the same thread. A
    dataset that gives several samples at once draws for all of them from what is set for the
    first: so it is given the same ones together whoever reads them, which slices are.
    """

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        at_once = hasattr(self._dataset, "__getitems__")
        samples: list[Any] = []
        for here in [keys] if at_once else [[key] for key in keys]:
            seed_generators(seed_at(self._seed, "sample", here[0][1]))
            samples += super().__getitems__(here)
        seed_generators(seed_at(self._seed, "collate", keys[0][1]))
        return samples


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within: as many threads as a process of DataLoader's has, on which last bits depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_plain(tensor: torch.Tensor) -> bool:
    """One whose rows, stacked, are what index_select gives, strides included."""
    kind = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return kind and tensor.is_contiguous() and not tensor.is_quantized and not tensor.requires_grad


def to_device(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Move every tensor in a nested batch; without waiting if it is in pinned memory."""
    if device.type == "cpu":
        return batch
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)
