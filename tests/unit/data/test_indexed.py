"""What the loader takes, what it refuses, and that a position is the same sample for all."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import elastix
from elastix.data.audit import audit
from elastix.data.formats.indexed import by_position, known_by
from elastix.data.loader import Loader
from elastix.data.sample_order import order_in_blocks
from elastix.data.source import Source
from elastix.errors import ConfigError
from elastix.event_records import from_record, to_record
from elastix.events import LoaderOpened, StepCommitted
from tests.unit.data.test_loader import Pace


class Plain(Dataset):
    length = 12

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"n": index}


class OnlyIter(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class CountedStream(OnlyIter):
    """Has a length, and of samples only what torch's Dataset has: a method that raises."""

    def __len__(self):
        return 3


def of_package(name: str, module: str, bases: tuple, **methods) -> object:
    """An object of a class as a package has it, without the package."""
    return type(name, bases, {"__module__": module, **methods})()


def streaming_dataset(module: str, **fields) -> object:
    return of_package(
        "StreamingDataset",
        module,
        (OnlyIter,),
        __len__=lambda self: 12,
        __getitem__=lambda self, index: {"n": index},
        **fields,
    )


def test_a_map_style_dataset_is_taken_as_it_is():
    data = Plain()
    assert by_position(data) is data
    local = of_package(
        "LocalDataset", "streaming.base.local", (Plain,)
    )  # MosaicML's, for files that are here
    assert by_position(local) is local


class World:
    world_size = 1


class Worlds:
    world_size = 4


def test_litdata_is_read_by_position_if_its_length_is_that_of_all():
    data = streaming_dataset("litdata.streaming.dataset", distributed_env=World(), drop_last=False)
    taken = by_position(data)
    assert (len(taken), taken[5]) == (12, {"n": 5})
    assert not isinstance(taken, IterableDataset)
    for fields in ({"distributed_env": Worlds()}, {"drop_last": True}):
        with pytest.raises(ConfigError, match="drop_last=False"):
            by_position(streaming_dataset("litdata.streaming.dataset", **fields))


def test_a_stream_with_samples_by_position_is_read_in_processes_too():
    data = streaming_dataset("litdata.streaming.dataset")
    seen = []
    loader = Loader(0, source(data, num_workers=1), Pace())
    for epoch in loader.epochs(1):
        for batch in epoch:
            seen += batch["n"].tolist()
            loader.commit((0,))
    assert sorted(seen) == list(range(12))


def test_mosaic_streaming_is_refused_for_its_padded_length():
    with pytest.raises(ConfigError, match=r"streaming\.LocalDataset"):
        by_position(streaming_dataset("streaming.base.dataset"))
    derived = type("Own", (type(streaming_dataset("streaming.base.dataset")),), {})()
    with pytest.raises(ConfigError, match=r"streaming\.LocalDataset"):
        by_position(derived)


@pytest.mark.parametrize(
    "data",
    [
        OnlyIter(),
        CountedStream(),
        of_package("Dataset", "ray.data.dataset", (), __len__=lambda self: 1 / 0),
        of_package("IterableDataset", "datasets.iterable_dataset", (OnlyIter,)),
        of_package("TFRecordDataset", "tfrecord.torch.dataset", (OnlyIter,)),
    ],
    ids=lambda data: type(data).__module__,
)
def test_what_has_no_index_is_refused_with_the_command_that_gives_it_one(data):
    with pytest.raises(ConfigError, match="elastix data index") as caught:
        by_position(data)
    assert type(data).__name__ in str(caught.value)
    assert "No loader was made" in str(caught.value)


# ------------------------------------------------------------------------------------- in blocks


def source(dataset, **more) -> Source:
    return Source(dataset=dataset, batch_size=6, device=torch.device("cpu"), **more)


def of_samples(samples):
    """A dataset that holds these."""
    data = Plain()
    data.length, data.samples = len(samples), samples
    return data


