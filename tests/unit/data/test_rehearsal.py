"""Rehearsal: what is kept is a function of the datasets, what is rehearsed one of the position."""

import collections
import functools
import importlib
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import elastix
from elastix import sharding
from elastix import state as states
from elastix.data import sample_order
from elastix.data.cursor import count
from elastix.data.loader import Loader
from elastix.data.rehearsal import Rehearsal
from elastix.data.reservoir import lowest, rows_of, union
from elastix.data.source import Source
from elastix.errors import ConfigError
from elastix.store import Store
from elastix.train.replica.tracked_objects import TrackedObjects
from tests.unit.data.test_loader import Pace

CPU = torch.device("cpu")


class Task(Dataset):
    """Sample i is (number * 1000 + i, its class), unless the dataset is gone."""

    def __init__(self, number, length=40, classes=2):
        self.number, self.length, self.classes = number, length, classes
        self.gone = False
        self.reads = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert not self.gone, "a dataset that is gone was read"
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.reads += 1
        return torch.tensor(self.number * 1000.0 + index), self.label(index)

    def label(self, index):
        return self.number * self.classes + index % self.classes


def labels(task):
    assert not task.gone, "the labels of a dataset that is gone were asked for"
    return [task.label(index) for index in range(len(task))]


def opened(memory, *tasks):
    """What the loader of the last of these rehearses."""
    for task in tasks:
        view = memory.admit(task)
        memory.open(view.number)
    return view


def reader(task, memory=None, **more):
    return Source(dataset=task, batch_size=8, memory=memory, device=CPU, **more)


def values(batch):
    return batch[0].tolist()


# ------------------------------------------------------------------------------ what is kept


@st.composite
def several(draw):
    """Samples of a few datasets, in several parts that have some of them in common."""
    classes = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
    parts = []
    for number, size in enumerate(sizes):
        own = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=size, max_size=size)))
        rows = rows_of(0, number, np.arange(size), own.astype(np.int64))
        cut = draw(st.integers(0, size))
        parts += [rows[:cut], rows[cut:]]
    return parts, draw(st.integers(1, 30))


@given(several(), st.randoms(use_true_random=False))
def test_what_is_kept_of_all_is_what_is_kept_of_what_is_kept_of_each(parts, random):
    parts, capacity = parts
    at_once = lowest(union(parts), capacity)
    each = [lowest(part, capacity) for part in parts]
    random.shuffle(each)
    one_by_one = union([])
    for part in each:
        one_by_one = lowest(union([one_by_one, part]), capacity)
    assert one_by_one.names == at_once.names
    assert one_by_one.classes.tolist() == at_once.classes.tolist()
    assert len(at_once) == min(capacity, sum(map(len, parts)))


@given(several())
def test_classes_differ_by_one_at_most_unless_one_has_no_more(parts):
    rows, capacity = union(parts[0]), parts[1]
    there = Counter(rows.classes.tolist())
    kept = Counter(lowest(rows, capacity).classes.tolist())
    most = max(kept.values(), default=0)
    assert all(kept[c] in (most, most - 1) or kept[c] == there[c] for c in there)


def test_the_samples_kept_are_spread_evenly_over_a_dataset():
    none = np.zeros(100_000, np.int64)
    kept = lowest(rows_of(3, 1, np.arange(100_000), none), 2_000)
    deciles = np.histogram(kept.indices, bins=10, range=(0, 100_000))[0]
    assert deciles.sum() == 2_000
    assert ((deciles - 200) ** 2 / 200).sum() < 27.9  # chi2 of 9 degrees: one in a thousand


