"""Slices computed more than once: whose fault a difference is, and what code is refused."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elastix.comm.gradients.slice_digests import Sum
from elastix.comm.slice_tree import Node
from elastix.config import FailureConfig
from elastix.data.slice_assignment import Assignment
from elastix.errors import ConfigError, ReplicasDiffer, TrainError
from elastix.train.replica.guard import ABSENT, Alarm
from elastix.train.replica.recomputation import (
    Computed,
    Recomputation,
    SliceFault,
    batch_digest,
    chosen,
    decide,
    look_at_newcomers,
)
from elastix.train.replica.solo import run_alone
from tests.unit.train.solo import solo

RIGHT, WRONG, WORSE = (Computed(n, 7, 8, 9) for n in (1, 2, 3))


def draw(*members, slices=8):
    counts = [slices // len(members)] * len(members)
    us = (1,) * len(members)
    assignment = Assignment(tuple(members), tuple(counts), us)
    return SimpleNamespace(samples=[4] * slices, members=members, assignment=assignment)


# ---------------------------------------------------------------------------------- who is at fault


@pytest.mark.parametrize(
    ("before", "again", "apart"),
    [
        # once: whoever said something else than all say now
        ({0: [RIGHT], 1: [WRONG]}, {0: [RIGHT] * 2, 1: [RIGHT] * 2}, (1,)),
        ({0: [WRONG], 1: [RIGHT]}, {0: [RIGHT] * 2, 1: [RIGHT] * 2, 2: [RIGHT] * 2}, (0,)),
        ({2: [RIGHT, WRONG]}, {w: [RIGHT] * 2 for w in range(3)}, (2,)),
        # each time: the minority
        ({0: [RIGHT], 1: [WRONG]}, {0: [RIGHT] * 2, 1: [WRONG] * 2, 2: [RIGHT] * 2}, (1,)),
        # now and then, and one of two
        ({0: [RIGHT], 1: [WRONG]}, {0: [RIGHT] * 2, 1: [RIGHT, WORSE]}, (1,)),
        # nobody knows
        ({0: [RIGHT], 1: [WRONG]}, {0: [RIGHT] * 2, 1: [WRONG] * 2}, (0, 1)),
        # who miscalculated is gone
        ({0: [RIGHT]}, {0: [RIGHT] * 2, 2: [RIGHT] * 2}, ()),
    ],
)
def test_whose_fault_it_is(before, again, apart):
    found = decide(before, again)
    assert (found.apart, found.code) == (apart, False)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_if_most_get_something_else_the_second_time_it_is_the_code(workers):
    again = {worker: [Computed(1, 7, 8, 9), Computed(2, 7, 8, 10)] for worker in range(workers)}
    assert decide({}, again) == SliceFault((), True, ("gradients", "drawn"))


@pytest.mark.parametrize(
    ("again", "fresh", "apart", "code"),
    [
        # newcomers that say something else each time, though they may be more or the only other
        ({0: [RIGHT] * 2, 3: [WRONG] * 2}, (3,), (3,), True),
        ({0: [RIGHT] * 2, 3: [WRONG] * 2, 4: [WRONG] * 2}, (3, 4), (3, 4), True),
        ({0: [RIGHT] * 2, 3: [RIGHT] * 2, 4: [WRONG] * 2}, (3, 4), (4,), True),
        # nobody was there before
        ({0: [RIGHT] * 2, 1: [WRONG] * 2}, (0, 1), (0, 1), True),
        # it was once; or it is somebody who is no newcomer
        ({0: [RIGHT] * 2, 3: [RIGHT] * 2}, (3,), (3,), False),
        ({0: [RIGHT] * 2, 1: [WRONG] * 2, 3: [RIGHT] * 2}, (3,), (1, 3), False),
        ({0: [RIGHT] * 2, 3: [RIGHT, WRONG]}, (3,), (3,), False),
    ],
)
def test_a_newcomer_that_gives_something_else_each_time_goes_by_its_code(again, fresh, apart, code):
    found = decide({0: [RIGHT], 3: [WRONG]}, again, fresh=fresh)
    assert (found.apart, found.code) == (apart, code)


def test_newcomers_compute_a_slice_of_somebody_who_was_there_before():
    for step in range(50):
        slice_, witnesses = look_at_newcomers(3, step, draw(4, 7, 9, slices=12), (9, 7))
        assert (slice_ < 4, witnesses) == (True, {7, 9})
        slice_, witnesses = look_at_newcomers(3, step, draw(4, 7, 9, slices=12), (4, 7, 9))
        assert witnesses == {4, 7, 9} - {(4, 7, 9)[slice_ // 4]}


def test_a_newcomers_slice_is_looked_at_if_nobody_else_has_one():
    little = draw(5, 8)
    little.samples = [0, 0, 0, 0, 4, 0, 0, 0]
    assert look_at_newcomers(0, 1, little, (8,)) == (4, {5})


def test_whose_turn_it_is_is_agreed_and_comes_to_all():
    seen = [chosen(3, step, draw(4, 7, 9, slices=12)) for step in range(300)]
    assert seen == [chosen(3, step, draw(4, 7, 9, slices=12)) for step in range(300)]
    assert {slice_ for slice_, _ in seen} == set(range(12))
    owners = draw(4, 7, 9, slices=12).assignment.planned
    pairs = {(owners[slice_], witness) for slice_, witness in seen}
    assert pairs == {(a, b) for a in (4, 7, 9) for b in (4, 7, 9) if a != b}


def test_a_slice_without_samples_is_not_chosen_and_who_is_alone_looks_itself():
    little = draw(5)
    little.samples = [2, 2, 0, 0, 0, 0, 0, 0]
    assert {chosen(0, step, little) for step in range(99)} == {(0, 5), (1, 5)}


def test_one_in_so_many_steps_and_the_first_of_each_worker():
    asked = {}
    for worker in (0, 1):
        step = SimpleNamespace(number=0)
        part = Recomputation(3, 10, lambda step=step: step.number)
        for step.number in range(100):
            own = [0, 1, 2, 3] if worker == 0 else [4, 5, 6, 7]
            more = part.begin(draw(0, 1), worker, own)
            if more:
                asked.setdefault(step.number, []).append((worker, more))
    assert asked.pop(0) == [(0, [0, 0]), (1, [4, 4])]
    assert sorted(asked) == list(range(9, 100, 10))
    for number, who in asked.items():
        slice_, witness = chosen(3, number, draw(0, 1))
        assert who == [(witness, [slice_])]


def test_whoever_has_computed_what_is_looked_at_says_so_in_its_vote():
    part = Recomputation(0, 1, lambda: 0)
    slice_, witness = chosen(0, 0, draw(0, 1))
    assert part.begin(draw(0, 1), witness, []) == [slice_]
    assert part.vote() == {}  # it has not come to it
    part._found = {slice_: [RIGHT]}
    said = part.vote()
    assert set(said) == {"seen"}
    part._found = {slice_: [WRONG]}
    assert part.vote() != said
    part._found = {slice_: [RIGHT], 2: [RIGHT, WRONG]}  # the second in its own first step
    assert part.vote() == {**said, "doubted": 3}
    part._found = {0: [RIGHT]}  # nobody else does
    assert part.vote() == ({} if slice_ else said)


def test_a_dispute_is_settled_by_what_all_say():
    parts = {worker: Recomputation(0, 1, lambda: 0) for worker in range(3)}
    for worker, part in parts.items():
        part.begin(draw(0, 1, 2, slices=9), worker, [])
        part._found = {4: [WRONG if worker == 1 else RIGHT]}
        part.dispute(5)
        assert part.begin(draw(0, 1, 2, slices=9), worker, [3]) == [4, 4]
        part._found = {4: [RIGHT, RIGHT, RIGHT]}
    told = {worker: part.numbers({}) for worker, part in parts.items()}
    for part in parts.values():
        assert part.settle(told) == SliceFault((1,), False, ("gradients",))
        assert part.disputed == ()


def test_whoever_joins_meanwhile_knows_of_the_dispute():
    before, newcomer = Recomputation(0, 1, lambda: 0), Recomputation(0, 1, lambda: 0)
    before.dispute(3)
    newcomer.load_state_dict(before.state_dict())
    assert (newcomer.disputed, newcomer.alarm) == ((2,), None)
    assert newcomer.numbers({})[:8] == [0] * 8  # it has nothing to tell of before
    for value in (math.inf, 1e3):
        alarm = Alarm("gradient", value, 2.5)
        before.suspect({0: [1, 0, 4], 1: [ABSENT, 0, 0]}, alarm, draw(0, 1))
        newcomer.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert (newcomer.disputed, newcomer.alarm) == ((0, 1, 2, 3), alarm)


def suspicious(norms, digests):
    nodes = [Node(2, place) for place in range(len(norms))]
    found = zip(nodes, norms, digests, strict=True)
    return {node: Sum(norm, digest) for node, norm, digest in found}


@pytest.mark.parametrize("changed", [True, False])
def test_a_gradient_that_is_too_large_is_looked_into(changed):
    """Where it was largest all compute again; it was who then adds up something else, or nobody."""
    parts = [Recomputation(0, 1, lambda: 0) for _ in range(3)]
    sums = [suspicious([1.0], [b"a"]), suspicious([1.0, math.nan], [b"b", b"c"]), {}]
    told = {w: part.largest(sums[w]) for w, part in enumerate(parts)}
    sums[1] = suspicious([1.0, 1.0], [b"b", b"d" if changed else b"c"])
    for part in parts:
        part.suspect(told, Alarm("gradient", math.nan, 1.0), draw(0, 1))
        assert part.begin(draw(0, 1), 0, [0]) == [4, 4, 5, 5, 6, 6, 7, 7]
        part._found = {slice_: [RIGHT, RIGHT] for slice_ in range(4, 8)}
    told = {w: part.numbers(sums[w]) for w, part in enumerate(parts)}
    for part in parts:
        found = part.settle(told)
        assert (found.apart, found.code) == ((1,) if changed else (), False)


def test_what_is_in_a_batch_counts():
    batch = {"x": torch.arange(6).view(2, 3), "names": ["a", "b"], "weights": np.ones(3)}
    same = {"x": torch.arange(6).view(2, 3), "names": ["a", "b"], "weights": np.ones(3)}
    assert batch_digest(batch) == batch_digest(same)
    for name, other in (
        ("x", torch.arange(6).view(3, 2)),
        ("names", ["a", "c"]),
        ("weights", np.ones(3, dtype=np.float32)),
    ):
        assert batch_digest({**same, name: other}) != batch_digest(batch)
    assert batch_digest([object()]) == batch_digest([object()])
    assert batch_digest([object()]) != batch_digest([None])


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "often"])
def test_it_is_a_whole_number_or_none(every):
    with pytest.raises(ConfigError, match="recompute_every"):
        FailureConfig(recompute_every=every)


# --------------------------------------------------------------------------------- what is refused

X, Y = torch.rand(32, 6), torch.randint(3, (32,))


def loop(ctx, model=None, dataset=None, within=lambda _model, _place: None, **options):
    """The usual loop; `within` is called after each backward pass."""
    model = model or nn.Linear(6, 3)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = ctx.loader(dataset or TensorDataset(X, Y), batch_size=16, slices=4, **options)
    for epoch in loader.epochs(2):
        for step in epoch:
            for place, (x, y) in enumerate(step):
                weight = 1 + 0.1 * place if ctx.config.get("counts") else 1
                (F.cross_entropy(model(x), y) * weight).backward()
                within(model, place)
            optimizer.step()
            optimizer.zero_grad()


class Own(nn.Module):
    """Noise from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.inner(x + torch.rand(x.shape, generator=self.generator))


