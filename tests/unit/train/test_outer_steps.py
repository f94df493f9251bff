"""When workers that take steps by themselves take one together, and what is refused between."""

from types import SimpleNamespace

import pytest
import torch

from elastix.errors import ConfigError
from elastix.train.replica.outer_steps import OuterSteps


class Loader:
    number, pending, in_last_epoch = 0, False, False


class Desk:
    """A worker with a loader, and what was done in order."""

    def __init__(self, every=2, step=0):
        self.done = []
        self.loader = Loader()
        self.tracked = SimpleNamespace(loaders=[self.loader], void=False)
        note = lambda *what: lambda *given: self.done.append((*what, *given))  # noqa: E731
        copies = SimpleNamespace(finish=note("copied"))
        window = SimpleNamespace(drawn=note("split"))
        steps = SimpleNamespace(window=window, passed=note("passed"), step=step)
        parts = SimpleNamespace(me=1, tracked=self.tracked, copies=copies)
        self.outer = OuterSteps(parts, steps, every)
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.reducer = SimpleNamespace(
            optimizer=torch.optim.SGD([self.parameter], lr=1.0),
            watch=note("watched"),
            step=note("step"),
        )

    def prepared(self):
        self.outer.reducer = self.reducer
        return self

    def draw(self, ratio=None):
        self.outer.asked(0)
        self.outer.drawn(0, 8, ratio or {1: 8})
        self.loader.pending = True

    @property
    def together(self):
        return self.done.count(("step",))


def test_the_outer_step_comes_before_the_batch_after_so_many():
    desk = Desk(every=2).prepared()
    counts = []
    for _ in range(5):
        desk.draw()
        counts.append(desk.together)
    assert counts == [0, 0, 1, 1, 2]
    assert desk.done.index(("copied",)) < desk.done.index(("step",))


def test_what_a_worker_computes_on_placeholders_counts_for_nothing():
    desk = Desk().prepared()
    desk.draw({1: 8})
    assert not desk.tracked.void
    desk.draw({0: 8})
    assert desk.tracked.void


def test_there_is_none_before_prepare_and_none_of_no_batch():
    desk = Desk()
    desk.loader.pending = True
    desk.outer.step()
    assert desk.together == 0
    desk.prepared()
    desk.loader.pending = False
    desk.outer.step()
    assert desk.together == 0


def test_an_epoch_of_the_loader_that_leads_ends_with_one():
    desk = Desk(every=9).prepared()
    desk.draw()
    assert desk.outer.exhausted(desk.loader)
    assert desk.together == 1


def test_one_that_is_added_up_does_not():
    desk = Desk(every=9).prepared()
    with desk.outer.adding():
        desk.draw()
        assert not desk.outer.exhausted(desk.loader)
    assert desk.together == 0


def test_a_state_that_comes_ends_what_was_counted():
    desk = Desk(every=2).prepared()
    desk.draw()
    desk.draw()
    desk.outer.over()
    desk.draw()
    assert desk.together == 0


def test_inner_optimizers_are_watched_and_the_outer_one_is_not():
    desk = Desk().prepared()
    desk.outer.before_optimizer(desk.reducer.optimizer)
    assert desk.done == [("copied",)]
    desk.loader.pending = True
    desk.parameter.grad = torch.ones(2)
    desk.outer.before_optimizer(desk.optimizer)
    assert desk.done[1:] == [("copied",), ("watched", desk.optimizer)]


def test_a_step_with_gradients_of_no_batch_is_refused():
    desk = Desk().prepared()
    desk.outer.before_optimizer(desk.optimizer)
    desk.parameter.grad = torch.ones(2)
    with pytest.raises(ConfigError, match="every_steps"):
        desk.outer.before_optimizer(desk.optimizer)


def test_without_a_loader_nobody_counts_batches():
    with pytest.raises(ConfigError, match=r"ctx\.boundary"):
        Desk().prepared().outer.asked(None)


def test_a_run_that_has_only_added_up_has_not_trained():
    desk = Desk().prepared()
    with desk.outer.adding():
        desk.draw()
    with pytest.raises(ConfigError):
        desk.outer.look_if_none()
    desk = Desk(step=1).prepared()
    with desk.outer.adding():
        desk.draw()
    desk.outer.look_if_none()