def test_other_seeds_and_datasets_keep_other_samples():
    none = np.zeros(1000, np.int64)
    kept = [
        {index for _, index in lowest(rows_of(seed, number, np.arange(1000), none), 100).names}
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(2 <= len(a & b) <= 25 for a, b in itertools.pairwise(kept))


# ------------------------------------------------------------- what stands beside a position


@pytest.mark.parametrize("ratio", [0.5, 1, 1.5, 0.3, 1 / 3, 2])
def test_a_batch_that_is_cut_in_any_way_rehearses_the_same(ratio):
    memory = opened(Rehearsal(10, ratio=ratio), Task(0), Task(1))
    whole = memory.places([(0, 120)])
    parts = [memory.places([(a, b)]) for a, b in ((0, 7), (7, 8), (8, 50), (50, 120))]
    assert [place for part in parts for place in part] == whole
    assert memory.places([(50, 120), (0, 7)]) == [*parts[3], *parts[0]]
    assert memory.count([(0, 120)]) == len(whole) == int(120 * memory.rehearsal.ratio)
    assert memory.count([(7, 8), (50, 120)]) == len(parts[1]) + len(parts[3])


def test_all_that_is_kept_comes_once_before_anything_comes_twice():
    memory = opened(Rehearsal(10, ratio=0.5), Task(0), Task(1))
    for start in range(0, 200, 20):
        assert sorted(memory.places([(start, start + 20)])) == list(range(10))


def test_the_first_loader_rehearses_nothing():
    memory = opened(Rehearsal(10), Task(0))
    assert memory.count([(0, 40)]) == 0
    assert values(reader(Task(0), memory).read([(0, 8)])) == values(reader(Task(0)).read([(0, 8)]))


def test_new_samples_come_first_and_the_placeholder_rehearses_nothing():
    memory = opened(Rehearsal(10, labels=labels), Task(0), task := Task(1))
    source = reader(task, memory)
    batch = values(source.read([(0, 8)]))
    assert len(batch) == source.weigh([(0, 8)]) == 12
    assert all(value >= 1000 for value in batch[:8])
    assert all(value < 1000 for value in batch[8:])
    assert len(values(source.read(()))) == 2
    assert source.weigh(()) == 0


def steps(members, losses, ratio=0.5, slices=None):
    """By step, the samples that all workers' batches have, and their weights, as losses come."""
    loaders = {}
    for worker in members:
        memory = opened(Rehearsal(7, ratio=ratio, labels=labels), Task(0), task := Task(1))
        pace = Pace(worker, members)
        loaders[worker] = Loader(0, reader(task, memory, slices=slices), pace)
    made, number = [], 0
    while True:
        drawn = {w: loader.draw(loader.cursor) for w, loader in loaders.items()}
        if any(one is None for one in drawn.values()):
            return made
        batches = {w: loader.next_batch() for w, loader in loaders.items()}
        had = Counter()
        for worker, (draw, _) in drawn.items():
            share = draw.share_of(worker)
            if share:
                assert len(values(batches[worker])) == draw.weigh(share)
                had.update(values(batches[worker]))
        ratio_of = drawn[members[0]][0].ratio
        made.append((had, ratio_of))
        left = tuple(w for w in loaders if (number, w) not in losses)
        loaders = {w: loaders[w] for w in left}
        for loader in loaders.values():
            loader.commit(left)
            loader._pace.group = left
        members, number = left, number + 1


@pytest.mark.parametrize("ratio", [0.5, 0.3, 1.5])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_any_number_of_workers_reads_the_same_batches(workers, ratio):
    alone = [had for had, _ in steps((0,), set(), ratio)]
    assert [had for had, _ in steps(tuple(range(workers)), set(), ratio)] == alone


def test_after_losses_all_is_rehearsed_that_stood_beside_what_was_lost():
    """Owed positions come back with the samples that they had beside them."""
    quiet = sum((had for had, _ in steps((0,), set())), Counter())
    stormy = [had for had, _ in steps((0, 1, 2, 3), {(1, 2), (3, 0), (3, 3)})]
    assert sum(stormy, Counter()) - quiet  # shares of the lost were read once more
    assert not quiet - sum(stormy, Counter())


def test_workers_are_weighed_by_all_that_their_batches_have():
    (_, ratio), *_ = steps((0, 1, 2), set(), ratio=0.3)
    # Of 8 positions 3, 3 and 2; beside positions 3 and 6 stands a rehearsed sample.
    assert ratio == {0: 3, 1: 4, 2: 3}


def test_a_batch_bound_to_another_ratio_is_whole_unless_its_weights_fit():
    memory = opened(Rehearsal(7, ratio=0.3), Task(0), task := Task(1))
    pace = Pace(0, (0, 1))
    loader = Loader(0, reader(task, memory), pace)
    draw, _ = loader.draw(loader.cursor, {0: 1, 1: 1})
    assert not draw.whole  # 4 + 1 and 4 + 1
    draw, _ = loader.draw(loader.cursor, {0: 1, 1: 3})
    assert draw.whole  # 2 and 6 would weigh 2 and 8


@pytest.mark.parametrize("augment", [None, lambda sample, rng: (sample[0] + rng.random(), 0)])
def test_slices_weigh_what_they_have(augment):
    memory = opened(Rehearsal(7, ratio=0.3), Task(0), task := Task(1))
    source = reader(task, memory, slices=4, augment=augment)
    draw, _ = Loader(0, source, Pace()).draw(Loader(0, source, Pace()).cursor)
    sizes = [len(source.read(part)[0]) for part in draw.slices]
    assert list(draw.samples) == sizes
    assert sum(sizes) == source.weigh([(0, 8)]) > count([(0, 8)])


def test_tensors_are_gathered_to_the_same_bits():
    def tensors(number):
        generator = torch.Generator().manual_seed(number)
        return TensorDataset(torch.rand(30, 3, generator=generator), torch.arange(30) % 3)

    def read(collate=None):
        memory = opened(Rehearsal(11), tensors(0), tensors(1), new := tensors(2))
        more = {} if collate is None else {"collate": collate}
        source = reader(new, memory, **more)
        return source, source.read([(3, 9), (20, 30)])

    gathers, fast = read()
    collates, slow = read(lambda samples: torch.utils.data.default_collate(samples))
    assert gathers._gathers
    assert not collates._gathers
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(fast, slow))  # noqa: B905
    assert len(fast[0]) == 24


