"""ctx.mean: the mean over the whole batch, equal on all workers, whoever dies in it."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from elastix.data.audit import audit
from elastix.errors import TrainError
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.trainables import note, notes

DATA = TensorDataset(torch.arange(40.0)[:, None])


def averaging(ctx):
    """Batches of 10 over 3 workers: shares of 4, 3 and 3 samples."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
    for epoch in ctx.loader(DATA, batch_size=10, shuffle=False).epochs(1):
        for (x,) in epoch:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            means = ctx.mean(x=x.mean(), ones=1)
            note(log, ctx.step, [means["x"], means["ones"]])


def averaging_after_slices(ctx):
    """Two slices of the step before were one worker's; of the next batch each has a half."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
    sliced = ctx.loader(DATA, batch_size=12, slices=3, shuffle=False)
    whole = ctx.loader(DATA, batch_size=10, shuffle=False)
    for one, other in zip(sliced.epochs(1), whole.epochs(1), strict=True):
        others = iter(other)
        for step in one:
            for (x,) in step:
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (x,) = next(others)
            note(log, ctx.step, ctx.mean(x=x.mean())["x"])
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def unlike(ctx):
    model = torch.nn.Linear(1, 1)
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    ctx.mean(**{f"rank{ctx.rank}": 1.0})


def test_it_is_the_mean_over_the_global_batch(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    run_local(averaging, 3, config={"log": str(logs)}, directory=tmp_path / "run")
    found = notes(logs)
    assert set(found) == {0, 1, 2}
    for steps in found.values():
        assert steps == {step: [10 * step - 5.5, 1.0] for step in range(1, 5)}


def test_a_batch_after_slices_is_weighed_by_its_own_shares(tmp_path):
    (logs := tmp_path / "logs").mkdir()
    run_local(averaging_after_slices, 2, config={"log": str(logs)}, directory=tmp_path / "run")
    for steps in notes(logs).values():
        assert steps == {1: 4.5, 3: 14.5, 5: 24.5, 7: 34.5}


@pytest.mark.parametrize("worker", [0, 2])
def test_survivors_of_a_kill_in_it_have_the_same_mean_of_what_is_left(tmp_path, worker):
    logs = tmp_path / "logs"
    logs.mkdir()
    train = with_kills(averaging, [Kill(worker=worker, phase="mean", step=2)])
    result = run_local(train, 3, config={"log": str(logs)}, directory=tmp_path / "run")
    assert set(result.lost) == {worker}
    assert audit(result.events).exact
    first, second = (steps for name, steps in notes(logs).items() if name != worker)
    assert first == second
    left = torch.cat([DATA.tensors[0][10:14], DATA.tensors[0][14:17], DATA.tensors[0][17:20]])
    share = slice(0, 4) if worker == 0 else slice(7, 10)
    gone = left[share].sum()
    expected = float((left.sum() - gone) / (10 - len(left[share])))
    assert first[2][0] == pytest.approx(expected, abs=1e-9)
    # Its share of the third batch was lost with it, and comes first in the fourth.
    owed = DATA.tensors[0][20:24] if worker == 0 else DATA.tensors[0][27:30]
    fourth = torch.cat([owed, DATA.tensors[0][30 : 40 - len(owed)]])
    assert first[4][0] == pytest.approx(float(fourth.mean()), abs=1e-5)


def test_other_names_on_other_workers_end_the_run(tmp_path):
    with pytest.raises(TrainError, match=r"ctx\.mean with other names"):
        run_local(unlike, 2, directory=tmp_path / "run")


def test_a_replay_has_the_same_means(tmp_path):
    """It decides by the mean whether a step is made half as large."""
    train = with_kills(deciding, [Kill(worker=1, phase="bucket", step=3)])
    result = run_local(train, 3, directory=tmp_path / "run")
    assert set(result.lost) == {1}
    assert compare(tmp_path / "run").relative < 1e-6


def deciding(ctx):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    for epoch in ctx.loader(DATA, batch_size=10).epochs(2):
        for (x,) in epoch:
            loss = model(x).square().mean()
            loss.backward()
            if ctx.mean(loss=loss.detach())["loss"] < 200:
                optimizer.param_groups[0]["lr"] = 5e-5
            optimizer.step()
            optimizer.zero_grad()
