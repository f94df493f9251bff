"""The objects of one worker, where a process has had several."""

import gc
from dataclasses import replace

import torch
from torch.optim import optimizer as hooks

from elastix.train.replica.tracked_objects import TrackedObjects


def tracked():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = TrackedObjects()
    live.prepare([model, optimizer], torch.device("cpu"))
    return live, model, optimizer


def test_an_optimizer_takes_its_step_where_earlier_runs_of_the_process_are_over():
    before = len(hooks._global_optimizer_pre_hooks)
    for _ in range(3):
        live, model, optimizer = tracked()
        others = [tracked(), tracked()]
        del others
        gc.collect()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del live, model, optimizer
    gc.collect()
    tracked()
    assert len(hooks._global_optimizer_pre_hooks) <= before + 2


def test_an_optimizer_that_is_tracked_late_goes_on_with_its_moments() -> None:
    """As it has to in a run that is continued, and on a joiner."""

    def made() -> tuple[TrackedObjects, torch.nn.Linear, torch.optim.Adam]:
        live, model = TrackedObjects(), torch.nn.Linear(2, 2)
        live.prepare([model], torch.device("cpu"))
        return live, model, torch.optim.Adam(model.parameters())

    before, model, optimizer = made()
    before.track({"late": optimizer})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    after, _, again = made()
    after.adopt(before.capture({}))
    after.track({"late": again})
    for live, restored in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert torch.equal(live["exp_avg"], restored["exp_avg"])


class Unread(dict):
    """Tensors of a store, of which a process reads those alone that it has a part of."""

    def items(self):
        raise AssertionError("all of them were read")

    values = items


def test_of_a_stored_state_no_more_is_read_than_a_process_asks_for() -> None:
    live, _, _ = tracked()
    stored = replace(live.capture({}), tensors=Unread())
    assert live.take_passing(stored) is stored


def test_what_only_an_outer_optimizer_holds_is_not_copied_late() -> None:
    """The train function changes it when it likes, an average of weights for one."""
    live, model, average = TrackedObjects(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live.prepare([model, average, optimizer], torch.device("cpu"))
    both = [*model.parameters(), *average.parameters()]
    live.keep_outer(torch.optim.SGD(both, lr=0.7))
    assert live.late(live.capture({})) == {"weight", "bias"}
