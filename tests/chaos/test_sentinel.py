"""A bit that flips in one worker's memory is found in the step, and costs nobody else anything.

Real processes, real memory. Found means: the worker is named and taken out, the step is done again,
and the run ends with the bytes of one in which nothing had happened.
"""

import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.errors import ReplicasDiffer, TrainError
from elastix.events import (
    ReplicasDiverged,
    Reported,
    Resumed,
    StepCommitted,
    StepVoided,
    WorkerLost,
)
from elastix.store import Store
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import LocalRun, run_local
from elastix.testing.replay import compare
from tests.trainables import digest, make, train

CONFIG = {"samples": 150, "batch_size": 30, "epochs": 2}  # 10 steps

TENSORS = [
    "head.weight",
    "norm1.weight",
    "norm1.running_var",
    "norm2.num_batches_tracked",
    "@optimizer/state/conv1.weight/exp_avg_sq",
    "@optimizer/state/head.bias/step",
]


def of(kind, run: LocalRun):
    return [event for event in run.events if isinstance(event, kind)]


def final(directory: Path) -> str:
    with Store(directory / "store", read_only=True) as store:
        return digest(store.get(store.tags()["local/final"]))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> str:
    """The bytes at the end of a run of three workers in which nothing happens."""
    directory = tmp_path_factory.mktemp("quiet")
    run = run_local(train, 3, config=CONFIG, directory=directory)
    assert not of(ReplicasDiverged, run)
    return final(directory)


def flip(directory: Path, *flips: Flip | Kill) -> LocalRun:
    """Workers are replaced before the step is done again, so that it is split as it was."""
    return run_local(
        with_kills(train, flips),
        3,
        config=CONFIG,
        directory=directory,
        min_workers=3,
        replace=True,
    )


def part_of(tensor: str) -> str:
    if tensor.startswith("@"):
        return "optimizer"
    return "buffers" if "running" in tensor or "tracked" in tensor else "model"


@pytest.mark.fast("head.weight", "norm1.running_var", "@optimizer*conv1*")
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_flipped_bit_costs_a_worker_and_changes_nothing(tmp_path, quiet, tensor):
    run = flip(tmp_path, Flip(worker=1, tensor=tensor, step=5, bit=3))
    (found,) = of(ReplicasDiverged, run)
    assert (found.step, found.workers, found.apart) == (5, (0, 1, 2), (1,))
    assert (found.parts, found.cure) == ((part_of(tensor),), "evicted")
    assert [(lost.worker, lost.cause) for lost in of(WorkerLost, run)] == [(1, "diverged")]
    assert final(tmp_path) == quiet
    account = audit(run.events)
    assert account.exact
    assert account.replicas.equal


@pytest.mark.fast("bucket-6", "left-7")
@pytest.mark.parametrize(
    ("phase", "found_after"),
    [("bucket", 6), ("filled", 6), ("round", 7), ("left", 7)],
)
def test_it_is_found_wherever_in_a_step_it_happens(tmp_path, quiet, phase, found_after):
    """Before the vote in that step, though its gradient was computed before; else in the next."""
    run = flip(tmp_path, Flip(worker=2, tensor="head.weight", phase=phase, step=6, bit=6))
    assert [(e.step, e.apart) for e in of(ReplicasDiverged, run)] == [(found_after, (2,))]
    assert final(tmp_path) == quiet


class Counter:
    """Tracked: how many batches there were."""

    batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def by_batch(ctx):
    """A scheduler goes on with each batch, of which a step has two; and before backward."""
    model, optimizer, dataset = make(ctx.config)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    counter = Counter()
    ctx.track(counter=counter)
    for number, (x, y) in enumerate(next(ctx.loader(dataset, batch_size=15).epochs(1))):
        counter.batches += 1
        scheduler.step()
        with ctx.accumulate() if number % 2 == 0 else nullcontext():
            F.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    ctx.report(batches=counter.batches)


def test_what_the_loop_did_before_the_last_backward_pass_of_such_a_step_is_put_back(tmp_path):
    ends = []
    for flips in ([], [Flip(worker=1, tensor="head.weight", step=2)]):
        directory = tmp_path / str(len(flips))
        settings = {"config": CONFIG, "min_workers": 3, "replace": True}
        run = run_local(with_kills(by_batch, flips), 3, directory=directory, **settings)
        assert len(of(ReplicasDiverged, run)) == len(flips)
        assert audit(run.events).exact
        ends.append((final(directory), of(Reported, run)[-1].metrics))
    assert ends[0] == ends[1]
    assert ends[0][1] == {"batches": 10}


