"""How DDP's ranks share out a dataset, and when their models count as the same."""

import pytest
import torch
from torch.utils.data import TensorDataset

from elastix.bench.ddp_group import check_levels
from elastix.bench.ddp_rank import Shares
from elastix.data.source import Source
from elastix.errors import TrainError


def source(length=23, **options):
    dataset = TensorDataset(torch.arange(length))
    return Source(dataset=dataset, device=torch.device("cpu"), **{"batch_size": 8, **options})


def test_ranks_share_out_each_batch_without_gap_or_overlap():
    ranks = [list(Shares(source(), rank, 3)) for rank in range(3)]
    assert [[len(share) for share in batches] for batches in ranks] == [
        [2, 2, 2],
        [3, 3, 2],
        [3, 3, 3],
    ]
    everything = [place for batches in ranks for share in batches for place in share]
    assert sorted(everything) == list(range(23))
    assert everything != sorted(everything)


def test_a_batch_with_fewer_samples_than_ranks_is_left_out_by_all():
    ranks = [Shares(source(length=18), rank, 3) for rank in range(3)]
    assert [len(shares) for shares in ranks] == [2, 2, 2]
    assert all(len(list(shares)) == 2 for shares in ranks)


def test_a_batch_of_each_worker_grows_with_them():
    shares = Shares(source(per_worker=True), 1, 2)
    assert (len(shares), shares.batch(0), shares.batch(1)) == (2, 16, 7)
    assert len(next(iter(shares))) == 8


def test_epochs_have_orders_of_their_own_and_all_ranks_the_same():
    mine, yours = Shares(source(), 0, 2), Shares(source(), 1, 2)
    first = list(mine)
    mine.epoch = yours.epoch = 1
    assert list(mine) != first
    both = [place for one in (mine, yours) for share in one for place in share]
    assert sorted(both) == list(range(23))


def test_what_is_augmented_is_told_its_position():
    shares = Shares(source(augment=lambda sample, rng: sample, shuffle=False), 0, 2)
    shares.epoch = 2
    assert next(iter(shares)) == [(place, 46 + place) for place in range(4)]


def test_models_that_differ_are_found():
    assert check_levels([{"4": "a", "16": "b"}, {"4": "a"}], 2)
    with pytest.raises(TrainError, match="after 4 batches"):
        check_levels([{"4": "a"}, {"4": "b"}], 2)


def test_nothing_is_compared_before_the_slowest_rank_has_said_what_it_has():
    assert not check_levels([{"4": "a", "16": "b"}, {}], 2)
    assert not check_levels([{}, {}], 2)
    with pytest.raises(TrainError, match="after 4 batches"):
        check_levels([{"4": "a"}, {"4": "b"}, {}], 3)
