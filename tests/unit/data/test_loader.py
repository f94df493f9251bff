"""The loader: shares of a group that changes at will, each sample through exactly one commit."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from elastix.comm.protocol.participant import Fenced
from elastix.data.cursor import count
from elastix.data.loader import Loader
from elastix.data.sample_order import order
from elastix.data.source import Source
from elastix.errors import ConfigError
from elastix.train.replica.member import Member


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


class Pace:
    """A group that the test changes by hand."""

    def __init__(self, me: int = 0, members: tuple[int, ...] = (0,)) -> None:
        self.me = me
        self.group = members
        self.boundaries = 0
        self.ratios: list[dict[int, int]] = []
        self.bound: dict[int, int] | None = None
        self.plans: list[tuple[int, int]] = []

    def boundary(self, loader: int) -> None:
        self.boundaries += 1

    def members(self) -> tuple[int, ...]:
        return self.group

    def binding(self, loader: int) -> dict[int, int] | None:
        return self.bound

    def drawn(self, loader: int, size: int, ratio: dict[int, int]) -> None:
        self.ratios.append(ratio)

    def left(self) -> None:
        """Nothing is taken back."""

    def exhausted(self, loader: int) -> bool:
        return False

    def planned(self, loader: int, epochs: int) -> None:
        self.plans.append((loader, epochs))


def source(length: int = 20, batch_size: int = 6, **more) -> Source:
    return Source(
        dataset=Numbers(length), batch_size=batch_size, device=torch.device("cpu"), **more
    )


def loader_of(me: int = 0, members: tuple[int, ...] = (0,), **more) -> tuple[Loader, Pace]:
    pace = Pace(me, members)
    return Loader(0, source(**more), pace), pace


class Group:
    """All workers in lockstep; counts the samples that were committed."""

    def __init__(self, members: tuple[int, ...], **more) -> None:
        self.more = more
        self.loaders: dict[int, Loader] = {}
        self.used: Counter[int] = Counter()
        self.change(members)

    def change(self, members: tuple[int, ...]) -> None:
        donor = next(iter(self.loaders.values()), None)
        for worker in members:
            if worker not in self.loaders:
                loader, _ = loader_of(worker, members, **self.more)
                if donor is not None:
                    loader.load_state_dict(donor.state_dict())
                self.loaders[worker] = loader
        self.loaders = {worker: self.loaders[worker] for worker in members}
        for loader in self.loaders.values():
            loader._pace.group = members

    def step(self, lost: set[int]) -> bool:
        batches = {worker: loader.next_batch() for worker, loader in self.loaders.items()}
        if any(batch is None for batch in batches.values()):
            assert all(batch is None for batch in batches.values())
            return False
        contributors = tuple(worker for worker in batches if worker not in lost)
        for worker in contributors:
            draw = self.loaders[worker].drawn[-1]
            mine = [w for w in contributors if draw.share_of(w)]
            if worker in (mine[:1] if draw.whole else mine):
                self.used.update(batches[worker].tolist())
        committed = [self.loaders[worker].commit(contributors) for worker in contributors]
        assert all(entry == committed[0] for entry in committed)
        if contributors:
            self.change(contributors)
        return True


def test_a_batch_that_somebody_would_have_nothing_of_is_given_whole_to_each():
    """Where each worker takes steps by itself; usually it is split."""
    for tiny_whole, sizes in ((True, [4, 4, 4]), (False, [2, 2, 0])):
        last = []
        for worker in range(3):
            loader, _ = loader_of(worker, (0, 1, 2), length=10, batch_size=6, tiny_whole=tiny_whole)
            _first, second = list(iter_draws(loader))
            last.append(sum(stop - start for start, stop in second.share_of(worker)))
            assert [batch.owed for batch in loader.commit((0, 2))][1] == (
                () if tiny_whole else second.share_of(1)
            )
        assert last == sizes


def iter_draws(loader):
    for _ in range(2):
        loader.next_batch()
    return loader.drawn


def test_a_step_that_ends_with_the_epoch_may_give_samples_back():
    loader, pace = loader_of(0, (0, 1), length=8, batch_size=4, shuffle=False)

    def lost(_number: int) -> bool:
        return bool(loader.drawn) and bool(loader.commit((0,)))

    pace.exhausted = lost
    epochs = [[batch.tolist() for batch in epoch] for epoch in loader.epochs(1)]
    assert epochs == [[[0, 1], [4, 5], [2, 3], [6, 7]]]
    assert loader.cursor.left(0) == 0


@settings(max_examples=100)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(4, 20),
    shuffle=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(1, 4), st.sets(st.integers(0, 3), max_size=3)), max_size=20
    ),
)
def test_every_sample_of_an_epoch_is_committed_once_whatever_happens(
    length, batch_size, shuffle, events
):
    group = Group((0,), length=length, batch_size=batch_size, shuffle=shuffle)
    next_worker = 1
    going = True
    for size, places in events:
        members = tuple(group.loaders)
        joiners = tuple(range(next_worker, next_worker + max(0, size - len(members))))
        next_worker += len(joiners)
        group.change(members + joiners)
        everybody = tuple(group.loaders)
        lost = {everybody[place] for place in places if place < len(everybody)}
        going = going and group.step(lost if len(lost) < len(everybody) else set())
    while going:
        going = group.step(set())
    assert group.used == Counter(range(length))


def test_a_number_of_epochs_is_a_whole_one():
    loader, _ = loader_of(length=20, batch_size=6)
    for wrong in ("2", 2.0, -1, None, True, 10**30):
        with pytest.raises(ConfigError, match="must be given a whole number"):
            next(loader.epochs(wrong))
    next(loader.epochs(np.int64(2)))


def test_the_batches_follow_the_order_of_seed_and_epoch():
    loader, _ = loader_of(length=20, batch_size=6, seed=5)
    for epoch in loader.epochs(2):
        seen = []
        for batch in epoch:
            seen += batch.tolist()
            loader.commit((0,))
        assert seen == order(5, epoch.number, 20).tolist()


def test_without_shuffling_samples_come_as_they_stand():
    loader, _ = loader_of(length=8, batch_size=4, shuffle=False)
    assert loader.next_batch().tolist() == [0, 1, 2, 3]


def test_shares_are_samples_of_each_worker():
    loader, pace = loader_of(me=1, members=(0, 1, 2), length=20, batch_size=7)
    loader.next_batch()
    (draw,) = loader.drawn
    assert [count(draw.share_of(worker)) for worker in (0, 1, 2)] == [3, 2, 2]
    assert pace.ratios == [{0: 3, 1: 2, 2: 2}]
    loader.commit((0, 1, 2))
    assert not loader.drawn


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("d", [True]),
        ("dd", [False, True]),
        ("dpdp", [True, True]),
        ("ddpdd", [False, True, False, True]),
        ("dud", [True]),  # it was drawn anew
        ("dpudd", [False, True]),
    ],
)
def test_batches_that_the_next_was_drawn_after_without_a_pass_are_told(program, passed):
    loader, _ = loader_of(length=80)
    deeds = {"d": loader.next_batch, "p": loader.passed, "u": loader.undraw}
    for _ in range(2):  # a step knows nothing of the one before it
        for letter in program:
            deeds[letter]()
        assert [entry.passed for entry in loader.commit((0,))] == passed


def test_shares_add_up_over_the_batches_of_an_accumulated_step():
    loader, pace = loader_of(me=0, members=(0, 1), length=20, batch_size=7)
    loader.next_batch()
    loader.next_batch()
    assert len(loader.drawn) == pace.boundaries == 2
    committed = loader.commit((0, 1))
    assert [sum(b - a for s in entry.shares.values() for a, b in s) for entry in committed] == [
        7,
        7,
    ]
    loader.next_batch()
    assert pace.ratios == [{0: 4, 1: 3}, {0: 4, 1: 3}, {0: 1, 1: 1}]


def drawn_in(ratio, *, size, batch_size=None, members=(0, 1)):
    """A loader with one batch of `size` samples drawn, in that ratio."""
    more = {"length": size, "batch_size": batch_size or size, "shuffle": False}
    loader, pace = loader_of(members[0], members, **more)
    pace.bound = ratio
    batch = loader.next_batch()
    return loader, batch, loader.drawn[0]


def test_a_batch_that_is_bound_is_split_in_that_ratio():
    loader, batch, draw = drawn_in({0: 2, 1: 1}, size=6)
    assert batch.tolist() == [0, 1, 2, 3]
    assert not draw.whole
    (entry,) = loader.commit((0,))
    assert (entry.shares, entry.owed, entry.whole) == ({0: ((0, 4),)}, ((4, 6),), ())


def test_who_counts_for_anything_has_all_of_a_batch_that_cannot_be_split():
    loader, batch, draw = drawn_in({0: 8, 2: 7}, size=4, members=(0, 1, 2))
    assert batch.tolist() == [0, 1, 2, 3]
    assert [draw.share_of(worker) for worker in (0, 1, 2)] == [((0, 4),), (), ((0, 4),)]
    (entry,) = loader.commit((0, 1, 2))
    assert (entry.shares, entry.owed, entry.whole) == ({0: ((0, 4),)}, (), (0, 2))
    assert entry.samples == 4


@pytest.mark.parametrize(("left", "whole"), [((2,), (2,)), ((1, 2), (2,)), ((1,), ())])
def test_nothing_of_it_is_owed_while_anybody_who_counts_is_left(left, whole):
    loader, _, _ = drawn_in({0: 8, 2: 7}, size=4, members=(0, 1, 2))
    (entry,) = loader.commit(left)
    assert entry.whole == whole
    assert entry.owed == (() if whole else ((0, 4),))
    assert loader.cursor.owed == entry.owed


def test_no_share_is_made_a_single_sample_by_a_ratio():
    """Batch normalisation refuses one. Evenly split, the last two of four workers have none."""
    _, _, draw = drawn_in(dict.fromkeys(range(4), 1), size=4, batch_size=8, members=(0, 1, 2, 3))
    assert draw.whole


def test_work_that_is_repeated_all_the_time_is_said_once(caplog):
    loader, pace = loader_of(0, (0, 1), length=40, batch_size=4)
    pace.bound = {0: 8, 1: 7}
    for _ in range(10):
        loader.next_batch()
        loader.commit((0, 1))
    (told,) = caplog.messages
    assert "split 8:7 over the workers" in told
    assert "given all 4" in told


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_worker_without_a_share_gets_a_placeholder_that_weighs_nothing(length):
    loader, pace = loader_of(me=7, members=(0, 1), length=length, batch_size=6)
    assert loader.next_batch().tolist() == list(range(min(2, length)))
    assert 7 not in pace.ratios[0]
    entry = loader.commit((0, 1))[0]
    assert 7 not in entry.shares


def test_lost_shares_are_owed_and_stand_first_in_the_next_batch():
    loader, pace = loader_of(me=0, members=(0, 1), length=20, batch_size=6, shuffle=False)
    loader.next_batch()
    (entry,) = loader.commit((0,))
    assert (entry.shares, entry.owed) == ({0: ((0, 3),)}, ((3, 6),))
    pace.group = (0,)
    assert loader.next_batch().tolist() == [3, 4, 5, 6, 7, 8]


def test_an_epoch_grows_when_samples_come_back():
    loader, _ = loader_of(me=0, members=(0, 1), length=12, batch_size=6)
    (epoch,) = (e for _, e in zip(range(1), loader.epochs(1), strict=False))
    assert len(epoch) == 2
    loader.next_batch()
    assert len(epoch) == 1
    loader.commit((0,))
    assert len(epoch) == 2


def test_whoever_came_to_the_end_before_samples_came_back_is_given_them():
    """As a train function that draws several batches for a step comes to it within one."""
    loader, pace = loader_of(0, (0, 1), length=10, batch_size=6, shuffle=False)
    (epoch,) = (e for _, e in zip(range(1), loader.epochs(1), strict=False))
    batches = iter(epoch)
    assert [len(batch) for batch in batches] == [3, 2]
    assert next(batches, None) is None
    loader.commit((0,))
    pace.group = (0,)
    assert len(epoch) == 1
    assert next(batches).tolist() == [3, 4, 5, 8, 9]
    loader.commit((0,))
    assert next(batches, None) is None


@pytest.mark.parametrize(("lost", "numbers"), [(False, [0, 1]), (True, [0, 1, 1])])
def test_the_last_epoch_comes_twice_if_samples_came_back_after_its_end(lost, numbers):
    loader, pace = loader_of(0, (0, 1), length=10, batch_size=6)
    seen = []
    for epoch in loader.epochs(2):
        seen.append(epoch.number)
        ahead = list(epoch)
        assert ahead
        loader.commit((0,) if lost and len(seen) == 2 else pace.group)
    assert seen == numbers
    assert loader.cursor.left(1) == 0


def test_an_epoch_that_was_left_by_a_break_does_not_come_twice():
    loader, _ = loader_of(0, (0, 1), length=10, batch_size=6)
    numbers = []
    for epoch in loader.epochs(1):
        numbers.append(epoch.number)
        next(iter(epoch))
        loader.commit((0,))
    assert numbers == [0]


@given(length=st.integers(1, 80), batch_size=st.integers(1, 20))
def test_the_length_of_an_epoch_is_its_number_of_batches(length, batch_size):
    loader, _ = loader_of(length=length, batch_size=batch_size)
    for epoch in loader.epochs(1):
        promised = len(epoch)
        assert sum(1 for _ in epoch) == promised


@given(
    length=st.integers(1, 80),
    micro=st.integers(1, 4),
    places=st.integers(1, 3),
    each=st.integers(1, 3),
    workers=st.integers(1, 3),
)
def test_places_of_a_worker_have_equally_many_samples_in_micro_batches(
    length, micro, places, each, workers
):
    """They make equally many passes, of equal shapes; and count together as the worker does."""
    size = each * micro * places * workers
    rows = []
    for place in range(places):
        options = {"batch_size": size, "microbatch": micro, "part": (place, places)}
        loader, _ = loader_of(0, tuple(range(workers)), length=length, **options)
        row = rows.append([]) or rows[-1]
        for epoch in loader.epochs(1):
            promised = len(epoch)
            for batch in epoch:
                row.append((len(batch), loader.within))
                loader.commit(range(workers))
            assert len(row) == promised
    for batches in zip(*rows, strict=True):
        sizes = {samples for samples, _ in batches}
        assert len(sizes) == 1
        (samples,) = sizes
        assert samples % micro == 0 or samples < micro
        assert sum(within for _, within in batches) == pytest.approx(1) or not batches[0][1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": 8, "microbatch": 3}, "Make it a multiple of 3, 6 say"),
        ({"batch_size": 6, "microbatch": 3, "part": (0, 4)}, "for each of 4 places .* of 12, 12"),
        ({"batch_size": 12, "microbatch": 4, "slices": 2}, "each of 2 slices.* of 8, 8 say"),
        ({"batch_size": 6, "microbatch": 0}, "microbatch must be >= 1, not 0"),
    ],
)
def test_micro_batches_that_a_batch_is_not_made_of_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        source(**values)


def test_a_restored_loader_goes_on_with_what_was_not_committed():
    first, _ = loader_of(members=(0, 1), length=20, batch_size=6, shuffle=False)
    first.next_batch()
    first.commit((0,))
    stored = first.state_dict()
    first.next_batch()
    assert first.state_dict() == stored
    second, _ = loader_of(length=20, batch_size=6, shuffle=False)
    second.load_state_dict(stored)
    assert second.next_batch().tolist() == [3, 4, 5, 6, 7, 8]


def test_loading_forgets_what_was_drawn_and_not_committed():
    loader, _ = loader_of(length=20, batch_size=6, shuffle=False)
    stored = loader.state_dict()
    loader.next_batch()
    loader.load_state_dict(stored)
    assert loader.commit((0,)) == []
    assert loader.next_batch().tolist() == [0, 1, 2, 3, 4, 5]


def test_epochs_resume_in_the_middle_of_the_right_one():
    first, _ = loader_of(length=12, batch_size=6)
    seen = []
    for epoch in first.epochs(2):
        for batch in epoch:
            seen += batch.tolist()
            first.commit((0,))
            if len(seen) == 18:
                stored = first.state_dict()
    second, _ = loader_of(length=12, batch_size=6)
    second.load_state_dict(stored)
    rest = [(epoch.number, batch.tolist()) for epoch in second.epochs(2) for batch in epoch]
    assert rest == [(1, seen[18:])]


def test_no_epoch_is_left_once_all_are_through():
    loader, _ = loader_of(length=12, batch_size=6)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": 36})
    assert list(loader.epochs(3)) == []


def test_the_loader_itself_is_the_epoch_in_progress():
    loader, _ = loader_of(length=12, batch_size=6)
    seen = [[], []]
    for epoch in loader.epochs(2):
        assert len(epoch.dataset) == len(loader.dataset) == 12  # as scripts ask to show progress
        for batch in loader:
            seen[epoch.number] += batch.tolist()
            loader.commit((0,))
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(12))
    with pytest.raises(ConfigError, match=r"loader\.epochs\(n\)"):
        next(iter(loader))


def test_a_batch_that_was_only_looked_at_is_told_of_once(caplog):
    loader, _ = loader_of(length=12, batch_size=3)
    for epoch in loader.epochs(3):
        next(iter(epoch))
        for _ in epoch:
            loader.passed()
            loader.commit((0,))
    (said,) = caplog.messages
    assert "a batch of 3 samples of epoch 0 was taken by a loop that was left" in said


def test_loops_that_use_their_batches_are_not_told_so(caplog):
    loader, _ = loader_of(length=12, batch_size=3)
    for epoch in loader.epochs(3):
        next(iter(epoch))
        loader.passed()  # within ctx.accumulate(), say
        for number, _ in enumerate(epoch):
            if number == 2:
                break  # and the next epoch begins with what is left
            loader.passed()
            loader.commit((0,))
    assert not caplog.messages


def test_a_break_skips_no_sample():
    loader, _ = loader_of(length=12, batch_size=4)
    used: Counter[int] = Counter()
    for epoch in loader.epochs(2):
        for batch in epoch:
            used.update(batch.tolist())
            loader.commit((0,))
            if epoch.number == 0:
                break
    assert used == Counter(dict.fromkeys(range(12), 2))


@pytest.mark.parametrize(("name", "other"), [("length", 21), ("seed", 1), ("shuffle", False)])
def test_a_cursor_of_another_order_is_refused_by_value(name, other):
    loader, _ = loader_of(length=20)
    stored = {**loader.state_dict(), name: other}
    with pytest.raises(ConfigError, match=f"{name}={other}"):
        loader.load_state_dict(stored)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Endless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), Endless()])
def test_a_dataset_without_a_length_is_refused_by_name(dataset):
    with pytest.raises(ConfigError, match=f"{type(dataset).__name__} has no length"):
        Source(dataset=dataset, batch_size=4, device=torch.device("cpu"))


def test_an_empty_dataset_is_refused():
    with pytest.raises(ConfigError, match="Numbers is empty"):
        source(length=0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch_size": 0}, "not 0"),
        ({"batch_size": 2.0}, "not 2.0"),
        ({"batch_size": True}, "not True"),
        ({"num_workers": -1}, "not -1"),
        ({"prefetch": 0}, "0"),
    ],
)
def test_impossible_sizes_are_refused_by_value(values, named):
    with pytest.raises(ConfigError) as caught:
        source(**values)
    assert named in str(caught.value)


def test_reading_ahead_in_a_process_gives_the_same_batches_also_when_the_group_changes():
    changes = {2: (0, 1), 4: (0,), 5: (0, 2, 3)}
    read = {}
    for num_workers in (0, 1):
        loader, pace = loader_of(length=30, batch_size=6, num_workers=num_workers)
        batches = []
        for epoch in loader.epochs(2):
            for batch in epoch:
                batches.append(batch.tolist())
                contributors = (0,) if len(batches) == 3 else pace.group
                loader.commit(contributors)
                pace.group = changes.get(len(batches), pace.group)
        read[num_workers] = batches
    assert read[1] == read[0]
    assert len({len(batch) for batch in read[0]}) > 1


def test_a_plan_is_told_once_however_many_epochs_it_has():
    loader, pace = loader_of()
    for epoch in loader.epochs(3):
        for _ in epoch:
            loader.commit((0,))
    assert pace.plans == [(0, 3)]


def member_with(loader, *, exact=False, froze=False):
    """What of a worker decides whether it is replaced."""
    return SimpleNamespace(
        settings=SimpleNamespace(exact=exact),
        _steps=SimpleNamespace(froze_otherwise=froze),
        _tracked=SimpleNamespace(loaders=[loader]),
        _driver=SimpleNamespace(watching=False),
        me=1,
    )


@pytest.mark.parametrize(("exact", "froze"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_one_that_waits_in_a_loop_that_the_group_is_through_with_is_replaced(exact, froze, epoch):
    """It would draw batches there that nobody else has; in another epoch only some runs mind.

    Exact ones do, and those in which it has frozen other parameters, as it set them for that epoch.
    """
    dataset = Numbers(8)
    loader = Loader(0, Source(dataset=dataset, batch_size=4, device=torch.device("cpu")), Pace())
    loop = loader.epochs(2)
    next(loop)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
    member = member_with(loader, exact=exact, froze=froze)
    replaced = epoch >= 2 or ((exact or froze) and epoch == 1)
    with pytest.raises(Fenced) if replaced else nullcontext():
        Member._look_if_overtaken(member)


def test_one_that_may_go_on_in_another_epoch_may_freeze_other_parameters_later():
    """As all do. It was replaced at the next boundary."""
    dataset = Numbers(8)
    loader = Loader(0, Source(dataset=dataset, batch_size=4, device=torch.device("cpu")), Pace())
    loop = loader.epochs(3)
    next(loop)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1})
    assert loader.overtaken
    member = member_with(loader)
    Member._look_if_overtaken(member)
    member._steps.froze_otherwise = True
    Member._look_if_overtaken(member)


def test_an_epoch_that_ends_for_who_had_batches_of_it_did_not_come_to_none():
    """A second loop over it has none, and every name that the first one sets is there."""
    loader, _ = loader_of()
    for epoch in loader.epochs(1):
        for _ in epoch:
            loader.commit((0,))
        assert list(epoch) == []
    assert not loader.came_to_none


def test_who_came_to_none_has_had_a_batch_since_it_was_given_one():
    first, _ = loader_of()
    for epoch in first.epochs(1):
        for _ in epoch:
            first.commit((0,))
        state = first.state_dict()
        break
    joiner, _ = loader_of()
    joiner.load_state_dict(state)
    came = []
    for epoch in joiner.epochs(2):
        for _ in epoch:
            joiner.commit((0,))
        came.append(joiner.came_to_none)
    assert came == [True, False]