def test_a_dataset_that_gives_several_at_once_is_asked_for_several_at_once():
    class AtOnce(Task):
        def __getitems__(self, wanted):
            self.asked = list(wanted)
            return [self[index] for index in wanted]

    memory = opened(Rehearsal(10), Task(0), task := AtOnce(1))
    one_by_one = opened(Rehearsal(10), Task(0), plain := Task(1))
    batch = values(reader(task, memory).read([(0, 8)]))
    assert len(task.asked) == 8
    assert batch == values(reader(plain, one_by_one).read([(0, 8)]))


def test_what_does_not_fit_below_the_new_tensors_is_collated_one_by_one():
    old = TensorDataset(torch.zeros(30, 3, dtype=torch.float64), torch.arange(30))
    memory = opened(Rehearsal(11), old, new := TensorDataset(torch.rand(30, 3), torch.arange(30)))
    assert not reader(new, memory)._gathers


def test_a_rehearsed_sample_is_augmented_by_its_place_and_not_as_the_new_one_beside_it():
    def noise(sample, rng):
        return torch.tensor(rng.random()), sample[1]

    memory = opened(Rehearsal(10, ratio=1), Task(0), task := Task(1))
    source = reader(task, memory, augment=noise, seed=4)
    whole = values(source.read([(0, 8)]))
    assert len(set(whole)) == 16
    assert values(source.read([(5, 6)])) == [whole[5], whole[13]]


# ------------------------------------------------------------------------------ the State


def captured(memory):
    return states.capture({}, {"rehearsal": memory}).clone()


def restored(memory, state):
    states.restore(state, {}, {"rehearsal": memory})
    return memory


def test_samples_are_kept_when_their_dataset_is_gone():
    def make():
        return Rehearsal(12, labels=labels, keep="samples")

    tasks = [Task(number) for number in range(4)]
    memory, batches, by_index = make(), [], Rehearsal(12, labels=labels)
    for task in tasks:
        view = opened(memory, task)
        same = opened(by_index, Task(task.number))
        batches.append(values(reader(task, view).read([(0, 40)])))
        assert batches[-1] == values(reader(Task(task.number), same).read([(0, 40)]))
        assert len(memory._samples) <= 24
        state = captured(memory)
        task.gone = True
    again = make()
    for task in tasks[:3]:
        view = again.admit(task)
        if task is tasks[0]:  # as a State comes to a loader that is made later
            restored(again, state)
        again.open(view.number)
    assert tasks[0].reads < 80
    tasks[3].gone = False
    view = opened(again, tasks[3])
    assert values(reader(tasks[3], view).read([(0, 40)])) == batches[3]


def test_a_sample_that_stays_keeps_its_name_and_its_bytes():
    memory = Rehearsal(12, labels=labels, keep="samples")
    opened(memory, Task(0))
    before = captured(memory).manifest().tensors
    opened(memory, Task(1))
    after = captured(memory).manifest().tensors
    stayed = before.keys() & after.keys()
    assert len(before) == 12
    assert len(stayed) == 12  # the second loader rehearses them all
    assert all(before[name] == after[name] for name in stayed)


