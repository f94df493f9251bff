"""The controller, without Ray."""

import queue
import threading
from types import SimpleNamespace

import pytest

from elastix.config import FailureConfig
from elastix.events import Events, WorkerJoined, WorkerNotStarted
from elastix.train.control.messages import (
    Entered,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    Started,
)
from elastix.train.control.terms import RunTerms
from elastix.train.on_ray.controller import Controller
from elastix.train.record.conductor_shell import Shell


def test_a_question_to_the_store_waits_until_that_is_open():
    """Ray lets workers call a controller that it has restarted before that has looked at anything.

    One that is told of an AttributeError cannot know that it may ask again.
    """
    controller = Controller.__new__(Controller)
    controller._opened = threading.Event()
    answers = queue.Queue()
    ask = threading.Thread(target=lambda: answers.put(controller.call("places", ())), daemon=True)
    ask.start()
    ask.join(0.2)
    assert ask.is_alive()
    ledger = SimpleNamespace(places=lambda digests: {"asked": digests})
    controller._checkpoints = SimpleNamespace(store=SimpleNamespace(ledger=ledger))
    controller._opened.set()
    assert answers.get(timeout=20) == {"asked": ()}


class Played(Controller):
    """For two workers: without Ray."""

    def __init__(self, slots):
        failure = FailureConfig(replace=True)
        sizes = {"founders": 2, "min_workers": 1, "max_workers": 2, "shadows": 0}
        Shell.__init__(self, RunTerms(failure=failure, first_step_s=300.0, **sizes), Events())
        self.events, self._slots = [], slots
        self._settings = SimpleNamespace(processes=1)
        self._checkpoints = SimpleNamespace(lost=lambda holder: None)
        self._handles, self._places, self._killed, self._failed = {}, {}, [], {}

    def _start_process(self, process, slot):
        method = SimpleNamespace(remote=lambda *_: None)
        actor = SimpleNamespace(run=method, hear=method)
        handle = SimpleNamespace(actor=actor, process=process, run=process, kill=lambda: None)
        self._handles[process] = handle
        self._places[process] = slot

    def _emit(self, event, sequence=None):
        self.events.append(event)
        return True


def test_a_worker_for_which_there_is_no_room_any_more_is_not_waited_for():
    """Its node was lost when room had been counted, and a step came at that moment."""
    left = ["a slot"]
    slots = SimpleNamespace(take=lambda: left.pop() if left else None, draining=set(), more=True)
    slots.free = 0  # as is found when it is counted again
    controller = Played(slots)
    controller._do(controller._conductor.room(2, more=True, now=0.0))
    assert [*controller._conductor.workers] == [*controller._handles] == [0]
    (lost,) = controller.events
    assert isinstance(lost, WorkerNotStarted)
    assert lost.worker == 1


class Places:
    """Room for one worker, beside who is there: what was given back of it, and why."""

    draining, more = set(), True

    def __init__(self):
        self.free, self.failures = 2, []

    def take(self):
        self.free -= 1
        return "a slot"

    def give_back(self, slot, failure=""):
        self.failures.append(failure)
        self.free += 1


def test_a_gpu_that_fails_before_its_worker_came_to_prepare_is_counted_where_it_is(monkeypatch):
    """Whoever came as far may have failed by itself, or for once; others died otherwise."""
    places = Places()
    controller = Played(places)
    controller._do(controller._conductor.room(2, more=True, now=0.0))
    failed = Outcome(kind=OutcomeKind.DEVICE_FAILED, summary="CUDA error: unknown error")
    for outcome, prepared in (
        (failed, False),
        (failed, True),
        (Outcome(kind=OutcomeKind.OUT_OF_MEMORY, summary="too large"), False),
    ):
        worker = max(controller._handles)
        if prepared:
            controller._do(controller._conductor.hear(worker, Started(pid=1), 1.0))
            controller._do(controller._conductor.hear(worker, Ready(None), 1.0))
        monkeypatch.setattr("ray.get", lambda run, ended=outcome: (run, ended))
        controller._ended(controller._handles[worker])
        controller._look_for_room()
    assert places.failures == ["CUDA error: unknown error", "", ""]


@pytest.mark.parametrize(("step", "counts"), [(7, True), (8, True), (9, False), (None, True)])
def test_a_gpu_that_fails_in_the_first_step_is_counted_where_others_train_on(
    monkeypatch, step, counts
):
    """Each worker on it costs the others a recovery, and so it would go on for ever."""
    places = Places()
    controller = Played(places)
    lead = controller._conductor
    controller._do(lead.room(2, more=True, now=0.0))
    for worker in (0, 1):
        controller._do(lead.hear(worker, Started(pid=1), 1.0))
        controller._do(lead.hear(worker, Ready(None), 1.0))
    controller._do(lead.hear(0, Entered(1), 1.0))
    joined = WorkerJoined(worker=1, generation=1, step=7, copy_s=0.1, copy_bytes=1)
    lead.state.began.clear()
    if step is not None:
        controller._do(lead.hear(1, RecordEvents(((None, joined),)), 2.0))
    failed = Outcome(kind=OutcomeKind.DEVICE_FAILED, summary="CUDA error", step=step or 99)
    monkeypatch.setattr("ray.get", lambda run: (run, failed))
    controller._ended(controller._handles[1])
    controller._look_for_room()
    assert places.failures == (["CUDA error"] if counts else [""])