class Counting(nn.Module):
    """Cools down by a count that is no buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) / (1 + 0.01 * self.calls)


class Noisy(Dataset):
    """Noise from a generator of NumPy's of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + self.generator.normal(), Y[index]


def clamped(model, _place):
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.01, 0.01)


def draws_once(drawn, _model, _place):
    """Something that has no effect is nobody's business."""
    if not drawn:
        drawn.append(torch.rand(3))


BREACHES = {
    "a generator of its own": (lambda ctx: loop(ctx, Own()), "it gave other gradients"),
    "a counter": (lambda ctx: loop(ctx, Counting()), "it gave other gradients"),
    "a dataset's own": (lambda ctx: loop(ctx, dataset=Noisy()), "samples were read differently"),
    "gradients clamped": (lambda ctx: loop(ctx, within=clamped), "other gradients"),
    "enumerate": (loop, "other gradients"),
}


def run(tmp_path, train, config=None, **options):
    settings = solo(tmp_path, exact=True, **options)
    steps = []
    outcome = run_alone(train, config or {}, settings, steps.append)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.kind == "finished", outcome.traceback
    return steps


@pytest.mark.parametrize("breach", BREACHES)
def test_code_that_gives_something_else_the_second_time_is_refused(tmp_path, breach):
    train, why = BREACHES[breach]
    config = {"counts": breach == "enumerate"}
    with pytest.raises(TrainError, match=rf"slice 0 of step 1.*{why}"):
        run(tmp_path, train, config)
    run(tmp_path, train, config, recompute_every=None)  # it can be turned off