def test_a_kept_sample_is_a_copy_that_nobody_can_change():
    base = torch.rand(1000, 50)
    memory = Rehearsal(3, keep="samples")
    view = opened(memory, TensorDataset(base), TensorDataset(torch.rand(5, 50)))
    (row,) = view.sample(0)
    was = row.clone()
    assert row.untyped_storage().nbytes() == 200
    row.zero_()
    assert torch.equal(view.sample(0)[0], was)
    assert all(t.untyped_storage().nbytes() == 200 for t in captured(memory).tensors.values())


def test_keeping_samples_draws_no_random_numbers_and_reads_the_same_everywhere():
    class Noisy(Task):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + torch.rand(()), np.random.rand()

    kept = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        memory = Rehearsal(5, keep="samples")
        opened(memory, Noisy(0))
        kept.append(captured(memory).manifest().ref)
        assert torch.equal(
            torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed))
        )
    assert kept[0] == kept[1]


Pair = collections.namedtuple("Pair", "x y")
SAMPLES = {
    "NumPy's numbers": lambda i: (np.float32(i + 0.1), np.int16(i), np.bool_(i % 2)),
    "dict in an order": lambda i: {"y": torch.tensor(i), "x": [i, None], "a": ("t", float("nan"))},
    "keys of one name": lambda i: {1: torch.tensor([i]), "1": torch.tensor([-i])},
    "paths of one name": lambda i: {"a/b": torch.tensor([i]), "a": {"b": torch.tensor([-i])}},
    "arrays": lambda i: (np.array(i), np.arange(i + 1, dtype=np.float16)[::-1]),
    "nothing": lambda _: None,
}