@pytest.fixture
def rows(tmp_path):
    table = pa.table({"n": list(range(40))})
    pyarrow.parquet.write_table(table, tmp_path / "r.parquet", row_group_size=7)
    return elastix.Parquet(tmp_path / "r.parquet", mixed=2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_parquet_come_in_blocks_and_each_once(rows, num_workers):
    loader = Loader(0, source(rows, seed=3, num_workers=num_workers), Pace())
    for epoch in loader.epochs(2):
        seen = []
        for batch in epoch:
            seen += batch["n"].tolist()
            loader.commit((0,))
        expected = order_in_blocks(3, epoch.number, ((5, 7), (1, 5)), 2)
        assert seen == expected.tolist()


def test_a_cursor_of_other_blocks_is_refused_and_one_of_the_same_goes_on(rows):
    first = Loader(0, source(rows), Pace())
    first.next_batch()
    first.commit((0,))
    stored = json.loads(json.dumps(first.state_dict()))
    second = Loader(0, source(rows), Pace())
    second.load_state_dict(stored)
    assert second.next_batch()["n"].tolist() == first.next_batch()["n"].tolist()
    other = elastix.Parquet(rows._paths, mixed=3)
    with pytest.raises(ConfigError, match="mixed=2 and is now made with mixed=3"):
        Loader(0, source(other), Pace()).load_state_dict(stored)
    unblocked = Loader(0, source(Plain()), Pace()).state_dict()
    assert not {"blocks", "mixed"} & set(unblocked)


def test_files_that_were_replaced_between_are_refused_though_they_are_as_long(tmp_path):
    def loader(first):
        table = pa.table({"text": [f"row {n}" * first for n in range(20)]})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        return Loader(0, source(elastix.Parquet(tmp_path / "rows.parquet")), Pace())

    state = loader(first=1).state_dict()
    loader(first=1).load_state_dict(state)
    other = loader(first=2)
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"samples of loader 0 .*are not those"):
        other.next_batch()
    del state["files"]  # of an earlier version
    other.load_state_dict(state)
    other.next_batch()


def test_another_subset_is_refused_though_it_is_as_long():
    """Or the run would go on with samples that the epoch had already, and without others."""

    def loader(*indices):
        whole = ConcatDataset([Subset(Plain(), indices), Plain()])
        return Loader(0, source(Subset(whole, range(15))), Pace())

    state = json.loads(json.dumps(loader(3, 1, 2).state_dict()))
    same, other = loader(3, 1, 2), loader(3, 1, 4)
    for each in (same, other):
        each.load_state_dict(state)
        assert each.state_dict() == state  # of a loader that is through it makes no difference
    same.next_batch()
    with pytest.raises(ConfigError, match=r"samples of loader 0 .*indices of a Subset.*ctx.track"):
        other.next_batch()


def test_of_a_dataset_by_itself_and_of_odd_indices_nobody_knows():
    assert known_by(Plain()) == known_by(ConcatDataset([Plain(), Plain()])) == ""
    assert known_by(Subset(Plain(), ["a", "b"])) == ""
    assert known_by(Subset(Plain(), np.arange(3))) == known_by(Subset(Plain(), range(3)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["b.png", "a.png"], ["a.png", "b.png"]),
        ([Path("x/b.png"), Path("x/a.png")], [Path("x/a.png"), Path("x/b.png")]),
        ([("a.png", 0), ("b.png", 1)], [("a.png", 1), ("b.png", 0)]),  # classes of a set
        (np.array(["b.png", "a.png"]), np.array(["a.png", "b.png"])),
        ([f"{n}.png" for n in range(30_000)], [f"{n}.png" for n in reversed(range(30_000))]),
    ],
    ids=["names", "paths", "labels", "array", "very many"],
)
def test_a_dataset_that_holds_a_path_for_each_sample_is_known_by_them(one, other):
    assert known_by(of_samples(one)) == known_by(of_samples(list(one))) != ""
    assert known_by(of_samples(one)) != known_by(of_samples(other))


