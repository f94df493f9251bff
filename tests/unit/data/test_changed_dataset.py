"""What the train function changes in a dataset is seen; what the dataset does by itself is not."""

import pickle
from pathlib import Path

import pytest
import torch
from pyarrow import parquet, table
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import elastix
from elastix.data.changed_dataset import changed, look
from elastix.data.loader import Loader
from elastix.data.source import Source
from tests.unit.data.test_loader import Pace


class Noise:
    def __init__(self):
        self.level = 0.5

    def __call__(self, x):
        return x * self.level


class Noisy(Noise):
    def __call__(self, row):
        return row["n"] * self.level


def flipped(x):
    return x.flip(0)


class Images(Dataset):
    def __init__(self):
        self.transform, self.size, self.file, self.cache = Noise(), 8, None, {}
        self.rate = float("nan")
        self.tensors = [torch.zeros(2) for _ in range(3)]


def seen(dataset, change):
    before = look(dataset)
    change()
    return changed(before, dataset)


def test_nothing_is_seen_of_a_file_that_is_opened_and_of_samples_that_are_kept():
    images = Images()

    def read():
        images.file, images.cache[3] = Path(__file__).open(), torch.zeros(2)  # noqa: SIM115
        images.tensors.append(torch.ones(2))

    assert seen(images, lambda: None) is None
    assert seen(images, read) is None
    images.file.close()


def test_nothing_is_seen_of_datasets_of_elastix_that_are_read(tmp_path):
    """As in the train function's own process, when a loss has made a guess wrong."""
    parquet.write_table(table({"n": list(range(9))}), tmp_path / "a.parquet", row_group_size=3)
    rows = pickle.loads(pickle.dumps(elastix.Parquet(tmp_path / "a.parquet", Noisy())))
    shared = elastix.Shared(TensorDataset(torch.randn(5, 2)))
    for dataset in (rows, shared):
        before = look(dataset)
        dataset[1], dataset[4]
        assert changed(before, dataset) is None
    assert seen(rows, lambda: setattr(rows._decode, "level", 0.9)).endswith("level")
    shared.close()


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, [0]), lambda d: Wrapped(d)])
def test_a_value_and_a_function_are_seen_wherever_they_are(wrap):
    images = Images()
    dataset = wrap(images)
    assert seen(dataset, lambda: setattr(images, "size", 16)).endswith("size")
    assert seen(dataset, lambda: setattr(images.transform, "level", 0.9)).endswith("level")
    images.transform = flipped
    assert seen(dataset, lambda: setattr(images, "transform", seen)).endswith("transform")


class Wrapped(ConcatDataset):
    def __init__(self, dataset):
        self.datasets = [dataset, TensorDataset(torch.zeros(3))]


class Levelled(Dataset):
    def __init__(self):
        self.level = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index + self.level)


@pytest.mark.parametrize(("processes", "said"), [(0, 0), (1, 1)])
def test_a_change_is_told_once_and_only_if_processes_have_copies(caplog, processes, said):
    dataset, device = Levelled(), torch.device("cpu")
    source = Source(dataset=dataset, batch_size=4, num_workers=processes, device=device)
    loader = Loader(0, source, Pace())
    for epoch in loader.epochs(3):
        dataset.level = epoch.number
        for _ in epoch:
            loader.commit((0,))
    assert caplog.text.count("'level' of the Levelled was changed") == said