class Made(Task):
    def __init__(self, make):
        super().__init__(0, length=4)
        self.make = make

    def __getitem__(self, index):
        return self.make(index)


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_who_is_given_a_sample_has_what_they_have_who_read_it(make, tmp_path):
    """In type and order too: joiners would train on something else than the others."""
    memory = Rehearsal(3, keep="samples")
    view = opened(memory, Made(make), Made(make))
    with Store(tmp_path) as store:
        stored = store.get(store.put(captured(memory)))
        again = restored(Rehearsal(3, keep="samples"), stored)
    assert len(view.names) == 3
    for name in view.names:
        assert repr(again.sample(name)) == repr(memory.sample(name)) == repr(make(name[1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda i: Pair(i, i),
        lambda i: collections.OrderedDict(x=i),
        lambda i: (b"x", i),
        lambda i: {"x": np.array(["a"])},
        lambda i: np.array([i], ">i4"),
        lambda i: np.longdouble(i),
        lambda i: torch.eye(2).to_sparse(),
        lambda i: torch.ones(2, device="meta"),
    ],
    ids=["named tuple", "ordered dict", "bytes", "words", "other bytes", "long", "sparse", "meta"],
)
def test_what_a_state_would_not_give_back_is_refused_before_it_is_kept(make):
    with pytest.raises(ConfigError, match=r"sample [0-3] of a Made: .*keep='index'"):
        opened(Rehearsal(3, keep="samples"), Made(make))


def test_a_rehearsal_of_another_run_is_refused():
    memory = Rehearsal(3)
    first, second = TrackedObjects(), TrackedObjects()
    first.remember(reader(task := Task(0), memory.admit(task)))
    first.remember(reader(task := Task(1), memory.admit(task)))
    with pytest.raises(ConfigError, match="within the train function"):
        second.remember(reader(task, memory.admit(task)))


def test_a_dataset_that_has_shrunk_since_is_refused():
    memory, task = Rehearsal(5), Task(0)
    opened(memory, task)
    task.length = 30
    with pytest.raises(ConfigError, match=r"dataset 0 of the Rehearsal had .* has now"):
        opened(memory, Task(1))


def test_one_dataset_that_turns_into_the_next_task_is_refused():
    memory, task = Rehearsal(5, labels=labels), Task(0)
    opened(memory, task)
    task.number = 1
    with pytest.raises(ConfigError, match="dataset 0 of the Rehearsal had"):
        opened(memory, task)
    kept = Rehearsal(5, labels=labels, keep="samples")
    opened(kept, task)
    task.number = 2  # what was kept of the first is a copy
    batch = values(reader(task, opened(kept, task)).read([(0, 8)]))
    assert [int(value // 1000) for value in batch] == [2] * 8 + [1] * 4


def test_a_small_memory_leaves_the_order_of_a_large_dataset_in_the_cache(monkeypatch):
    made = Counter()

    def counted(seed, epoch, length, *more):
        made[length] += 1
        return sample_order.order_of(seed, epoch, length, *more)

    for name in ("_kept_order", "_kept_beside"):
        monkeypatch.setattr(sample_order, name, functools.lru_cache(maxsize=4)(counted))
    memory = opened(Rehearsal(2, ratio=2), Task(0), task := Task(1, length=100))
    source = reader(task, memory)
    for start in range(0, 96, 8):
        source.read([(start, start + 8)])
    assert made[100] == 1
    assert made[2] > 50


@pytest.mark.parametrize("exact", [False, True])
def test_what_an_old_dataset_draws_at_random_is_not_frozen_by_who_reads_first(exact):
    """Tensors are gathered at once where rows are always the same, and nowhere else."""

    class Noisy(Task):
        def __getitem__(self, index):
            return torch.rand(3), torch.tensor(index)

    new = TensorDataset(torch.zeros(30, 3), torch.arange(30))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # as another worker, or a joiner, has them
        source = reader(new, opened(Rehearsal(4), Noisy(0), new), exact=exact)
        found.append([source.read([(start, start + 8)])[0][8:] for start in (0, 8)])
    (first, second), (again, _) = found
    assert not torch.isin(first, second).any()  # the same four samples, drawn anew
    assert torch.equal(first, again) is exact


def test_a_loader_whose_samples_are_not_kept_any_more_is_refused():
    memory = Rehearsal(5, keep="samples")
    opened(memory, Task(0))
    second = opened(memory, task := Task(1))
    loader = Loader(1, reader(task, second), Pace())
    assert loader.next_batch() is not None
    opened(memory, Task(2))
    with pytest.raises(ConfigError, match="not kept any more"):
        loader.next_batch()


def test_a_loader_that_rehearses_by_index_may_be_used_at_any_time():
    memory = Rehearsal(5)
    views = [opened(memory, Task(number)) for number in range(3)]
    assert [len(view.names) for view in views] == [0, 5, 5]
    assert {number for number, _ in views[1].names} == {0}


@pytest.mark.parametrize("keep", ["index", "samples"])
def test_another_dataset_than_a_state_knows_is_refused(keep):
    memory = Rehearsal(5, labels=labels, keep=keep)
    opened(memory, Task(0), Task(1))
    again = restored(Rehearsal(5, labels=labels, keep=keep), captured(memory))
    opened(again, Task(0))
    with pytest.raises(ConfigError, match=r"dataset 1 of the Rehearsal had .*'length': 40"):
        opened(again, Task(1, length=41))


def test_other_labels_than_a_state_knows_are_refused():
    memory = Rehearsal(5, labels=labels)
    opened(memory, Task(0))
    again = restored(Rehearsal(5, labels=lambda task: [0] * len(task)), captured(memory))
    with pytest.raises(ConfigError, match="same labels"):
        opened(again, Task(0))


@pytest.mark.parametrize(
    "other", [{"capacity": 6}, {"ratio": 1}, {"labels": labels}, {"keep": "samples"}, {"seed": 1}]
)
def test_other_arguments_than_a_state_knows_are_refused(other):
    memory = Rehearsal(5)
    opened(memory, Task(0))
    with pytest.raises(ConfigError, match="was at work with"):
        restored(Rehearsal(**{"capacity": 5, **other}), captured(memory))


# ----------------------------------------------------------------------------- lineage


@pytest.mark.parametrize("keep", ["index", "samples"])
def test_a_child_goes_on_as_its_parent_would_have(keep):
    parent = Rehearsal(12, labels=labels, keep=keep)
    opened(parent, Task(0), Task(1))
    left = captured(parent)
    past = [Task(0), Task(1)] if keep == "index" else []
    child = Rehearsal(12, labels=labels, keep=keep, past=past)
    child.inherit(left)
    theirs = opened(child, task := Task(2))
    ours = opened(parent, Task(2))
    assert theirs.names == ours.names
    assert values(reader(task, theirs).read([(0, 40)])) == values(
        reader(Task(2), ours).read([(0, 40)])
    )
    grandchild = Rehearsal(12, labels=labels, keep=keep, past=[*past, Task(2)] if past else [])
    grandchild.inherit(captured(child))
    assert opened(grandchild, Task(3)).names == opened(parent, Task(3)).names


def test_an_ancestor_without_rehearsal_leaves_nothing():
    child = Rehearsal(12)
    child.inherit(states.State({}))
    assert opened(child, Task(0)).names == []


@pytest.mark.parametrize(
    ("child", "says"),
    [
        (Rehearsal(5), "past"),
        (Rehearsal(5, past=[Task(0), Task(1)]), "2 of them"),
        (Rehearsal(5, keep="samples"), "'keep': 'index'"),
        (Rehearsal(5, seed=1, past=[Task(0)]), "'seed': 0"),
        (Rehearsal(5, labels=labels, past=[Task(0)]), "'labels': False"),
    ],
)
def test_a_child_that_cannot_go_on_is_refused(child, says):
    parent = Rehearsal(5)
    opened(parent, Task(0))
    with pytest.raises(ConfigError, match=says):
        child.inherit(captured(parent))


def test_a_child_with_other_past_datasets_is_refused_when_it_opens_the_first():
    parent = Rehearsal(5)
    opened(parent, Task(0))
    child = Rehearsal(5, past=[Task(0, length=39)])
    child.inherit(captured(parent))
    with pytest.raises(ConfigError, match="dataset 0 of the Rehearsal"):
        opened(child, Task(1))


def test_a_child_goes_on_where_tensors_may_be_sharded():
    """Then who reads a State looks at what the object itself has."""
    importlib.import_module("torch.distributed.tensor")
    assert sharding.possible()
    parent, child = Rehearsal(5, keep="samples"), Rehearsal(5, keep="samples")
    opened(parent, Task(0))
    child.inherit(captured(parent))
    assert opened(child, Task(1)).names == opened(parent, Task(1)).names


def test_an_ancestor_with_several_is_refused():
    parents = [Rehearsal(5), Rehearsal(6)]
    for parent in parents:
        opened(parent, Task(0))
    state = states.capture({}, {"rehearsal": parents[0], "rehearsal1": parents[1]})
    with pytest.raises(ConfigError, match="several"):
        Rehearsal(6, past=[Task(0)]).inherit(state)


def test_inheriting_late_is_refused():
    child = Rehearsal(5)
    opened(child, Task(0))
    with pytest.raises(ConfigError, match=r"before ctx\.loader"):
        child.inherit(captured(child))


# -------------------------------------------------------------------------- wrong arguments

WRONG = {
    "capacity": [0, -1, 2.5, "500", True, None],
    "ratio": [0, -0.5, float("nan"), float("inf"), "0.5", None, True, 1e-9, 5000],
    "labels": ["targets", 3, [0, 1]],
    "keep": ["all", None, True],
    "past": [None, Task(0), "x"],
    "seed": [-1, 0.5, None, "0", True],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in WRONG.items() for v in vs])
def test_wrong_arguments_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        elastix.Rehearsal(**{"capacity": 5, name: value})


@pytest.mark.parametrize("past", [[3], [iter([1])]])
def test_past_datasets_need_positions(past):
    with pytest.raises(ConfigError, match="no length and no sample"):
        elastix.Rehearsal(5, past=past)


@pytest.mark.parametrize(
    "given",
    [
        *([0] * 39, [0] * 41, [0.5] * 40, ["a"] * 40, [[0]] * 40, 3, None),
        *([[0], *[0] * 39], torch.ones(40, device="meta").long(), torch.ones(40).bfloat16()),
    ],
    ids=[
        *("short", "long", "floats", "text", "nested", "a number", "None"),
        *("ragged", "meta", "bfloat16"),
    ],
)
def test_wrong_labels_are_refused(given):
    with pytest.raises(ConfigError, match=r"labels\(dataset\) of the Rehearsal gave"):
        opened(Rehearsal(5, labels=lambda _: given), Task(0))


class Strange(Task):
    def __getitem__(self, index):
        return object()


def test_samples_that_a_state_cannot_hold_are_refused():
    with pytest.raises(ConfigError, match="Turn samples into tensors"):
        opened(Rehearsal(5, keep="samples"), Strange(0))
