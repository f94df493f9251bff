"""A step that does not count leaves no trace, whatever the loop does before its backward pass."""

import pytest
import torch
from torch.utils.data import TensorDataset

from elastix.config import Guard
from elastix.errors import ConfigError, TrainError
from elastix.train.replica.solo import run_alone
from tests.unit.train.solo import solo

ROWS = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))


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
        for epoch in ctx.loader(TensorDataset(rows), batch_size=4, shuffle=False).epochs(1):
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


def decays_a_parameter_in_the_middle(model, optimizer, scheduler, x, factor):
    """Past torch's counters, and past the first and the last parameter."""
    model[0].bias.data.mul_(0.9)
    (factor * loss_of(model, x)).backward()
    optimizer.step()
    optimizer.zero_grad()


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
        decays_a_parameter_in_the_middle,
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


def assert_as_if_skipped(tmp_path, passes):
    """A loop with a void pass ends with what one has that leaves that pass out."""
    quiet, _ = trained(tmp_path / "skipped", passes(wanted=False), bad=2)
    found, outcome = trained(tmp_path / "void", passes(wanted=True), bad=2)
    assert outcome.kind == "finished", outcome
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, msg=name)


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

    assert_as_if_skipped(tmp_path, passes)


def test_all_passes_on_a_bad_batch_are_one_void_step_for_the_guard(tmp_path):
    """A batch with a broken sample is no sign of a run that has become unstable."""

    def body(model, optimizer, scheduler, x, factor):
        for _ in range(10):
            optimizer.zero_grad()
            (factor * loss_of(model, x)).backward()
            optimizer.step()

    quiet, _ = trained(tmp_path / "without", body, left_out=2)
    found, outcome = trained(tmp_path / "with", body, bad=2)
    assert outcome.kind == "finished", outcome
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_bad_passes_where_nobody_knows_where_a_step_begins_count_one_by_one(tmp_path):
    def train(ctx):
        model = torch.nn.Linear(4, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while ctx.step < 100:
            optimizer.zero_grad()
            (float("nan") * loss_of(model, ROWS)).backward()
            optimizer.step()

    outcome = run_alone(train, {}, solo(tmp_path, guard=Guard()), print)
    assert "voided 6 of the last 6 steps" in str(outcome.error)


def test_a_void_pass_of_a_closure_moves_nothing_either(tmp_path):
    """After the first pass on a batch there are moments, which move without a gradient."""

    def passes(wanted):
        def body(model, optimizer, scheduler, x, factor):
            for number in range(4):
                of_this = factor if number == 2 else 1.0
                if of_this != of_this and not wanted:
                    continue

                def closure(of_this=of_this):
                    optimizer.zero_grad()
                    loss = of_this * loss_of(model, x)
                    loss.backward()
                    return loss

                optimizer.step(closure)

        return body

    assert_as_if_skipped(tmp_path, passes)


def test_what_is_decayed_a_batch_later_is_no_part_of_what_the_optimizer_has_made(tmp_path):
    def body(model, optimizer, scheduler, x, factor):
        optimizer.step()
        optimizer.zero_grad()
        decays_first(model, torch.optim.SGD([torch.zeros(1)]), scheduler, x, factor)

    quiet, _ = trained(tmp_path / "without", body, left_out=2)
    found, outcome = trained(tmp_path / "with", body, bad=2)
    assert outcome.kind == "finished", outcome
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_what_was_decayed_before_the_optimizer_moved_on_cannot_be_told_from_that(tmp_path):
    def body(model, optimizer, scheduler, x, factor):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        a_batch_later(model, optimizer, scheduler, x, factor)

    _, outcome = trained(tmp_path, body, bad=2)
    assert isinstance(outcome.error, TrainError)
    assert "a parameter of the model" in str(outcome.error)


class Holder:
    """An object of the user's that has an optimizer, as a wrapper of Lookahead has."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("late", [True, False])
def test_gradients_that_a_held_optimizer_uses_a_batch_later_are_not_lost(tmp_path, late):
    """Parameters were put back to what they had been before that, and the run ended green."""

    def learned(directory, rows, bad):
        found = {}

        def train(ctx):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            holder = Holder(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
            ctx.prepare(model, holder)
            for epoch in ctx.loader(TensorDataset(rows), batch_size=4, shuffle=False).epochs(1):
                for number, (x,) in enumerate(epoch):
                    if late:
                        holder.step()
                    (loss_of(model, x) * (float("nan") if number == bad else 1)).backward()
                    if not late:
                        holder.step()
            found.update(model.state_dict())

        return found, run_alone(train, {}, solo(directory, guard=Guard()), print)

    quiet, _ = learned(tmp_path / "quiet", torch.cat([ROWS[:8], ROWS[12:]]), None)
    found, outcome = learned(tmp_path / "void", ROWS, 2)
    if late:
        assert isinstance(outcome.error, TrainError)
        assert "a parameter of the model" in str(outcome.error)
        return
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, msg=name)


class Counting(torch.optim.SGD):
    """Has state that is no parameter's, and moves it without gradients, too."""

    def step(self, closure=None):
        state = self.state.setdefault("all", {"steps": 0, "rates": [torch.zeros(1)]})
        state["steps"] += 1
        state["rates"].append(state["rates"][-1] + 1)
        self.state["last"] = state["steps"]
        return super().step(closure)


@pytest.mark.parametrize("bad", [0, 2])
def test_state_of_an_optimizer_that_is_no_parameters_is_put_back(tmp_path, bad):
    seen = {}

    def train(ctx):
        model = torch.nn.Linear(4, 1)
        model, optimizer = ctx.prepare(model, Counting(model.parameters(), lr=0.1))
        for epoch in ctx.loader(TensorDataset(ROWS), batch_size=4, shuffle=False).epochs(1):
            for number, (x,) in enumerate(epoch):
                optimizer.zero_grad()
                (loss_of(model, x) * (float("nan") if number == bad else 1)).backward()
                optimizer.step()
        seen.update(optimizer.state)

    outcome = run_alone(train, {}, solo(tmp_path, guard=Guard()), print)
    assert outcome.kind == "finished", outcome
    assert seen["last"] == seen["all"]["steps"] == 5
    assert [rate.item() for rate in seen["all"]["rates"]] == [0, 1, 2, 3, 4, 5]


def test_buffers_are_left_out_with_the_parameters_of_a_further_pass(tmp_path):
    """The first pass on a batch is void, the second is not: nothing of either stays."""
    seen = []

    def train(ctx):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in ctx.loader(TensorDataset(ROWS), batch_size=4, shuffle=False).epochs(1):
            for number, (x,) in enumerate(epoch):
                seen.append({name: value.clone() for name, value in model.state_dict().items()})
                for factor in (float("nan") if number == 2 else 1, 1):
                    optimizer.zero_grad()
                    (loss_of(model, x) * factor).backward()
                    optimizer.step()

    outcome = run_alone(train, {}, solo(tmp_path, guard=Guard()), print)
    assert outcome.kind == "finished", outcome
    for name, value in seen[2].items():
        torch.testing.assert_close(seen[3][name], value, msg=name)


def test_what_follows_a_loop_that_was_left_is_no_part_of_its_void_step(tmp_path):
    """As where an epoch has a number of batches, and a scheduler a step after each epoch."""
    seen = []

    def train(ctx):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        each = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, each = ctx.prepare(model, optimizer, each)
        for epoch in ctx.loader(TensorDataset(ROWS), batch_size=4, shuffle=False).epochs(3):
            for number, (x,) in enumerate(epoch):
                optimizer.zero_grad()
                (loss_of(model, x) * (float("nan") if number == 2 else 1)).backward()
                optimizer.step()
                each.step()
                if number == 2:
                    break
            seen.append(each.last_epoch)
            each.step()

    outcome = run_alone(train, {}, solo(tmp_path, guard=Guard()), print)
    assert outcome.kind == "finished", outcome
    assert seen == [2, 5, 8]


def test_a_loop_of_which_nobody_knows_where_its_steps_begin_is_told_what_stays(tmp_path, caplog):
    def looped(boundary):
        def train(ctx):
            model = torch.nn.Linear(4, 1)
            model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for factor in (1, float("nan"), float("nan"), 1):
                if boundary:
                    ctx.boundary()
                optimizer.zero_grad()
                (loss_of(model, ROWS) * factor).backward()
                optimizer.step()

        assert run_alone(train, {}, solo(tmp_path, guard=Guard()), print).kind == "finished"
        return [r for r in caplog.records if "nothing says where it began" in r.getMessage()]

    assert not looped(boundary=True)
    assert len(looped(boundary=False)) == 1


def test_gradients_of_another_pass_on_the_batch_are_used_after_a_void_one(tmp_path):
    """Actor and critic take their steps when both have their gradients."""

    def learned(directory, bad):
        found = {}

        def train(ctx):
            torch.manual_seed(0)
            models = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models]
            ctx.prepare(*models, *optimizers)
            for epoch in ctx.loader(TensorDataset(ROWS), batch_size=4, shuffle=False).epochs(1):
                for number, (x,) in enumerate(epoch):
                    loss_of(models[0], x).backward()
                    torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
                    (loss_of(models[1], x) * (float("nan") if number == bad else 1)).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            found.update(models[0].state_dict())

        outcome = run_alone(train, {}, solo(directory, guard=Guard()), print)
        assert outcome.kind == "finished", outcome
        return found

    quiet, with_one = learned(tmp_path / "quiet", None), learned(tmp_path / "void", 2)
    for name, value in quiet.items():
        torch.testing.assert_close(with_one[name], value, msg=name)


def reports(directory, values):
    """The outcome of a run whose guard judges what it reports, a value before each step."""

    def train(ctx):
        model = torch.nn.Linear(4, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in ctx.loader(TensorDataset(ROWS), batch_size=4).epochs(1):
            for (x,), value in zip(epoch, values, strict=True):
                ctx.report(loss=value)
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    return run_alone(train, {}, solo(directory, guard=Guard(metric="loss")), print)


def test_a_report_without_a_value_is_nothing_that_the_guard_could_judge(tmp_path):
    assert reports(tmp_path, [0.5, None, 0.5, None, None, 0.5]).kind == "finished"


@pytest.mark.parametrize("value", ["low", True])
def test_what_the_guard_is_to_judge_is_a_number(tmp_path, value):
    outcome = reports(tmp_path, [value] * 6)
    assert isinstance(outcome.error, ConfigError)
    assert f"Guard(metric='loss') and ctx.report(loss={value!r})" in str(outcome.error)
