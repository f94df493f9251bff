"""The objects of one worker, where a process has had several."""

import gc

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
