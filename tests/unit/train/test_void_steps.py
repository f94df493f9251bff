"""A step that does not count leaves no trace, whatever the loop does before its backward pass."""

import pytest
import torch
from torch.utils.data import TensorDataset

from elastix.config import Guard
from elastix.errors import TrainError
from elastix.train.replica.solo import run_alone
from tests.unit.train.solo import solo

ROWS = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
BATCH = 4


def trained(directory, body, bad=None, left_out=2, **options):
    """The parameters after `body(model, optimizer, batch, nan)` for each batch, and the outcome.

    Args:
        directory: of the run.
        body: of the loop.
        bad: the number of a batch of which a pass may come to nothing; None: it is not there.
        left_out: the number of the one that is not there then.
        options: of the run.
    """
    found = {}

    def train(ctx):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        cut = torch.cat([ROWS[: 4 * left_out], ROWS[4 * left_out + 4 :]])
        rows = ROWS if bad is not None else cut
        for epoch in ctx.loader(TensorDataset(rows), batch_size=BATCH, shuffle=False).epochs(1):
            for (x,) in epoch:
                there = bad is not None and torch.equal(x, ROWS[4 * bad : 4 * bad + 4])
                body(model, optimizer, scheduler, x, float("nan") if there else 1.0)
        found.update({name: value.clone() for name, value in model.state_dict().items()})
        found["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])

    outcome = run_alone(train, {}, solo(directory, guard=Guard(), **options), print)
    return found, outcome


def loss_of(model, x):
    return model(x).square().mean()


def decays_first(model, optimizer, scheduler, x, factor):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    (factor * loss_of(model, x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def decays_past_the_counters(model, optimizer, scheduler, x, factor):
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    (factor * loss_of(model, x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def sharpness_aware(model, optimizer, scheduler, x, factor, first=1.0):
    """SAM: the gradient of the second pass is that beside the parameters, uphill."""
    (first * loss_of(model, x)).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
    moved = []
    with torch.no_grad():
        for parameter in model.parameters():
            moved.append(0.05 * parameter.grad / norm)
            parameter.add_(moved[-1])
    optimizer.zero_grad()
    (factor * loss_of(model, x)).backward()
    with torch.no_grad():
        for parameter, uphill in zip(model.parameters(), moved, strict=True):
            parameter.sub_(uphill)
    optimizer.step()
    optimizer.zero_grad()


def sharpness_aware_from_its_first_pass(model, optimizer, scheduler, x, factor):
    sharpness_aware(model, optimizer, scheduler, x, factor, first=factor)


def decays_before_a_closure(model, optimizer, scheduler, x, factor):
    def closure():
        optimizer.zero_grad()
        loss = factor * loss_of(model, x)
        loss.backward()
        return loss

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    optimizer.step(closure)


def sharpness_aware_in_its_first_pass(model, optimizer, scheduler, x, factor):
    sharpness_aware(model, optimizer, scheduler, x, 1.0, first=factor)


def a_batch_later(model, optimizer, scheduler, x, factor):
    """Gradients are used when the next batch is there."""
    optimizer.step()
    optimizer.zero_grad()
    (factor * loss_of(model, x)).backward()


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize(
    "body",
    [
        decays_first,
        decays_past_the_counters,
        sharpness_aware,
        sharpness_aware_from_its_first_pass,
        sharpness_aware_in_its_first_pass,
        decays_before_a_closure,
        a_batch_later,
    ],
)
def test_a_batch_that_is_left_out_leaves_no_trace(tmp_path, body, bad):
    quiet, outcome = trained(tmp_path / "without", body, left_out=bad)
    assert outcome.kind == "finished", outcome
    found, outcome = trained(tmp_path / "with", body, bad=bad)
    assert outcome.kind == "finished", outcome
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_what_no_step_before_has_done_cannot_be_taken_back_and_says_so(tmp_path):
    def decays_once(model, optimizer, scheduler, x, factor):
        body = decays_first if factor != 1 else sharpness_aware
        body(model, optimizer, scheduler, x, factor)

    _, outcome = trained(tmp_path, decays_once, bad=2)
    assert isinstance(outcome.error, TrainError)
    assert "a parameter of the model" in str(outcome.error)


def test_a_further_pass_on_a_batch_is_left_out_and_the_others_stay(tmp_path):
    def passes(wanted):
        def body(model, optimizer, scheduler, x, factor):
            for number in range(4):
                of_this = factor if number == 2 else 1.0
                if of_this != of_this and not wanted:
                    continue
                optimizer.zero_grad()
                (of_this * loss_of(model, x)).backward()
                optimizer.step()
            scheduler.step()

        return body

    quiet, _ = trained(tmp_path / "skipped", passes(wanted=False), bad=2)
    found, outcome = trained(tmp_path / "void", passes(wanted=True), bad=2)
    assert outcome.kind == "finished", outcome
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, msg=name)