def with_teacher(ctx):
    """Which follows the model by the loop's own code, and so does a buffer."""
    model, optimizer, dataset = make(ctx.config)
    teacher = torch.nn.Linear(10, 10).double().requires_grad_(False)
    teacher.register_buffer("steps", torch.zeros((), dtype=torch.long))
    model, teacher, optimizer = ctx.prepare(model, teacher, optimizer)
    for x, y in next(ctx.loader(dataset, batch_size=30).epochs(1)):
        F.cross_entropy(teacher(model(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.weight.data.mul_(0.9)
        teacher.steps += 1


def test_what_the_loop_did_to_modules_after_the_last_backward_pass_of_it_is_put_back(tmp_path):
    ends = []
    for flips in ([], [Flip(worker=1, tensor="head.weight", step=2)]):
        directory = tmp_path / str(len(flips))
        settings = {"config": CONFIG, "min_workers": 3, "replace": True}
        run = run_local(with_kills(with_teacher, flips), 3, directory=directory, **settings)
        assert len(of(ReplicasDiverged, run)) == len(flips)
        ends.append(final(directory))
    assert ends[0] == ends[1]


def looks_at_gradients(ctx):
    """The optimizer is in an object of the train function's own."""
    model, optimizer, dataset = make(ctx.config)
    ctx.prepare(model)
    ctx.track(own=Wrapped(optimizer))
    for x, y in next(ctx.loader(dataset, batch_size=30).epochs(1)):
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad /= 1 + max(norms)
        optimizer.step()
        optimizer.zero_grad()


class Wrapped:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


def test_code_that_looks_at_gradients_goes_on_in_such_a_step_and_no_optimizer_moves(tmp_path):
    ends = []
    for flips in ([], [Flip(worker=1, tensor="head.weight", step=2)]):
        directory = tmp_path / str(len(flips))
        settings = {"config": CONFIG, "min_workers": 3, "replace": True}
        run = run_local(with_kills(looks_at_gradients, flips), 3, directory=directory, **settings)
        assert len(of(ReplicasDiverged, run)) == len(flips)
        ends.append(final(directory))
    assert ends[0] == ends[1]


def test_without_a_replacement_the_others_do_the_step_again(tmp_path):
    flipped = with_kills(train, [Flip(worker=1, tensor="head.weight", step=5)])
    run = run_local(flipped, 3, config=CONFIG, directory=tmp_path)
    assert [lost.worker for lost in of(WorkerLost, run)] == [1]
    step = next(event for event in of(StepCommitted, run) if event.step == 6)
    assert step.world_size == 2
    assert sum(batch.samples for batch in step.batches) == 30  # the whole batch
    assert audit(run.events).exact
    assert compare(tmp_path).relative < 1e-9


def test_two_workers_go_back_to_the_last_state_that_both_held(tmp_path):
    """Nobody can say which of them is right. Both are replaced."""
    flipped = with_kills(train, [Flip(worker=1, tensor="head.weight", step=6)])
    settings = {"config": CONFIG, "checkpoint": CheckpointConfig(every_steps=4)}
    run = run_local(flipped, 2, directory=tmp_path / "run", replace=True, **settings)
    (found,) = of(ReplicasDiverged, run)
    assert (found.step, found.apart, found.cure) == (6, (0, 1), "went back")
    assert [resumed.step for resumed in of(Resumed, run)] == [4]
    assert audit(run.events).exact
    assert audit(run.events).replicas.equal
    assert compare(tmp_path / "run").relative < 1e-9


def test_two_workers_without_a_stored_state_end(tmp_path):
    flipped = with_kills(train, [Flip(worker=1, tensor="head.weight", step=6)])
    with pytest.raises(ReplicasDiffer, match="workers 0 and 1 hold different States"):
        run_local(flipped, 2, config=CONFIG, directory=tmp_path, replace=True)


def tracking_once(ctx):
    """A worker that joins later does not pass the step in which a second optimizer is made."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.utils.data.TensorDataset(torch.ones(16, 1))
    for epoch in ctx.loader(rows, batch_size=4).epochs(2):
        for (x,) in epoch:
            if ctx.step == 1:
                optimizer = torch.optim.Adam(model.parameters())
                ctx.track(second=optimizer)
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()


def test_a_joiner_that_has_fewer_optimizers_ends_the_run_with_an_error_that_says_so(tmp_path):
    kills = [Kill(worker=1, phase="bucket", step=3)]
    options = {"replace": True, "min_workers": 2}
    with pytest.raises(TrainError, match="prepared or tracked more or fewer optimizers"):
        run_local(with_kills(tracking_once, kills), 2, directory=tmp_path, **options)


def test_workers_that_part_again_and_again_end_the_run(tmp_path):
    """Code that treats them differently would have one evicted after the other."""
    flips = [
        Flip(worker=worker, tensor="head.weight", phase="filled", step=step)
        for worker, step in ((1, 3), (2, 5), (0, 6))
    ]
    with pytest.raises(ReplicasDiffer, match="again and again"):
        flip(tmp_path, *flips)


@pytest.mark.parametrize("phase", ["left", "round"])
def test_the_one_that_parted_may_die_before_it_is_named(tmp_path, phase):
    """In the roll call, or in the vote itself: then there is nobody left to name."""
    kills = [
        Flip(worker=1, tensor="head.weight", step=5),
        Kill(worker=1, phase=phase, step=5, detail=6 if phase == "round" else 1),
    ]
    run = run_local(with_kills(train, kills), 3, config=CONFIG, directory=tmp_path)
    assert [lost.worker for lost in of(WorkerLost, run)] == [1]
    assert audit(run.events).exact
    assert audit(run.events).replicas.equal
    assert compare(tmp_path).relative < 1e-9


def test_another_one_may_die_in_the_roll_call(tmp_path):
    kills = [
        Flip(worker=1, tensor="head.weight", step=5),
        Kill(worker=2, phase="round", step=5, detail=6),
    ]
    run = run_local(
        with_kills(train, kills),
        4,
        config=CONFIG,
        directory=tmp_path,
    )
    assert {(lost.worker, lost.cause) for lost in of(WorkerLost, run)} == {
        (1, "diverged"),
        (2, "died"),
    }
    assert audit(run.events).exact
    assert compare(tmp_path).relative < 1e-9


def scaled(ctx):
    """A loop with a GradScaler, which refuses to go on where no gradient is."""
    model, optimizer, dataset = make(CONFIG)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    model, optimizer, scaler = ctx.prepare(model, optimizer, scaler)
    for epoch in ctx.loader(dataset, batch_size=30).epochs(2):
        for x, y in epoch:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def test_a_grad_scaler_takes_the_void_step_for_an_overflow(tmp_path):
    """And forgets it, since its scale is put back."""
    again = {"directory": tmp_path / "again", "min_workers": 3, "replace": True}
    flips = [Flip(worker=1, tensor="head.weight", step=5)]
    run = run_local(with_kills(scaled, flips), 3, config=CONFIG, **again)
    assert [e.apart for e in of(ReplicasDiverged, run)] == [(1,)]
    run_local(scaled, 3, config=CONFIG, directory=tmp_path / "quiet")
    assert final(tmp_path / "again") == final(tmp_path / "quiet")


def test_it_can_be_turned_off(tmp_path):
    flipped = with_kills(train, [Flip(worker=1, tensor="head.weight", step=5)])
    with pytest.raises(ReplicasDiffer, match="after step 10 worker 1 holds another State"):
        run_local(flipped, 3, config=CONFIG, directory=tmp_path, sentinel=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_more_flips(tmp_path, quiet, seed):
    chance = random.Random(seed)
    flipped = Flip(
        worker=chance.randrange(3),
        tensor=chance.choice(TENSORS),
        step=chance.randrange(1, 9),
        bit=chance.randrange(8),
        byte=chance.randrange(4),
    )
    run = flip(tmp_path, flipped)
    assert [e.apart for e in of(ReplicasDiverged, run)] == [(flipped.worker,)]
    assert final(tmp_path) == quiet


def in_slices(ctx):
    """Two slices a step, with dropout."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(40, 8, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.ReLU())
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = ctx.loader(torch.utils.data.TensorDataset(x), batch_size=4, slices=2)
    for epoch in loader.epochs(ctx.config["epochs"]):
        for step in epoch:
            for (inputs,) in step:
                (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.fast("300-True")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "steps", [300, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_a_quiet_run_raises_no_alarm(tmp_path, steps, exact):
    """Exact, every tenth step has a slice that is computed twice."""
    config = {"model": "mlp", "samples": 60, "batch_size": 6, "epochs": steps // 10}
    options = {"directory": tmp_path, "timeout_s": 7000.0, "recompute_every": 10}
    run = run_local(in_slices if exact else train, 2, config=config, exact=exact, **options)
    assert of(StepCommitted, run)[-1].step == steps
    assert not of(ReplicasDiverged, run) + of(StepVoided, run) + of(WorkerLost, run)
