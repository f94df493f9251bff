"""What a worker makes of a State that it is given, without a group."""

from types import SimpleNamespace

import pytest
import torch

from elastix.train.replica.tracked_objects import TrackedObjects
from elastix.train.replica.worker_state import WorkerState


@pytest.mark.parametrize("at_a_boundary", [True, False])
def test_what_comes_after_a_state_is_undone_only_where_it_was_before_it_too(at_a_boundary):
    """A train function halves weights between two loaders, where no step is taken."""
    tracked, model = TrackedObjects(), torch.nn.Linear(2, 1)
    tracked.prepare([model], torch.device("cpu"))
    parts = SimpleNamespace(
        settings=SimpleNamespace(alone=False, crew=None, exact=True),
        driver=SimpleNamespace(watching=False, rank=0),
        place=0,
        tracked=tracked,
        schedule=SimpleNamespace(stored=lambda _: None),
        copies=None,
        replicated=SimpleNamespace(sequence=0),
    )
    steps = SimpleNamespace(step=3, load_state_dict=lambda _: None, rebase=lambda: None)
    state = WorkerState(parts, steps, None, None)
    counts = {"step": 3, "stored_step": 0, "serial": 0, "reports": 0}
    given, weights = tracked.capture(counts).clone(), model.weight.detach().clone()
    if at_a_boundary:
        state.look_at_beginning()
    state.adopt(given)
    with torch.no_grad():
        model.weight.mul_(0.5)
    state.look_at_beginning()
    tracked.close()
    assert torch.equal(model.weight, weights * (0.5 if at_a_boundary else 1.0))
