"""Workers that draw other batches than the rest are seen in the commit round, and named."""

import pickle
from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastix.comm.protocol.calls import OperationKind
from elastix.config import Guard
from elastix.data.loader import Loader
from elastix.data.source import Source
from elastix.errors import ReplicasDiffer
from elastix.train.replica.draw_comparison import Drawn, drawn, parted
from elastix.train.replica.guard import ABSENT, Watch, ordered
from elastix.train.replica.rounds import RollCall, told
from elastix.train.replica.solo import run_alone
from elastix.train.replica.vote import Vote, decode, judge
from tests.unit.train.solo import solo


class Worker:
    """The Pace of the loaders of one worker of a group of fixed size."""

    def __init__(self, me: int, members: tuple[int, ...]) -> None:
        self.me = me
        self._members = members

    def boundary(self, loader: int) -> None:
        pass

    def members(self) -> tuple[int, ...]:
        return self._members

    def binding(self, loader: int) -> None:
        return None

    def drawn(self, loader: int, size: int, ratio: dict[int, int]) -> None:
        pass

    def planned(self, loader: int, epochs: int) -> None:
        pass


def loader(me=0, members=(0, 1, 2), number=0, length=40, batch_size=8) -> Loader:
    data = torch.utils.data.TensorDataset(torch.arange(length))
    source = Source(dataset=data, batch_size=batch_size, device=torch.device("cpu"))
    return Loader(number, source, Worker(me, members))


def take(number: int, *loaders: Loader) -> Drawn:
    for each in loaders:
        for _ in range(number):
            each.next_batch()
    return drawn(loaders)


def vote(mark: int, proposal: int = 0) -> tuple[int, ...]:
    return Vote(
        proposal=proposal, journaled=-1, store=False, compare=False, drawn=mark, void=False
    ).encode()


def reduced(*votes: tuple[int, ...]) -> list[int]:
    return highest(*map(torch.tensor, votes)).tolist()


def highest(*payloads: torch.Tensor) -> torch.Tensor:
    return torch.stack(payloads).max(0).values


def test_all_shares_of_a_batch_count_alike_an_empty_one_too():
    accounts = {take(2, loader(me)) for me in (0, 1, 2, 9)}  # 9 is not in the group: no share
    (account,) = accounts
    assert (account.batches, account.samples, account.first, account.stop) == (2, 16, 0, 16)


def test_other_samples_at_the_same_positions_are_another_draw():
    def take_of(indices):
        data = torch.utils.data.Subset(list(range(40)), indices)
        source = Source(dataset=data, batch_size=4, device=torch.device("cpu"))
        return take(1, Loader(0, source, Worker(0, (0, 1))))

    same, again, other = take_of([0, 1, 2, 3]), take_of([0, 1, 2, 3]), take_of([0, 1, 2, 9])
    assert same == again
    assert other.mark != same.mark
    assert "another Subset" in str(parted(3, {0: same, 1: again, 2: other}))
    assert "another Subset" not in str(parted(3, {0: same, 1: replace(same, stop=5)}))


def test_files_in_another_order_are_another_draw_wherever_they_lie():
    """As glob gives them, on a node with another file system or copies in another folder."""

    class Images(torch.utils.data.Dataset):
        def __init__(self, paths):
            self.paths = paths

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            return self.paths[index]

    def take_of(paths):
        source = Source(dataset=Images(paths), batch_size=4, device=torch.device("cpu"))
        return take(1, Loader(0, source, Worker(0, (0, 1))))

    names = [f"{number // 4}/{number}.png" for number in range(8)]
    here, there = ([f"/{folder}/{name}" for name in names] for folder in ("data", "scratch/copy"))
    assert take_of(here) == take_of(there) == take_of(names)
    swapped = take_of([*here[1::-1], *here[2:]])
    assert swapped.mark != take_of(here).mark
    assert "os.listdir" in str(parted(3, {0: take_of(here), 1: swapped}))


def test_who_trains_other_parameters_is_told_from_who_draws_other_batches():
    """One that joined after they were unfrozen, say: the average would lack its samples."""
    alike, frozen, others = (drawn([loader()], frozen=which) for which in ((), (0, 2), (1, 2)))
    assert len({alike.mark, frozen.mark, others.mark}) == 3
    said = str(parted(4, {0: alike, 1: alike, 2: frozen}))
    assert "worker 2 had frozen 2; workers 0 and 1 had frozen 0" in said
    assert "train the same parameters" in str(parted(4, {0: frozen, 1: others}))
    assert "train the same parameters" not in str(parted(4, {0: frozen, 1: frozen}))


