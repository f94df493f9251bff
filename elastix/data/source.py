"""A dataset and how it is read: which samples stand at which positions, and a batch of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset, default_collate

from elastix.data.cursor import Blocks, indices, runs
from elastix.data.formats.indexed import InBlocks, by_position
from elastix.data.horizon import ReaderPosition
from elastix.data.random_numbers import seed_at, seed_generators
from elastix.data.shared import Shared
from elastix.errors import ConfigError
from elastix.events import Span

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, np.random.Generator], Any]
"""`augment(sample, rng)`: what is collated in place of the sample."""

_LOW = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Source:
    """A map-style dataset and how to read it.

    Attributes:
        batch_size: samples of a global batch; of each worker's share with `per_worker`.
        seed: of the order, with the epoch; of augmentation, with the position.
        slices: into how many a global batch is cut; None: into a share for each worker.
        augment: makes what is collated of a sample; see `rng_at`.
        exact: what dataset, augmentation and collation draw from the global generators is a
            function of the position too; see `_Seeded`.
        num_workers: processes that load ahead; 0 loads in the training thread.
        prefetch: batches that each of them loads ahead.
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
    collate: Collate = default_collate
    augment: Augment | None = None
    exact: bool = False
    num_workers: int = 0
    prefetch: int = 2
    device: torch.device

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", by_position(self.dataset))
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ConfigError(f"batch_size must be a whole number >= 1, not {self.batch_size!r}.")
        if self.slices is not None:
            self._check_slices(self.slices)
        if self.length < 1:
            raise ConfigError(f"the {type(self.dataset).__name__} is empty. No loader was made.")
        if self.augment is not None and not callable(self.augment):
            raise ConfigError(
                f"augment must be a function of a sample and a NumPy Generator, not "
                f"{self.augment!r}. No loader was made."
            )
        if self.num_workers < 0 or self.prefetch < 1:
            raise ConfigError(
                f"num_workers must be >= 0 and prefetch >= 1, not {self.num_workers} and "
                f"{self.prefetch}."
            )

    def _check_slices(self, slices: object) -> None:
        if type(slices) is not int or slices < 1:
            raise ConfigError(
                f"slices must be a whole number >= 1, not {slices!r}. No loader was made. It is "
                "into how many equal parts each batch is cut; leave it out for a share a worker."
            )
        if self.batch_size % slices:
            near = max(slices, self.batch_size // slices * slices)
            raise ConfigError(
                f"a batch_size of {self.batch_size} cannot be cut into {slices} equal slices. No "
                f"loader was made. Make it a multiple of slices, {near} say, or use other slices."
            )

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return len(self.dataset)  # type: ignore[arg-type]

    @cached_property
    def blocks(self) -> Blocks:
        """Blocks in which the order is shuffled, for a dataset whose rows are dear to reach."""
        dataset = self.dataset
        return runs(dataset.blocks) if self.shuffle and isinstance(dataset, InBlocks) else ()

    @property
    def mixed(self) -> int:
        """How many blocks are shuffled together."""
        return self.dataset.mixed if self.blocks and isinstance(self.dataset, InBlocks) else 0

    def indices(self, spans: Sequence[Span]) -> npt.NDArray[np.int64]:
        """Dataset indices at stream positions; a placeholder of two samples for no positions.

        A worker without a share has to run the same loop as the others, and batch normalisation
        refuses a single sample. Its result counts for nothing.
        """
        if not spans:
            return np.arange(min(2, self.length))
        return indices(spans, self.seed, self.length, self.shuffle, self.blocks, self.mixed)

    def keys(self, spans: Sequence[Span]) -> list[Any]:
        """What to ask `keyed` for: indices, with the positions if these matter."""
        wanted: list[int] = self.indices(spans).tolist()
        if self.augment is None and not self.exact:
            return wanted
        positions = [p for start, stop in spans or ((0, len(wanted)),) for p in range(start, stop)]
        return list(zip(wanted, positions, strict=True))

    @cached_property
    def keyed(self) -> Dataset[Any]:
        """Samples as they are collated, by `keys`: what processes that load ahead are given."""
        if self.exact:
            return _Seeded(self.dataset, self.augment, self.seed)
        if self.augment is None:
            return self.dataset
        return _Augmented(self.dataset, self.augment, self.seed)

    def read(self, spans: Sequence[Span]) -> Any:  # noqa: ANN401
        """The batch at these positions, on the device."""
        if self._gathers:
            chosen = torch.from_numpy(self.indices(spans))
            tensors = cast("TensorDataset", self.dataset).tensors
            return to_device([t.index_select(0, chosen) for t in tensors], self.device)
        with _one_thread() if self.exact and self.num_workers else nullcontext():
            batch = self.collate(samples_at(self.keyed, self.keys(spans)))
        return to_device(batch, self.device)

    @cached_property
    def _gathers(self) -> bool:
        """Whether batches can be taken out of tensors at once, to the same bits as one by one."""
        if type(self.dataset) is not TensorDataset or self.collate is not default_collate:
            return False
        return self.augment is None and all(map(_is_plain, self.dataset.tensors))

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
    if hasattr(dataset, "__getitems__"):
        return cast("list[Any]", dataset.__getitems__(keys))
    return [dataset[key] for key in keys]


class _Augmented(Dataset[Any]):
    """Samples by (index, position)."""

    def __init__(self, dataset: Dataset[Any], augment: Augment, seed: int) -> None:
        self._dataset = dataset
        self._augment = augment
        self._seed = seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        samples = samples_at(self._dataset, [index for index, _ in keys])
        return [
            self._augment(sample, rng_at(self._seed, position))
            for sample, (_, position) in zip(samples, keys, strict=True)
        ]


class _Seeded(Dataset[Any]):
    """Samples by (index, position), with the global generators set for each.

    They are set once more before the samples are collated, which comes next in the same thread. A
    dataset that gives several samples at once draws for all of them from what is set for the
    first: so it is given the same ones together whoever reads them, which slices are.
    """

    def __init__(self, dataset: Dataset[Any], augment: Augment | None, seed: int) -> None:
        self._dataset = dataset
        self._augment = augment
        self._seed = seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        at_once = hasattr(self._dataset, "__getitems__")
        samples: list[Any] = []
        for here in [keys] if at_once else [[key] for key in keys]:
            seed_generators(seed_at(self._seed, "sample", here[0][1]))
            found = samples_at(self._dataset, [index for index, _ in here])
            samples += [
                self._augmented(s, position) for s, (_, position) in zip(found, here, strict=True)
            ]
        seed_generators(seed_at(self._seed, "collate", keys[0][1]))
        return samples

    def _augmented(self, sample: Any, position: int) -> Any:  # noqa: ANN401
        if self._augment is None:
            return sample
        return self._augment(sample, rng_at(self._seed, position))


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
