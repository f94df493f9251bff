"""What a worker makes of a State that it is given, without a group."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastix.events import BatchShares, StepCommitted
from elastix.state import State
from elastix.store import Store
from elastix.train.replica.replicated_events import ReplicatedEvents
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


def of(parts_of_it, tracked, replicated):
    """A worker's State, of which the rest is made up."""
    parts = SimpleNamespace(
        settings=SimpleNamespace(alone=False, crew=None, exact=False),
        driver=SimpleNamespace(watching=False, rank=0, check_within=lambda **_: None),
        me=0,
        place=0,
        tracked=tracked,
        schedule=SimpleNamespace(stored=lambda _: None, stored_step=0),
        copies=None,
        replicated=replicated,
    )
    return WorkerState(parts, parts_of_it, None, None)


def test_events_that_the_journal_may_not_have_go_with_the_state():
    told = []
    mine, theirs = (
        ReplicatedEvents(
            lambda event, number: told.append((number, event)), first, lambda: 7, lambda: 7
        )
        for first in (lambda: False, lambda: True)
    )
    checks = SimpleNamespace(vouches_for=lambda me: me)
    steps = SimpleNamespace(step=3, load_state_dict=lambda _: None, state_dict=lambda: {"step": 3})
    steps.checks = checks
    spans = BatchShares(loader=0, epoch=0, shares={4: ((0, 6),)}, owed=((6, 8),))
    event = StepCommitted(step=3, generation=2, world_size=1, batches=(spans,))
    mine.emit(event)
    tracked = TrackedObjects()
    tracked.prepare([torch.nn.Linear(2, 1)], torch.device("cpu"))
    given = of(steps, tracked, mine).for_joiners()
    of(steps, tracked, theirs).adopt(replace(given, meta=json.loads(json.dumps(given.meta))))
    tracked.close()
    theirs.send_again()
    assert told == [(0, event)]
    assert theirs.sequence == 1


@pytest.mark.parametrize("begins", ["at its pause", "in place of an ancestor"])
def test_a_trial_that_goes_back_leaves_out_what_the_guard_has_since(tmp_path, begins):
    """It drew those samples once more, and the journal had it that nobody did."""
    cursor, taken = {"position": 40, "owed": [], "left_out": [[0, 4]]}, []
    there = State({}, {"step": 10, "@loader/0": cursor})
    paused = begins == "at its pause"
    parts = SimpleNamespace(
        settings=SimpleNamespace(alone=False, exact=False, run="r", left_out={0: ((44, 48),)}),
        driver=None,
        tracked=SimpleNamespace(take_place=lambda state, _, **__: taken.append(state), passes=0.0),
        schedule=SimpleNamespace(stored=lambda _: None),
        copies=None,
        link=SimpleNamespace(open_store=lambda: Store(tmp_path / "store")),
    )
    steps = SimpleNamespace(
        step=10, load_state_dict=lambda _: None, window=SimpleNamespace(forget=lambda: None)
    )
    source = SimpleNamespace(
        resume=lambda: there if paused else None,
        place=lambda: None if paused else (there, {}, True),
    )
    worker = WorkerState(parts, steps, None, source)
    worker.adopt = taken.append
    worker.begin()
    assert [state.meta["@loader/0"]["left_out"] for state in taken] == [[[0, 4], [44, 48]]]
    assert cursor["left_out"] == [[0, 4]]


@pytest.mark.parametrize("before", [0, 2])
def test_who_leaves_a_model_says_whether_it_has_heard_all_reports(before):
    tracked, left = TrackedObjects(), []
    tracked.prepare([torch.nn.Linear(2, 1)], torch.device("cpu"))
    steps = SimpleNamespace(step=3, load_state_dict=lambda _: None, state_dict=lambda: {"step": 3})
    state = of(steps, tracked, SimpleNamespace(sequence=0))
    state._inheritance = SimpleNamespace(leave=lambda model, _: left.append(model))
    counts = {"step": 3, "stored_step": 0, "serial": 0, "reports": before}
    state.adopt(tracked.capture(counts).clone())
    state._schedule.reported = lambda *_: None
    state._settings.until_reports = None
    state.report({"score": 1.0})
    state.adopt(tracked.capture({**counts, "reports": before + 1}).clone())  # it goes back
    state._bequeath("final")
    tracked.close()
    assert [(one.metrics, one.heard_all) for one in left] == [({"score": 1.0}, before == 0)]
