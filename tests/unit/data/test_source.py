"""How a dataset is read: gathered, augmented or shared, the batches are the same for everybody."""

import gc
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset, default_collate

import elastix
from elastix.data.loader import Loader
from elastix.data.shared import dataset as shared_dataset
from elastix.data.source import Source, rng_at
from elastix.errors import ConfigError, TrainError
from tests.pictures import Pictures
from tests.unit.data.test_loader import Numbers, Pace

CPU = torch.device("cpu")
SPANS = ((3, 5), (17, 24), (41, 42))


def source(dataset, **more) -> Source:
    return Source(dataset=dataset, batch_size=6, device=CPU, **more)


# ---------------------------------------------------------------------------------------- gather


class Subclass(torch.Tensor):
    pass


TENSORS = {
    "pictures": torch.randn(20, 3, 4, 5),
    "labels": torch.arange(20),
    "half": torch.randn(20, 2).bfloat16(),
    "bits": torch.arange(20) % 3 == 0,
    "complex": torch.randn(20, 2, dtype=torch.complex64),
    "nothing": torch.zeros(20, 0),
    "channels last": torch.randn(20, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(7, 20).t(),
    "subclass": torch.randn(20, 2).as_subclass(Subclass),
    "not a number": torch.full((20,), float("nan")),
}


@pytest.mark.parametrize("names", [*((name,) for name in TENSORS), ("pictures", "labels")])
@pytest.mark.parametrize("spans", [SPANS, ()])
def test_a_batch_of_tensors_is_that_of_default_collate_to_the_bit(names, spans):
    data = TensorDataset(*(TENSORS[name] for name in names))
    here = source(data, seed=4)
    expected = default_collate([data[i] for i in here.indices(spans)])
    found = here.read(spans)
    assert type(found) is type(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        assert (ours.dtype, ours.shape, ours.stride()) == (
            theirs.dtype,
            theirs.shape,
            theirs.stride(),
        )
        same = torch.equal(ours.nan_to_num(), theirs.nan_to_num()) if ours.numel() else True
        assert same
        assert not ours.numel() or ours.data_ptr() != TENSORS[names[0]].data_ptr()


class IndexDevices(TorchFunctionMode):
    """Where the indices are by which tensors are gathered: kernels want them beside the tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.index_select:
            self.found.append((args[0].device.type, args[2].device.type))
        return function(*args, **(kwargs or {}))


def test_tensors_that_are_on_a_device_are_gathered_there():
    data = TensorDataset(torch.randn(20, 3, device="meta"), torch.arange(20))
    with IndexDevices() as devices:
        assert [len(part) for part in source(data).read(SPANS)] == [10, 10]
    assert devices.found == [("meta", "meta"), ("cpu", "cpu")]


class OwnTensors(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor[index] * 0 for tensor in self.tensors)


def test_what_somebody_made_of_it_is_asked_sample_by_sample():
    assert source(OwnTensors(torch.ones(20))).read(SPANS)[0].sum() == 0
    listed = source(TensorDataset(torch.ones(20)), collate=len)
    assert listed.read(SPANS) == 10


# ------------------------------------------------------------------------------------- augmented


def noisy(sample: int, rng: np.random.Generator) -> tuple[int, float]:
    return sample, float(rng.random())


def run(changes, num_workers=0, seed=7):
    """What each position was augmented to, in a group that changes."""
    seen = defaultdict(set)
    loader, pace = None, Pace()
    made = source(Numbers(20), seed=seed, augment=noisy, num_workers=num_workers)
    loader = Loader(0, made, pace)
    step = 0
    for epoch in loader.epochs(2):
        for samples, values in epoch:
            step += 1
            members, contributors = changes.get(step, (pace.group, pace.group))
            if 0 in loader._drawn[-1].members and 0 in contributors:
                for sample, value in zip(samples.tolist(), values.tolist(), strict=True):
                    seen[epoch.number, sample].add(value)
            loader.commit(contributors)
            pace.group = members
    return seen


def test_augmentation_is_a_function_of_the_position_whatever_becomes_of_the_group():
    alone = run({})
    assert len(alone) == 40
    assert len(set.union(*alone.values())) == 40  # other numbers for each sample and epoch
    for changes in (
        {1: ((0, 1), (0,)), 3: ((0, 1), (0,)), 4: ((0,), (0,))},
        {2: ((0, 1, 2), (0,)), 5: ((0,), (0,))},
    ):
        for num_workers in (0, 1):
            seen = run(changes, num_workers)
            assert seen
            assert all(values == alone[key] for key, values in seen.items())
    other = run({}, seed=8)
    assert not set.union(*alone.values()) & set.union(*other.values())


@given(st.integers(0, 2**70), st.integers(0, 2**62))
def test_random_numbers_of_a_position_never_change(seed, position):
    first, second = (rng_at(seed, position).integers(0, 1 << 60, 4).tolist() for _ in range(2))
    assert first == second
    assert first != rng_at(seed, position + 1).integers(0, 1 << 60, 4).tolist()
    assert rng_at(5, 9).bit_generator.random_raw(2).tolist() == [
        1464415859294777243,
        1892761129554657964,
    ]


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigError, match=r"not 0\.5"):
        source(Numbers(3), augment=0.5)


def test_a_worker_without_a_share_is_augmented_too():
    samples, _ = source(Numbers(9), augment=noisy).read(())
    assert samples.tolist() == [0, 1]


# ---------------------------------------------------------------------------------------- shared


def crop(sample, rng):
    start = int(rng.integers(0, 100))
    return torch.from_numpy(sample["array"][start : start + 500].copy()), sample["n"]


@pytest.mark.fast("0")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_a_shared_dataset_are_those_of_the_dataset(tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(shared_dataset, "_MEMORY", tmp_path)
    data = Pictures()
    shared = elastix.Shared(data, 17_000 + 12 * 2400)
    batches = {}
    for name, dataset in (("plain", data), ("shared", shared), ("again", shared)):
        loader = Loader(0, source(dataset, seed=3, augment=crop, num_workers=num_workers), Pace())
        batches[name] = []
        for epoch in loader.epochs(2):
            for batch in epoch:
                batches[name].append(batch)
                loader.commit((0,))
    for name in ("shared", "again"):
        for ours, theirs in zip(batches[name], batches["plain"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    board = shared._attached.arena.board
    assert (board[:, 0] == 1).sum() == 1
    _, seed, epoch, offset, epochs, shuffle, taken, _ = board[board[:, 0] == 1][0].tolist()
    assert (seed, epoch, epochs, shuffle) == (3, 1, 2, 1)
    assert offset + taken == 40
    del epoch, loader  # with the processes that load
    gc.collect()
    shared.close()
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------- datasets that misbehave in silence


class Ends(Numbers):
    """Its sample 13 calls `next` once too often."""

    def __getitem__(self, index):
        return next(iter(())) if index == 13 else index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_comes_to_an_end_does_not_end_the_epoch(num_workers):
    here = source(Ends(20), num_workers=num_workers, shuffle=False, collate=list)
    loader = Loader(0, here, Pace())
    for _ in range(2):
        loader.next_batch()
        loader.commit((0,))
    with pytest.raises(TrainError, match="StopIteration"):
        loader.next_batch()


class Forgets(Numbers):
    """Gives several samples at once, but not the last."""

    def __getitems__(self, indices):
        return indices[:-1]


@pytest.mark.parametrize("augment", [None, lambda sample, _: sample])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_gives_too_few_samples_is_named(augment, num_workers):
    here = source(Forgets(20), num_workers=num_workers, collate=list, augment=augment)
    with pytest.raises(TrainError, match=r"Forgets\.__getitems__ gave 5 samples for 6 positions"):
        Loader(0, here, Pace()).next_batch()


class Grows(Numbers):
    """One sample more each time that it is asked how many it has."""

    def __len__(self):
        self.asked = getattr(self, "asked", 19) + 1
        return self.asked


def test_a_dataset_that_grows_is_read_as_it_was():
    loader = Loader(0, source(Grows(99), collate=list), Pace())
    found = []
    while (batch := loader.next_batch()) is not None:
        found += batch
        loader.commit((0,))
    assert sorted(found) == list(range(20))
