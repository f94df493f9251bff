"""The controller of crews where nodes are to be taken away: without Ray, whose part is played."""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from elastix.config import FailureConfig
from elastix.events import (
    Events,
    GenerationFormed,
    StepCommitted,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerStarted,
)
from elastix.train.control.crews import Crews
from elastix.train.control.messages import (
    Disband,
    Entered,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    Started,
)
from elastix.train.control.run_state import RunState
from elastix.train.control.terms import RunTerms
from elastix.train.on_ray.crew_controller import CrewController
from elastix.train.on_ray.takeover import Presence
from elastix.train.record.conductor_shell import Shell


class Actor:
    """Notes the calls that are made on it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *given: self.calls.append((method, *given)))


@dataclass
class Process:
    """What the controller holds of one."""

    process: int
    node: str
    actor: Actor = field(default_factory=Actor)
    pid: int = 0
    run: object = None
    over: bool = False
    ended: str = ""

    def end(self):
        self.ended = "ended"

    def kill(self):
        self.ended = "killed"


@dataclass(frozen=True)
class Slot:
    number: int
    node: str


class Slots:
    """Room for processes: one for each of these nodes, and none on one that is drained."""

    coming = 0

    def __init__(self, nodes):
        self.unused = [Slot(number, node) for number, node in enumerate(nodes)]
        self.draining = set()
        self.failures = []

    def free(self):
        return [slot for slot in self.unused if slot.node not in self.draining]

    def take(self, slot):
        self.unused.remove(slot)

    def give_back(self, slot, failure=""):
        self.failures += [failure] if failure else []
        self.unused.append(slot)

    def avoid(self, node):
        self.unused = [slot for slot in self.unused if slot.node != node]
        return True


class Played(CrewController):
    """Crews of two, on these nodes: process after process."""

    def __init__(self, nodes, spares=0):
        failure = FailureConfig(replace=True)
        workers = len(nodes) // 2 - spares
        terms = RunTerms(
            founders=workers,
            min_workers=1,
            max_workers=workers,
            failure=failure,
            first_step_s=300.0,
            shadows=0,
        )
        Shell.__init__(self, terms, Events())
        self.events, self.started = [], []
        self._plan = SimpleNamespace(failure=failure)
        self._settings = SimpleNamespace(processes=2)
        self._checkpoints = SimpleNamespace(lost=lambda holder: None, poke=lambda: None)
        self._crews, self._slots = Crews(2, {}, again=False), Slots(nodes)
        self._together, self._unwritable, self._unused = False, False, []
        self._handles, self._places, self._killed, self._failed = {}, {}, [], {}
        self._look_for_room()
        for worker in range(workers):
            self.prepares(worker)
        for worker in range(workers):
            self.says(worker, Entered(1))

    def _start_process(self, process, slot):
        self._handles[process] = Process(process, slot.node)
        self._places[process] = slot
        self.started.append(self._handles[process])

    def _emit(self, event, sequence=None):
        self.events.append(event)
        return True

    def prepares(self, worker):
        first = self._crews.of(worker)[0]
        self._heed(first, worker, Started(pid=1, device="cpu", node=self.started[first].node))
        self._heed(first, worker, Ready(("host", worker)))

    def says(self, worker, message):
        self._heed(self._crews.of(worker)[0], worker, message)

    def comes_to(self, worker, kind, *processes):
        outcome = Outcome(kind=kind, generation=1, step=3)
        for process in processes:
            self._through(self._handles[process], worker, outcome, time.monotonic())

    def loses(self, process):
        self._lost(self._handles[process], time.monotonic())

    def looks(self):
        self._look_for_room()
        self._do(self._conductor.tick(time.monotonic()))

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def controller():
    """Worker 0 is on node a; worker 1 has its first place there, and its second on node b."""
    played = Played(["b", "a", "a", "a"])  # the last slot is taken first
    assert [process.node for process in played.started] == ["a", "a", "a", "b"]
    assert [event.members for event in played.of(GenerationFormed)] == [(0, 1)]
    return played


def test_a_worker_leaves_whose_second_place_is_on_a_node_that_is_drained(controller):
    controller.looks()
    assert controller.of(GenerationFormed)[1:] == []
    controller._slots.draining = {"b"}
    controller.looks()
    (left,) = controller.of(GenerationFormed)[1:]
    assert (left.members, left.cause) == ((0,), "leave")
    assert [process.ended for process in controller.started] == [""] * 4  # it takes the step first


def test_one_that_has_left_is_ended_and_its_place_on_that_node_is_not_used(controller):
    controller._slots.draining = {"b"}
    controller.looks()
    controller.says(0, Entered(2))
    controller.comes_to(1, OutcomeKind.LEFT, 3, 2)
    controller.looks()
    (event,) = controller.of(WorkerLeft)
    assert (event.worker, event.cause) == (1, "draining")
    assert controller.of(WorkerLost) == []
    assert [process.ended for process in controller.started] == ["", "", "ended", "ended"]
    assert [slot.node for slot in controller._slots.free()] == ["a"]
    assert controller._conductor.workers == {0}


def test_a_free_process_on_a_node_that_is_drained_is_ended(controller):
    """Its worker is lost. On another node it waits for a mate."""
    controller.loses(2)
    mate = controller.started[3]
    assert ("hear", 1, Disband()) in mate.actor.calls
    controller._slots.unused.clear()  # no other process can be started
    controller.comes_to(1, OutcomeKind.FREE, 3)
    controller.looks()
    assert (mate.ended, controller._crews.free) == ("", [3])
    controller._slots.draining = {"b"}
    controller.looks()
    assert (mate.ended, controller._crews.free) == ("killed", [])
    assert [slot.node for slot in controller._slots.unused] == ["b"]
    assert [event.worker for event in controller.of(WorkerLost)] == [1]


@pytest.mark.parametrize("kind", [OutcomeKind.DEVICE_FAILED, OutcomeKind.OUT_OF_MEMORY])
def test_a_process_that_is_of_no_use_is_ended_and_another_takes_its_place(controller, kind):
    """One that reports it never comes out by itself, nor would its GPU do for another worker."""
    controller.comes_to(1, kind, 3)
    failed, mate = controller.started[3], controller.started[2]
    assert failed.ended == "killed"
    assert ("hear", 1, Disband()) in mate.actor.calls
    assert [(event.worker, event.cause) for event in controller.of(WorkerLost)] == [(1, kind)]
    controller.comes_to(1, OutcomeKind.FREE, 2)
    controller.says(0, Entered(2))
    controller.says(0, RecordEvents(((1, step(1, generation=2)),)))
    assert controller._crews.of(2) == [2, 4]


@pytest.mark.parametrize("begun", [True, False])
def test_a_gpu_that_fails_before_its_worker_has_begun_is_counted_where_it_is(
    controller, begun, monkeypatch
):
    """A process of a worker that never came to `prepare`."""
    if not begun:
        controller._conductor.state.started.discard(1)
    outcome = Outcome(kind=OutcomeKind.DEVICE_FAILED, generation=1, step=3, summary="CUDA error")
    monkeypatch.setattr("ray.get", lambda _: (1, outcome))
    controller._ended(controller.started[3])
    assert controller.started[3].ended == "killed"
    assert controller._slots.failures == ([] if begun else ["CUDA error"])


def test_room_on_a_node_that_is_refused_counts_no_more_though_its_worker_was_given_up_before(
    controller, monkeypatch
):
    """The next worker would be started in it, and the controller fail."""
    controller._slots.unused = [Slot(7, "refused")]
    controller._look_for_room()
    assert controller._unused
    outcome = Outcome(kind=OutcomeKind.OTHER_CODE, node="refused")
    monkeypatch.setattr("ray.get", lambda _: (5, outcome))
    controller._ended(Process(99, "refused"))
    assert not controller._unused


def test_nobody_leaves_for_a_node_of_others(controller):
    controller._slots.draining = {"c"}
    controller.looks()
    assert len(controller.of(GenerationFormed)) == 1
    assert [process.ended for process in controller.started] == [""] * 4


@pytest.mark.parametrize(("replace", "unused"), [(False, 2), (True, 0)])
def test_room_of_lost_crews_stays_empty_under_another_controller(controller, replace, unused):
    """Of two processes of the lost worker one is at work in another; a third could not begin."""
    state = controller._conductor.state = RunState()
    state.take(WorkerStarted(worker=0, pid=1, node="a", device="", mates=(("b", 2),)))
    state.take(WorkerStarted(worker=1, pid=3, node="a", device="", mates=(("b", 4),)))
    state.take(WorkerLost(worker=0, rank=0, generation=1, cause="died"))
    state.take(WorkerStarted(worker=2, pid=5, node="a", device="", mates=(("b", 2),)))
    state.take(WorkerNotStarted(worker=3, cause="died"))
    given = []
    controller._slots.take_over = lambda used, unused: given.append(unused)
    controller._plan.failure = FailureConfig(replace=replace)
    there = [("a", 3), ("b", 4), ("a", 5), ("b", 2)]
    controller._handles = {n: Process(n, node, pid=pid) for n, (node, pid) in enumerate(there)}
    controller._take_slots_over()
    assert given == [unused]


# ---------------------------------------------------------------------------- spares


@pytest.fixture
def spared():
    """Workers 0 and 1, and a spare that is ready."""
    played = Played(["a"] * 6, spares=1)
    assert len(played.started) == 4
    played.looks()  # the group has come about
    assert played._crews.of(2) == [4, 5]
    played.prepares(2)
    assert [event.members for event in played.of(GenerationFormed)] == [(0, 1)]
    return played


def test_a_spare_is_let_in_before_the_mates_of_the_lost_process_are_out(spared):
    spared.loses(3)
    spared.says(0, Entered(2))
    formed = [(event.members, event.cause) for event in spared.of(GenerationFormed)]
    assert formed[1:] == [((0,), "loss"), ((0, 2), "join")]
    assert len(spared.started) == 6  # no process was started for it


def test_mates_of_the_lost_process_and_a_fresh_one_are_the_next_spare(spared):
    spared.loses(3)
    spared.says(0, Entered(2))
    spared.says(2, Entered(3))
    spared.comes_to(1, OutcomeKind.FREE, 2)
    assert len(spared.started) == 6  # the survivors come first
    spared.says(0, RecordEvents(((1, step(1, generation=3)),)))
    assert spared._crews.of(3) == [2, 6]
    spared.prepares(3)
    assert spared._conductor.membership.members == (0, 2)


def test_a_spare_that_loses_a_process_is_replaced_and_the_group_stays_as_it_is(spared):
    spared.loses(5)
    assert [event.worker for event in spared.of(WorkerLost)] == [2]
    assert ("hear", 2, Disband()) in spared.started[4].actor.calls
    spared.comes_to(2, OutcomeKind.FREE, 4)
    spared.says(0, RecordEvents(((1, step(1, generation=1)),)))
    assert spared._crews.of(3) == [4, 6]
    assert len(spared.of(GenerationFormed)) == 1


def present(process, worker, place, *, ready):
    return Presence(
        process=process,
        worker=worker,
        place=place,
        broken=False,
        slot=Slot(process, "a"),
        pid=1,
        node="a",
        device="cpu",
        generation=0,
        catch_up=None,
        ready=ready and not place,
        holder=False,
        shadow=False,
        operation=-1,
        lifeline="",
        noticed=False,
        left_out={},
    )


def test_crews_that_are_not_up_to_prepare_go_on_with_no_other_controller(controller):
    """Their processes meet by the one that was killed, and would end the run with an error."""
    controller._plan.scaling = SimpleNamespace(processes=2)
    controller._settings.left_out = {}
    there = [present(n, n // 2, n % 2, ready=n < 2) for n in range(4)]
    assert [one.worker for one in controller._find({0: None, 3: None}, there)] == [0]
    assert [process.ended for process in controller.started] == ["", "", "killed", "killed"]


def step(number, generation):
    return StepCommitted(step=number, generation=generation, world_size=2, batches=())