def test_draws_of_two_epochs_are_told_apart():
    one = loader()
    now, later = take(1, one), replace(take(1, loader()), epoch=1)
    assert "epoch 0, positions" in (said := str(parted(3, {0: now, 1: later})))
    assert "epoch 1, positions" in said


def test_a_batch_that_was_split_in_another_way_is_another_draw():
    """Some samples would be used twice, and others not at all."""
    assert take(1, loader(0, (0, 1, 2))).mark != take(1, loader(0, (0, 2))).mark


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: take(3, loader()), id="one batch more"),
        pytest.param(lambda: take(1, loader()), id="one less"),
        pytest.param(lambda: take(2, loader(number=1)), id="another loader"),
        pytest.param(lambda: take(1, loader(), loader(number=1)), id="two loaders"),
        pytest.param(lambda: drawn([]), id="none"),
    ],
)
def test_other_draws_have_another_mark(other):
    assert take(2, loader()).mark != other().mark


def test_another_epoch_is_another_draw():
    later = loader()
    later.epoch = 1
    assert take(2, loader()).mark != take(2, later).mark


def test_what_is_committed_is_behind():
    one = loader()
    before = take(2, one)
    one.commit((0, 1, 2))
    assert drawn([one]) == drawn([loader()]) != before


marks = st.integers(0, 2**62 - 1)
QUIET = Vote(proposal=0, journaled=-1, store=False, compare=False, drawn=3, void=False)


def votes_encoded(votes):
    return [vote.encode() for vote in votes]


