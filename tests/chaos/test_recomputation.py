"""A gradient that is computed wrongly is found by computing it again; who did it is taken out."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.exact import flips
from elastix.config import CheckpointConfig, Guard
from elastix.data.audit import audit
from elastix.errors import ReplicasDiffer, TrainError
from elastix.events import (
    ReplicasDiverged,
    Resumed,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
    StepVoided,
    WorkerLost,
)
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from tests.exact_programs import train
from tests.trainables import samples

CONFIG = {"model": "mlp", "epochs": 2, "equal_shares": True}  # 10 steps


def run(directory, *faults, workers=3, program=train, **options):
    doomed = with_kills(program, faults)
    options = {"config": CONFIG, "recompute_every": 1, **options}
    return run_local(doomed, workers, directory=directory, exact=True, **options)


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def digest(result):
    return of(StateStored, result)[-1].digest


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return digest(run(tmp_path_factory.mktemp("quiet"), workers=1))


def check(counts, wanted):
    assert counts["state_found"] + counts["gradient_found"] == counts["flips"] == wanted
    assert counts["culprit_named"] == wanted
    assert counts["false_alarms"] == 0
    assert counts["byte_equal"] == counts["runs"]


def test_flips_in_what_is_looked_at_are_found_and_leave_no_trace():
    """In a State, and in what a slice gives its owner or the other one."""
    kinds = ("gradient", "state", "gradient")
    assert {one.phase for one in flips.plan(3, 0, kinds)} == {"again", "boundary", "slice"}
    check(flips.case(0, 3, kinds), 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_hundred_flips():
    """The sentinel's and those that only a second computation can find."""
    check(flips.measure(300, seed=1), 300)


def miscalculating(worker, **more):
    return Flip(worker=worker, tensor="@backward/1.weight", phase="again", bit=3, **more)


def test_a_worker_that_miscalculates_for_good_is_taken_out(tmp_path):
    """Until it was its turn to compute a slice of another, what it gave was wrong unseen."""
    result = run(tmp_path, miscalculating(1, step=2, lasting=True))
    assert [e.worker for e in of(WorkerLost, result)] == [1]
    assert {e.apart for e in of(ReplicasDiverged, result)} == {(1,)}
    assert audit(result.events).exact


def test_of_two_that_never_agree_both_go_back(tmp_path, quiet):
    """Nobody can say who is right. Their successors begin where both were right."""
    fault = miscalculating(1, step=5, lasting=True)
    options = {"checkpoint": CheckpointConfig(every_steps=4), "replace": True, "workers": 2}
    result = run(tmp_path, fault, **options)
    (found,) = of(ReplicasDiverged, result)
    assert (found.apart, found.cure) == ((0, 1), "went back")
    assert [e.step for e in of(Resumed, result)] == [4]
    assert digest(result) == quiet


def test_of_two_that_never_agree_without_a_stored_state_nothing_is_left(tmp_path):
    with pytest.raises(ReplicasDiffer, match="workers 0 and 1 computed a slice differently"):
        run(tmp_path, miscalculating(1, step=3, lasting=True), workers=2, replace=True)


@pytest.mark.parametrize("phase", ["again", "left"])
def test_who_miscalculated_may_die_before_it_is_named(tmp_path, quiet, phase):
    """While all compute the slice once more, or after it: somebody says what it had said."""
    death = Kill(worker=1, phase=phase, step=4, after=1 if phase == "again" else 0)
    result = run(tmp_path, miscalculating(1, step=4), death)
    assert [e.worker for e in of(WorkerLost, result)] == [1]
    assert audit(result.events).exact
    assert digest(result) == quiet


def test_a_gradient_that_is_too_large_is_no_bad_batch_if_a_worker_has_made_it_so(tmp_path):
    """The exponent of one weight's gradient flips. Its batch is used, by the others."""
    flip = Flip(worker=1, tensor="@backward/6.bias", phase="slice", step=26, byte=3, bit=6)
    config = {**CONFIG, "epochs": 7}  # the guard has to know what is usual
    found = []
    for faults in ([], [flip]):
        options = {"config": config, "guard": Guard(), "recompute_every": 200}  # not in this step
        result = run(tmp_path / str(len(faults)), *faults, **options)
        assert not of(StepVoided, result) + of(SamplesLeftOut, result)
        found.append(digest(result))
    (parted,) = of(ReplicasDiverged, result)
    # In the first step of which it had a slice: one that is slow may have none.
    between = [e for e in of(StepCommitted, result) if 26 < e.step <= parted.step]
    assert not any(1 in batch.shares for e in between for batch in e.batches)
    assert parted.step >= 26
    assert (parted.apart, parted.parts) == ((1,), ("gradients",))
    assert found[0] == found[1]


class Cooling(torch.nn.Linear):
    """Its temperature goes by a counter, but not at once."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / max(1, self.calls - 12)


def counting(ctx):
    model = Cooling(64, 10)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in ctx.loader(samples(96), batch_size=24, slices=8).epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x.flatten(1)), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_code_that_goes_by_a_counter_ends_the_run_though_its_first_step_was_right(tmp_path):
    with pytest.raises(TrainError, match=r"computed more than\s+once .* it gave other gradients"):
        run(tmp_path, program=counting, workers=2)


def annealed(ctx):
    """Its counter begins at 0 in whoever joins, and is the same each time within a step."""
    model = torch.nn.Linear(64, 10)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    number = 0
    for epoch in ctx.loader(samples(96), batch_size=24, slices=8).epochs(3):
        for step in epoch:
            for x, y in step:
                out = model(x.flatten(1))
                (F.cross_entropy(out, y) + number / 10 * out.pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1


def test_code_that_gives_a_newcomer_something_else_ends_the_run_in_its_first_step(tmp_path):
    """It gives that each time, so what the newcomer alone computes again would not show it."""
    options = {"replace": True, "min_workers": 2, "workers": 2, "recompute_every": 200}
    death = Kill(worker=1, phase="boundary", step=3)
    with pytest.raises(
        TrainError, match=r"the first step of worker 2: .*other gradients.*ctx.step"
    ):
        run(tmp_path, death, program=annealed, **options)


def by_rank(ctx):
    model = torch.nn.Linear(64, 10)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in ctx.loader(samples(96), batch_size=24, slices=8).epochs(1):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x.flatten(1) + ctx.worker), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_code_that_goes_by_the_worker_ends_the_run_in_its_first_step(tmp_path):
    with pytest.raises(TrainError, match="step 1, which is the first step of workers 0, 1 and 2"):
        run(tmp_path, program=by_rank, recompute_every=200)


def carrying(ctx):
    """The hidden state of one slice is the next one's, as of columns of one long text."""
    model = torch.nn.RNN(8, 10, batch_first=True)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hidden = torch.zeros(1, 3, 10)
    for epoch in ctx.loader(samples(96), batch_size=24, slices=8, shuffle=False).epochs(2):
        for step in epoch:
            for x, y in step:
                outputs, hidden = model(x.reshape(-1, 8, 8), hidden.detach())
                F.cross_entropy(outputs[:, -1], y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_state_that_is_carried_from_slice_to_slice_ends_the_run(tmp_path):
    with pytest.raises(TrainError, match="the hidden state of a recurrent network"):
        run(tmp_path, program=carrying, workers=2)