def test_code_that_does_not_goes_through_whatever_it_draws_for_itself(tmp_path):
    drawn = []
    steps = run(tmp_path, partial(loop, within=partial(draws_once, drawn)), recompute_every=1)
    assert len([step for step in steps if type(step).__name__ == "StepCommitted"]) == 4


def test_what_is_computed_again_changes_nothing(tmp_path):
    ends = []
    for every in (None, 1):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for layer in (model[0], model[3]):
                layer.reset_parameters()
        run(tmp_path, partial(loop, model=model), recompute_every=every)
        ends.append([tensor.clone() for tensor in model.state_dict().values()])
    assert all(map(torch.equal, *ends))


def test_a_gradient_that_flips_once_is_noticed_by_who_is_alone(tmp_path, caplog):
    flipped = []

    def flip(model, place):
        if not flipped and place == 2:  # its first slice, for the third time
            flipped.append(True)
            model.weight.grad.numpy()[0, 0] += 1

    quiet = nn.Linear(6, 3)
    other = nn.Linear(6, 3)
    other.load_state_dict(quiet.state_dict())
    run(tmp_path, partial(loop, model=quiet))
    steps = run(tmp_path, partial(loop, model=other, within=flip))
    assert flipped
    assert "gave another result than before (gradients)" in caplog.text
    assert torch.equal(quiet.weight, other.weight)
    assert len([step for step in steps if type(step).__name__ == "StepCommitted"]) == 4


