"""What a dataset draws is a function of the sample's position, whoever reads it and when."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from elastix.data.random_numbers import seed_at, seed_generators
from elastix.data.source import Source

CPU = torch.device("cpu")


def drawn():
    return [*torch.rand(2).tolist(), random.random(), float(np.random.rand())]


class Drawing(Dataset):
    """A sample is its index and what all three generators gave."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([float(index), *drawn()], dtype=torch.float64)


class DrawingAtOnce(Drawing):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def shuffled_up(samples):
    """A collation that draws."""
    order = torch.randperm(len(samples))
    return torch.stack(samples)[order] + drawn()[-1]


def mixed(sample, rng):
    return sample + rng.random() + drawn()[-1]


def source(dataset, **more):
    return Source(dataset=dataset, batch_size=4, device=CPU, exact=True, **more)


def test_a_sample_is_the_same_whatever_was_drawn_before_and_whoever_reads_it():
    for dataset, augment in ((Drawing(), None), (Drawing(), mixed), (DrawingAtOnce(), mixed)):
        reader = source(dataset, augment=augment, collate=shuffled_up)
        first = reader.read(((4, 8),))
        drawn()
        reader.read(((11, 13),))
        assert torch.equal(reader.read(((4, 8),)), first)
        (loaded,) = DataLoader(
            reader.keyed,
            batch_sampler=[reader.keys(((4, 8),))],
            collate_fn=reader.collate,
            num_workers=1,
        )
        assert torch.equal(loaded, first)


def test_a_sample_is_another_in_another_epoch_and_with_another_seed():
    reader = source(Drawing(), shuffle=False)
    first, second = reader.read(((3, 4),)), reader.read(((23, 24),))
    assert first[0, 0] == second[0, 0]
    assert not torch.equal(first, second)
    assert not torch.equal(source(Drawing(), shuffle=False, seed=1).read(((3, 4),)), first)


def test_a_sample_does_not_depend_on_those_beside_it():
    reader = source(Drawing())
    together, apart = reader.read(((4, 8),)), [reader.read(((n, n + 1),)) for n in range(4, 8)]
    assert torch.equal(together, torch.cat(apart))


def test_without_it_nothing_is_set():
    reader = Source(dataset=Drawing(), batch_size=4, device=CPU)
    assert not torch.equal(reader.read(((4, 8),)), reader.read(((4, 8),)))


def test_places_have_seeds_of_their_own():
    places = [(), (0,), (1,), (0, 1), (1, 0), ("slice", 0), ("slice", 1), ("step", 0)]
    seeds = [seed_at(seed, *place) for seed in (0, 1) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_sets_all_generators():
    seed_generators(7)
    first = drawn()
    drawn()
    seed_generators(7)
    assert drawn() == first


class Threads(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(torch.get_num_threads())


def test_what_processes_would_have_read_is_read_with_as_many_threads():
    """Last bits depend on it, and slices of a lost worker are read in the training thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert source(Threads(), num_workers=1).read(((4, 8),)).tolist() == [1] * 4
        assert source(Threads()).read(((4, 8),)).tolist() == [2] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
