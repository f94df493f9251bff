"""Passes that add up to a step: when it is taken, and that none is after one was left."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from elastix.comm.gradients.accumulation import Accumulation
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.gradients.local_gradients import LocalGradients
from elastix.comm.gradients.slice_passes import SlicePasses
from elastix.errors import ConfigError
from elastix.train.replica.solo import run_alone
from tests.unit.train.solo import solo


class Desk:
    """An Accumulation over two parameters, and what it has said."""

    def __init__(self, *, piped=False):
        self.steps = []  # the gradients of each, as they were when it was taken
        self.passes = 0
        self.left_over = []
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        bucket = GradientBucket(self.parameters)
        bucket.renew()
        self.slices = SlicePasses()
        self.local = LocalGradients([bucket], self, piped=piped)
        self.accumulation = Accumulation(self.local, self, self.slices, self.take_step, piped=piped)

    def take_step(self):
        self.steps.append(self.gradients())

    def passed(self):
        self.passes += 1

    def carried(self, parameters):
        self.left_over.append(len(parameters))

    def gradients(self):
        return [None if p.grad is None else p.grad.tolist()[0] for p in self.parameters]

    def add(self, *values):
        for parameter, value in zip(self.parameters, values, strict=False):
            new = torch.full_like(parameter, value)
            parameter.grad = new if parameter.grad is None else parameter.grad + new


def test_ctx_backward_takes_one_step_at_its_exit_and_none_within_accumulation():
    desk = Desk()
    with desk.accumulation.adding(), desk.accumulation.step_at_exit():
        desk.add(1.0)
    assert desk.steps == []
    with desk.accumulation.step_at_exit():
        with desk.accumulation.step_at_exit():
            desk.add(2.0)
        assert desk.steps == []
        desk.add(4.0)
    assert desk.steps == [[7.0, None]]
    assert not desk.accumulation.deferred


@pytest.mark.parametrize("open_as", ["adding", "step_at_exit"])
def test_that_there_may_have_been_a_pass_is_said_whether_or_not_it_was_left(open_as):
    """All workers must say it alike, though one of them had nothing to learn from."""
    desk = Desk()
    with getattr(desk.accumulation, open_as)():
        pass
    with pytest.raises(ValueError, match="mine"), getattr(desk.accumulation, open_as)():
        raise ValueError("mine")
    assert desk.passes == 2


@pytest.mark.parametrize("ways", [{"piped": True}, {"slices": True}, {}], ids=str)
def test_who_leaves_ctx_backward_by_an_exception_takes_no_step(ways):
    desk = Desk(piped="piped" in ways)
    desk.slices.open = "slices" in ways
    desk.add(1.0)
    with pytest.raises(ValueError, match="mine"), desk.accumulation.step_at_exit():
        raise ValueError("mine")
    assert desk.accumulation.left
    assert desk.steps == []


def test_a_schedule_scales_its_own_gradients_and_none_of_those_before():
    desk = Desk(piped=True)
    with desk.accumulation.adding(), desk.accumulation.step_at_exit():
        desk.add(8.0, 8.0)
    with desk.accumulation.step_at_exit():
        assert desk.gradients() == [None, None]
        desk.add(2.0)
        for parameter in desk.parameters:
            if parameter.grad is not None:
                parameter.grad /= 2
    assert desk.steps == [[9.0, 8.0]]
    assert desk.left_over == [0]  # of the first: what it has left itself is meant to be there


def test_a_stage_that_was_given_no_gradient_is_told():
    desk = Desk(piped=True)
    with (
        pytest.raises(ConfigError, match="no parameter of this stage"),
        desk.accumulation.step_at_exit(),
    ):
        pass
    assert desk.steps == []


def test_within_slices_a_backward_without_a_pass_is_no_step():
    desk = Desk()
    desk.slices.open = True
    with desk.accumulation.step_at_exit():
        pass
    with desk.accumulation.step_at_exit():
        desk.add(1.0)
    assert desk.steps == [[1.0, None]]


@pytest.mark.parametrize("others", ["step_at_exit", "plain"])
def test_a_plain_pass_after_ctx_backward_was_left_is_refused(tmp_path, others):
    """It would have taken the gradients of the step before for its own."""
    reached = []

    def train(ctx):
        model = torch.nn.Linear(4, 3)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dataset = TensorDataset(torch.rand(32, 4), torch.arange(32) % 3)
        for epoch in ctx.loader(dataset, batch_size=8).epochs(1):
            for number, (x, y) in enumerate(epoch):
                if number == 2:
                    try:
                        with ctx.backward():
                            F.cross_entropy(model(x), y).backward()
                            raise KeyError
                    except KeyError:
                        optimizer.zero_grad()
                if number == 2 or others == "plain":
                    F.cross_entropy(model(x), y).backward()
                else:
                    with ctx.backward():
                        F.cross_entropy(model(x), y).backward()
                reached.append(number)
                optimizer.step()
                optimizer.zero_grad()

    outcome = run_alone(train, {}, solo(tmp_path), lambda _: None)
    assert outcome.kind == "raised"
    assert "left by an exception" in outcome.summary
    assert reached == [0, 1]