def test_who_is_alone_and_never_computes_the_same_does_not_go_on_for_ever(tmp_path):
    """What a slice gives goes by its place in the loop, past what is computed twice in a row."""

    def later(model, place):
        if place > 1:
            model.weight.grad.numpy()[0, 0] += 1

    with pytest.raises(ReplicasDiffer, match="again and again"):
        run(tmp_path, partial(loop, within=later), recompute_every=1)


# ----------------------------------------------------------------------------- turns of loaders


def alternating(ctx):
    """Two loaders take turns by a counter, which a stop after the seventh step makes begin anew."""
    model = nn.Linear(6, 3)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loaders = [ctx.loader(TensorDataset(X, Y), batch_size=16, slices=4) for _ in range(2)]
    endless = [(step for epoch in loader.epochs(99) for step in epoch) for loader in loaders]
    stop = ctx.config["stop"]
    for number in [*range(stop), *range(3)]:
        if ctx.step == stop:
            ctx._member._state.adopt(ctx._member.capture())
        for x, y in next(endless[number % 2]):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("stop", "shifted"), [(7, True), (8, False), (3, False)])
def test_loaders_that_do_not_go_on_in_turn_after_a_stop_are_told_of(
    tmp_path, caplog, stop, shifted
):
    """After a few steps nobody knows yet that they take turns."""
    run(tmp_path, alternating, {"stop": stop})
    assert ("the turn of loader 1" in caplog.text) is shifted


def test_who_has_not_computed_all_that_is_disputed_has_nothing_to_tell():
    part = Recomputation(0, 1, lambda: 0)
    part.disputed, part._found = (4, 5), {4: [RIGHT, RIGHT]}
    assert not any(part.numbers({}))
    part._found[5] = [WRONG, WRONG]
    assert any(part.numbers({}))