@given(st.lists(marks, min_size=1, max_size=5))
def test_the_round_says_whether_all_drew_alike(values):
    assert decode(reduced(*map(vote, values))).alike == (len(set(values)) == 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_a_proposal_counts_if_all_know_it(proposals):
    agreed = decode(reduced(*(vote(7, proposal) for proposal in proposals)))
    assert agreed.alike
    assert agreed.proposal == (proposals[0] if len(set(proposals)) == 1 else 0)


def test_a_flag_of_one_is_a_flag_of_all():
    flags = {"store": True, "compare": True, "void": True, "shadowed": True, "level": True}
    agreed = decode(reduced(replace(QUIET, journaled=5, **flags).encode(), vote(3)))
    assert agreed.journaled == 5
    assert {name: getattr(agreed, name) for name in flags} == flags
    quiet = decode(reduced(vote(3), vote(3)))
    assert not any(getattr(quiet, name) for name in flags)


@given(st.lists(marks, min_size=1, max_size=5))
def test_the_round_says_whether_all_hold_the_same(values):
    votes = (replace(QUIET, held=value) for value in values)
    assert decode(reduced(*votes_encoded(votes))).equal == (len(set(values)) == 1)


@given(st.lists(st.tuples(st.sampled_from((5, 9)), st.integers(1, 3)), min_size=1, max_size=5))
def test_what_is_held_is_compared_among_processors_of_one_kind(said):
    kinds = tuple(sorted({kind for kind, _ in said}))
    votes = (replace(QUIET, held=held, processor=kind, processors=kinds) for kind, held in said)
    agreed = decode(reduced(*votes_encoded(votes)))
    by_kind = {kind: {held for of, held in said if of == kind} for kind in kinds}
    alike = {kind: next(iter(held)) for kind, held in by_kind.items() if len(held) == 1}
    assert agreed.held == {kind: alike.get(kind) for kind in kinds}
    assert agreed.equal == (len(alike) == len(kinds))
    assert agreed.alike


def test_the_slowest_step_and_the_largest_numbers_count():
    votes = [replace(QUIET, step_us=7, norm=5, metric=2), replace(QUIET, step_us=9, norm=3)]
    agreed = decode(reduced(*votes_encoded(votes)))
    assert (agreed.step_us, agreed.norm, agreed.metric) == (9, 5, 2)
    nobody = decode(reduced(QUIET.encode()))
    assert (nobody.norm, nobody.metric) == (ABSENT, ABSENT)


def judged(*votes, guard=True):
    """What all make of these votes, after steps with gradients of norm 1 and losses of 2."""
    watch = Watch(Guard(metric="loss")) if guard else None
    for _ in range(30 if guard else 0):
        watch.counted(1.0, 2.0)
    return judge(reduced(*votes_encoded(votes)), watch)


def test_each_says_in_its_own_place_how_long_a_slice_takes():
    votes = (replace(QUIET, slice_us=us) for us in ((70, 0, 0), (0, 0, 0), (0, 0, 90)))
    assert decode(reduced(*votes_encoded(votes))).slice_us == (70, 0, 90)
    assert decode(QUIET.encode()).slice_us == ()


def test_a_step_counts_if_nobody_has_anything_against_it():
    usual = replace(QUIET, norm=ordered(1.0), metric=ordered(2.0))
    for guard in (True, False):
        verdict = judged(usual, usual, guard=guard)
        assert not verdict.void
        assert verdict.alarm is None


@pytest.mark.parametrize(
    ("vote", "what"), [({"norm": 1e3}, "gradient"), ({"norm": 1.0, "metric": 1e3}, "loss")]
)
def test_what_the_guard_finds_in_one_vote_makes_the_step_void(vote, what):
    odd = replace(QUIET, **{name: ordered(value) for name, value in vote.items()})
    verdict = judged(QUIET, odd)
    assert verdict.void
    assert verdict.alarm.what == what
    assert not judged(QUIET, odd, guard=False).void


@pytest.mark.parametrize("against", [{"void": True}, {"held": 4}])
def test_a_step_that_is_void_in_any_case_is_not_judged(against):
    """Its gradient may be of a part of the batch, or of another model."""
    odd = replace(QUIET, norm=ordered(1e3), **against)
    for guard in (True, False):
        verdict = judged(QUIET, odd, guard=guard)
        assert verdict.void
        assert verdict.alarm is None


class Group:
    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_a_roll_call_tells_all_who_drew_what():
    usual, odd = take(1, loader()), take(2, loader())
    workers = {4: usual, 5: odd, 8: usual}
    calls = [
        RollCall(OperationKind.DRAWS, worker, astuple(what)).payload(Group(rank))
        for rank, (worker, what) in enumerate(workers.items())
    ]
    assert {worker: Drawn(*row) for worker, row in told(highest(*calls)).items()} == workers
    error = parted(3, workers)
    assert (
        "same batches for step 3: worker 5 drew 2 batches (16 samples, epoch 0, positions 0 to 15)"
        in (str(error))
    )
    assert "workers 4 and 8 drew 1 batch (8 samples, epoch 0, positions 0 to 7)" in str(error)
    assert isinstance(pickle.loads(pickle.dumps(error)), ReplicasDiffer)


def test_the_one_that_parted_may_be_lost_before_it_can_be_asked():
    usual = take(1, loader())
    assert "one that has been lost since" in str(parted(3, {4: usual, 8: usual}))


@pytest.mark.parametrize(
    ("seen", "contested"),
    [((), False), ((7,), False), ((7, 7), False), ((7, 8), True), ((0, 7), True)],
)
def test_a_slice_is_contested_if_those_who_have_computed_it_got_different_results(seen, contested):
    said = [ABSENT, *seen, ABSENT]
    plain = Vote(proposal=0, journaled=-1, store=False, compare=False, drawn=1, void=False)
    votes = [replace(plain, seen=one).encode() for one in said]
    assert decode(reduced(*votes)).contested is contested
    assert judge(reduced(*votes), None).void is contested


@pytest.mark.parametrize(
    ("seed", "shuffle", "together", "told"),
    [(None, True, True, 1), (1, True, True, 0), (None, False, True, 0), (None, True, False, 0)],
)
def test_two_loaders_that_pair_each_sample_with_itself_are_told_of_once(
    tmp_path, caplog, seed, shuffle, together, told
):
    rows = [torch.full((4,), float(number)) for number in range(24)]
    pairs = []

    def train(ctx):
        model = torch.nn.Linear(4, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        one = ctx.loader(rows, 6, shuffle=shuffle)
        other = ctx.loader(rows, 6, shuffle=shuffle, seed=seed)
        drawn = zip(one.epochs(2), other.epochs(2), strict=True)
        epochs = (zip(*both, strict=True) for both in drawn) if together else one.epochs(2)
        for epoch in epochs:
            for x in epoch:
                mixed = sum(x) / 2 if together else x
                pairs.append([each[:, 0].tolist() for each in x] if together else [])
                optimizer.zero_grad()
                model(mixed).sum().backward()
                optimizer.step()

    assert run_alone(train, {}, solo(tmp_path), print).kind == "finished"
    seen = [r for r in caplog.messages if "have drawn the same samples of one dataset" in r]
    assert len(seen) == told
    assert len(pairs) == 8
    if together:
        assert all(x == y for x, y in pairs) is (seed is None)