@pytest.mark.parametrize(
    "held",
    [
        ["A sentence.", "Another."],
        ["a.png", None],
        ["a.png"],
        [torch.zeros(2), torch.ones(2)],
        [[], []],
        np.zeros((2, 3)),
    ],
    ids=["texts", "not read yet", "fewer", "tensors", "empty", "numbers"],
)
def test_what_else_a_dataset_holds_says_nothing_of_its_samples(held):
    data = Plain()
    data.length, data.held = 2, held
    assert known_by(data) == ""


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ([("/a/x/1.png", "/a/y/1.png", 3)], [("/b/c/x/1.png", "/b/c/y/1.png", 3)]),
        ([("/a/1.png", Path("/a/1.txt"))], [("/b/1.png", Path("/b/1.txt"))]),
    ],
    ids=["text", "paths"],
)
def test_a_mask_beside_each_path_may_be_in_another_folder_as_well(here, there):
    """Copies of each node's own, or of each job's."""
    assert known_by(of_samples(here)) == known_by(of_samples(there)) != ""
    (image, mask, *_), *_ = here
    assert known_by(of_samples([(image, f"{mask}x")])) != known_by(of_samples([(image, mask)]))


def test_an_object_that_would_fetch_its_file_is_not_asked_for_its_path():
    class Remote:
        def __fspath__(self):
            raise AssertionError("the file is fetched")

    assert known_by(of_samples([Remote(), Remote()])) == ""


def test_a_subset_of_images_goes_on_from_a_state_of_an_earlier_version():
    """Which knew its indices, and nothing of paths."""

    def loader(*names, indices=(1, 0)):
        whole = ConcatDataset([Subset(of_samples(names), indices), Plain()])
        return Loader(0, source(Subset(whole, range(14))), Pace())

    class Bare(Plain):
        length = 2

    earlier = Subset(ConcatDataset([Subset(Bare(), (1, 0)), Plain()]), range(14))
    state = Loader(0, source(earlier), Pace()).state_dict()
    assert ":" not in state["files"]
    goes_on, other = loader("a.png", "b.png"), loader("a.png", "b.png", indices=(0, 1))
    for each in (goes_on, other):
        each.load_state_dict(state)
    goes_on.next_batch()
    with pytest.raises(ConfigError, match="are not those"):
        other.next_batch()
    now = goes_on.state_dict()
    swapped = loader("b.png", "a.png")
    swapped.load_state_dict(now)
    with pytest.raises(ConfigError, match=r"sort what glob or os\.listdir gives"):
        swapped.next_batch()


def test_the_journal_and_the_audit_know_of_blocks(rows):
    opened = Loader(0, source(rows), Pace()).opened()
    assert (opened.blocks, opened.mixed) == (((5, 7), (1, 5)), 2)
    assert from_record(json.loads(json.dumps(to_record(opened)))) == opened
    plain = LoaderOpened(t=opened.t, loader=0, length=40, batch_size=6, shuffle=True, seed=0)
    old = {k: v for k, v in to_record(plain).items() if k not in ("blocks", "mixed")}
    assert from_record(old) == plain
    commit = StepCommitted(step=1, generation=1, world_size=1, batches=())
    assert audit([opened, commit]).digest != audit([plain, commit]).digest
    in_order = Loader(0, source(rows, shuffle=False), Pace()).opened()
    assert in_order.blocks == ()


def test_blocks_of_somebody_elses_dataset_mean_nothing():
    data = Plain()
    data.blocks, data.mixed = [1, 2], "many"
    assert Loader(0, source(data), Pace()).opened().blocks == ()


def test_a_data_loader_is_answered_with_its_dataset():
    with pytest.raises(ConfigError, match=r"ctx\.loader\(loader\.dataset, batch_size=\.\.\.\)"):
        by_position(DataLoader(Plain(), batch_size=2))
